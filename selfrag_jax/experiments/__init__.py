"""Experiments: which phases they train, which conditions they measure, and what they report."""
