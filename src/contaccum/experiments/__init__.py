"""Runs that compare: the paper's tables and figures, and the bench of time and memory."""
