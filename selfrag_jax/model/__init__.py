"""The language model: a hybrid of attention and Mamba-2 layers with one cache entry point."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
