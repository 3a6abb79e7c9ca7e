"""The memory: a ring of embeddings, the top-k over it, and a store of text with metadata and a log."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
