"""Language models that remember, in JAX and Flax.

Each name is imported on its first use: importing the package imports neither JAX nor TensorFlow.
The subpackages export more names: `from selfrag_jax.memory import init_memory`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
