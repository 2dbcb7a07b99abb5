"""The method in sentence-transformers: losses, keys of texts, trainer and callback, checkpoints."""
