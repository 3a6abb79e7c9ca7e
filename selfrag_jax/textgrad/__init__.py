"""Textual automatic differentiation (TextGrad, arXiv 2406.07496) and Gradient-RAG, an optimizer with a memory.

  import selfrag_jax.textgrad as tg

Names, argument order and semantics are TextGrad's; docs/textgrad.md says where they differ, and why. Each name is
imported on its first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
