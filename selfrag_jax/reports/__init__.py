"""Figures, pages and thresholds of the experiments' reports."""
