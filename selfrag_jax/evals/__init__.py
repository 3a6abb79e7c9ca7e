"""Experiments over trained models, and their reports."""
