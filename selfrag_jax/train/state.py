"""The training state on a mesh, and the compiled update that advances it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from selfrag_jax.mesh import abstract, shardings_of
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.typing import Array, Params, PRNGKey

Init = Callable[[PRNGKey], Params]  # draws the parameters of a model, with the names of their logical axes


@struct.dataclass
class TrainState:
  """Step (the position in the data), parameters, optimizer state, and random key; a step folds its number into it."""

  step: Array
  params: Params
  opt_state: Any
  key: PRNGKey


def abstract_state(init: Init, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """Return the state as ShapeDtypeStructs with the shardings of `mesh`, to restore or to compile ahead of time."""
  boxed = jax.eval_shape(lambda: _create(init, optimizer, jax.random.key(0)))
  return abstract(nn.unbox(boxed), shardings_of(boxed, mesh))


def state_shardings(init: Init, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """Return the sharding of each leaf of the state on `mesh`."""
  return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(init, optimizer, mesh))


def init_state(init: Init, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
  """Draw a fresh state, each shard on the device that holds it."""
  shardings = state_shardings(init, optimizer, mesh)
  create = jax.jit(lambda key: nn.unbox(_create(init, optimizer, key)), out_shardings=shardings)
  return create(jax.random.key(seed))


def abstract_params(init: Init, mesh: Mesh) -> Params:
  """Return the parameters as ShapeDtypeStructs with the shardings of `mesh`."""
  boxed = jax.eval_shape(lambda: init(jax.random.key(0)))
  return abstract(nn.unbox(boxed), shardings_of(boxed, mesh))


def param_shardings(config: ModelConfig, mesh: Mesh) -> Any:
  """Return the sharding of each parameter on `mesh`."""
  return jax.tree.map(lambda leaf: leaf.sharding, abstract_params(partial(init_params, config), mesh))


def state_from_params(
  params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, init: Init, seed: int
) -> TrainState:
  """Start a phase from given parameters with a fresh optimizer."""
  shardings = state_shardings(init, optimizer, mesh)
  create = lambda params, key: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)
  return jax.jit(create, out_shardings=shardings)(params, jax.random.key(seed))


def _create(init: Init, optimizer: optax.GradientTransformation, key: PRNGKey) -> TrainState:
  init_key, step_key = jax.random.split(key)
  params = init(init_key)
  return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), step_key)


class Mean(NamedTuple):
  """A metric before its division by a weight of its own."""

  total: Array
  weight: Array


class LossSums(NamedTuple):
  """A loss before its division: sums over the tokens of a batch, so that micro-batches add up to the whole batch."""

  loss: Array
  weight: Array  # the divisor of the loss, its gradient and the metrics without their own
  metrics: Mapping[str, Array | Mean]


def _mean(metric: Array | Mean, weight: Array) -> Array:
  return metric.total / jnp.maximum(metric.weight, 1) if isinstance(metric, Mean) else metric / weight


def micro_batches(batch: Any, n: int) -> Any:
  """Split the rows of a batch into `n` parts along a new first axis.

  A part has rows of every device: the axis of the batch stays split over them.
  """
  return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x) // n, n, *x.shape[1:]), 1, 0), batch)


def by_micro_batch(read: Callable[[Params, Any], Any], params: Params, batch: Any, n: int) -> Any:
  """Return the arrays of `read(params, batch)`, which have a row for each row of the batch, read in `n` parts.

  The activations of a part are computed again for the gradient: they do not bound the batch, and a loss among all of
  its rows has the exact gradient. This is gradient caching (arXiv 2101.06983) by rematerialisation.
  """
  if n == 1:
    return read(params, batch)
  of_parts = jax.lax.map(jax.checkpoint(lambda rows: read(params, rows)), micro_batches(batch, n))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), of_parts)


def make_update(
  loss: Callable[..., LossSums],
  optimizer: optax.GradientTransformation,
  accumulate: int = 1,
  shardings: TrainState | None = None,
  count: Callable[[Any], Array] | None = None,
) -> jax.stages.Wrapped:
  """Return the jitted step `(state, batch, *constants) -> (state, metrics)`; the state is donated.

  `loss(params, batch, *constants)` gives sums; with `accumulate` > 1 the sums of micro-batches are added before the one
  division, and those whose `count(micro-batch)` of tokens is 0 are left out. `shardings` are those of the state before
  and after: the compiler alone might choose others, and the next step would have to be compiled for them.
  """

  def sums_and_grads(params: Params, batch: Any, *constants: Any) -> tuple[LossSums, Params]:
    def scalar(params: Params) -> tuple[Array, LossSums]:
      with jax.named_scope("loss"):
        sums = loss(params, batch, *constants)
      return sums.loss, sums

    (_, sums), grads = jax.value_and_grad(scalar, has_aux=True)(params)
    return sums, grads

  def update(state: TrainState, batch: Any, *constants: Any) -> tuple[TrainState, dict[str, Array]]:
    if accumulate == 1:
      sums, grads = sums_and_grads(state.params, batch, *constants)
    else:
      micro = micro_batches(batch, accumulate)
      one = lambda xs: sums_and_grads(state.params, xs, *constants)
      zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(one, jax.tree.map(lambda x: x[0], micro)))
      add = lambda total, xs: jax.tree.map(jnp.add, total, one(xs))
      step = add if count is None else _unless_empty(add, count)
      (sums, grads), _ = jax.lax.scan(lambda total, xs: (step(total, xs), None), zeros, micro)
    weight = jnp.maximum(sums.weight, 1)
    grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), grads)
    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
    sums_of = {"loss": sums.loss, **sums.metrics}
    metrics = {name: _mean(value, weight) for name, value in sums_of.items()} | {"grad_norm": optax.tree.norm(grads)}
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

  return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _unless_empty(add: Callable[[Any, Any], Any], count: Callable[[Any], Array]) -> Callable[[Any, Any], Any]:
  return lambda total, xs: jax.lax.cond(count(xs) > 0, add, lambda total, _: total, total, xs)
