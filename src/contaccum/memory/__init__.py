"""Training within a memory limit: hold the limit, plan for it, and go on with smaller micro-batches when it is reached."""
