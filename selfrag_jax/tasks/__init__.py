"""Tasks: questions for a model, the documents that it may look up, and the right answers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
