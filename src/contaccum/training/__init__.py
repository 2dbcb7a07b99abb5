"""The training run: from a configuration to a run folder with model, logs and diagnostics."""
