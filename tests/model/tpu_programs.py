"""Programs of a model for TPUs that are not there."""

import jax
import jax.numpy as jnp

from selfrag_jax.aot.chips import topology
from selfrag_jax.mesh import absent, make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params, packed_states


def text_of_gradient(model: ModelConfig, sizes: tuple[int, int, int], time: int, sequence: int = 1) -> str:
  """Compile the gradient of a model for four chips of v5e and return the text of the program."""
  with absent(topology("v5e:2x2")[1]):
    mesh = make_mesh(*sizes, sequence=sequence)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    with jax.set_mesh(mesh):
      loss = lambda params, tokens: packed_states(model, params, tokens).astype(jnp.float32).sum()
      lowered = jax.jit(jax.grad(loss)).lower(params, jax.ShapeDtypeStruct((4, time), jnp.int32))
      return lowered.compile().as_text()
