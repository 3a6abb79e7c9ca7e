"""Decoding: sampling, and rollouts whose retrieval is part of the compiled program."""
