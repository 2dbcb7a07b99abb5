"""Encoders: building pairs of them, and running them faster (compiled, without padding, as CUDA graphs)."""
