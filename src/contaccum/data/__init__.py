"""Training sets and collections, read from the field's own file formats."""
