"""Predicts the peak memory of an update without a GPU: recordings of towers and loss, played to a model of PyTorch's allocator."""
