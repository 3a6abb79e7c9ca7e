"""Experiments: the phases that each trains, the conditions that it measures, and its report."""
