"""Programs that people talk to."""
