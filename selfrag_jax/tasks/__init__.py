"""Tasks: what a model is asked, what it may look up, and what counts as right."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
