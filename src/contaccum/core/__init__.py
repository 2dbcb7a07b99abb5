"""The method: dual-bank InfoNCE, the bank, drift correction, and the criterion that puts them together. Imports torch and nothing else."""
