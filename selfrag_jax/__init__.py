"""Language models that remember, in JAX and Flax.

Importing the package does no work: no JAX operation, no TensorFlow import, no file. Import the part that is needed:
`from selfrag_jax.memory import state`.
"""

__version__ = "0.1.0"
