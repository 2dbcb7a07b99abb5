"""Run folders as tables, plots and one self-contained page."""
