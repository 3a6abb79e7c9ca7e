"""Text in, token ids out: tokenizers, special tokens and the rendering of conversations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
