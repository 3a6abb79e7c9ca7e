"""Decoding: sampling, and rollouts whose retrieval is part of the compiled program."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
