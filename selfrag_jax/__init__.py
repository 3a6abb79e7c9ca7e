"""Language models that remember, in JAX and Flax.

The names below are imported when they are first asked for: importing the package imports neither JAX nor TensorFlow.
Each package has more: `from selfrag_jax.memory import init_memory`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
