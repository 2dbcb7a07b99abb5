"""Runs that compare: the quickstart, the paper's tables and figures, and the bench of time and memory."""
