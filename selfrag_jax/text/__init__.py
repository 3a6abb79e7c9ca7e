"""Tokenizers, special tokens, chunking of texts, and the rendering of conversations as token ids."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
