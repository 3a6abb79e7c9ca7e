"""Training: verified checkpoints, telemetry, and one loop over phases."""
