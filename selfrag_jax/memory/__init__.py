"""The memory: a ring of embeddings, the top-k search over it, and a store of texts with metadata and a log."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
