"""What every room may use: errors, files written as a whole, provenance, sizes. Nothing of retrieval or training."""
