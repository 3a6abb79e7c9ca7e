"""Tasks: what a model is asked, what it may look up, and what counts as right."""
