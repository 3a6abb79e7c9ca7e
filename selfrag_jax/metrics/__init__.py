"""Pure functions: scores of answers, rankings and accuracy curves, with confidence intervals and paired tests."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
