"""From files as they are found to training sets and collections: readers, `prepare`, `mine`, and whether a passage holds an answer."""
