"""The paper's tables and figures: what each varies, what it draws, and one runner for all."""
