"""The language model: a stack of blocks by `block_pattern`, scanned for training, unrolled for decoding.

Everything is a pure function of the parameters: `LM(config).apply(params, …)`. Training scans each repeated unit over
stacked parameters, so that compile time does not grow with depth. Decoding runs the layers one by one over parameters
that `unstack` has taken apart: scanning over a cache would copy it at every step.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from selfrag_jax.mesh import DECODING_RULES, constrain, platform, shardings_of
from selfrag_jax.model.attention import Attention
from selfrag_jax.model.cache import Cache, KVCache, SSMCache
from selfrag_jax.model.config import LayerSpec, ModelConfig, segments
from selfrag_jax.model.layers import MIXED, MLP, WEIGHTS, RMSNorm, accumulation_dtype, weight
from selfrag_jax.model.mamba import Mamba
from selfrag_jax.model.products import product
from selfrag_jax.model.sequence import is_split, on_parts
from selfrag_jax.model.ssd_tpu import LANES, SUBLANES
from selfrag_jax.model.vocabulary import look_up, whole
from selfrag_jax.ragged import length_mask
from selfrag_jax.typing import Array, Params, PRNGKey

REMAT_POLICIES = {
  "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
  "mixed": jax.checkpoint_policies.save_only_these_names(MIXED),
  "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[MIXED],
    offload_src="device",
    offload_dst="pinned_host",
  ),
  "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nn.Module):
  """One layer with its residual connections: a mixer and, except for a bare `M`, an MLP, each between its norms."""

  config: ModelConfig
  spec: LayerSpec

  def setup(self):
    c, kind = self.config, self.spec.kind
    self.mixer_norm = RMSNorm(c)
    self.mixer: Any = Attention(c, self.spec) if kind == "T" else Mamba(c)
    self.has_mlp = kind == "T" or c.mamba_mlp
    if self.has_mlp:
      self.mlp_norm, self.mlp = RMSNorm(c), MLP(c)
    if c.post_norms:
      self.mixer_post_norm = RMSNorm(c)
      if self.has_mlp:
        self.mlp_post_norm = RMSNorm(c)

  def _add(self, x: Array, part: Array, post_norm: str) -> Array:
    c = self.config
    part = getattr(self, post_norm)(part) if c.post_norms else part
    return x + (part if c.residual_multiplier == 1 else part * c.residual_multiplier)

  def _finish(self, x: Array, mixed: Array) -> Array:
    x = self._add(x, mixed, "mixer_post_norm")
    x = self._add(x, self.mlp(self.mlp_norm(x)), "mlp_post_norm") if self.has_mlp else x
    return constrain(x, "batch", "time", None)

  def __call__(self, x_BxTxD: Array, *rows: Array | None) -> Array:
    """Mix and add; `rows` are positions [B, T], segment ids [B, T], and lengths [B] or None, see `LM`."""
    with jax.named_scope(self.spec.kind):
      return self._finish(x_BxTxD, self.mixer(self.mixer_norm(x_BxTxD), *rows))

  def extend(
    self, x_BxTxD: Array, positions_BxT: Array, real_BxT: Array, cache: KVCache | SSMCache
  ) -> tuple[Array, Any]:
    with jax.named_scope(self.spec.kind):
      mixed, cache = self.mixer.extend(self.mixer_norm(x_BxTxD), positions_BxT, real_BxT, cache)
      return self._finish(x_BxTxD, mixed), cache


class Unit(nn.Module):
  """The layers of one step of the scan over depth."""

  config: ModelConfig
  specs: tuple[LayerSpec, ...]

  @nn.compact
  def __call__(self, x: Array, *rows: Array | None) -> tuple[Array, None]:
    for i, spec in enumerate(self.specs):
      x = Block(self.config, spec, name=f"layer_{i}")(x, *rows)
    return x, None


class LM(nn.Module):
  """The language model. `unrolled`: its parameters come from `unstack`, as `extend` needs them."""

  config: ModelConfig
  unrolled: bool = False

  def setup(self):
    c = self.config
    shape, axes = (c.padded_vocab, c.d_model), ("vocab", "embed")
    self.embedding = weight(self, c, "embed", shape, axes, cast=False)
    self.head = jnp.asarray(self.embedding, c.dtype) if c.tie_embeddings else weight(self, c, "unembed", shape, axes)
    self.final_norm = RMSNorm(c)
    if c.query_projection:
      # the identity: before training a projected query is the query itself
      identity = nn.with_logical_partitioning(lambda _, shape, dtype: jnp.eye(*shape, dtype=dtype), ("embed", None))
      self.projection = self.param("query_projection", identity, (c.d_model, c.d_model), jnp.dtype(c.param_dtype))
    if self.unrolled:
      self.layers = [Block(c, spec) for spec in c.layers]
      return
    unit_cls = Unit
    if c.remat != "none":
      unit_cls = nn.remat(Unit, policy=REMAT_POLICIES[c.remat], prevent_cse=False)
    scan = lambda unit, repeats: nn.scan(
      unit_cls,
      variable_axes={"params": 0, "lora": 0},
      split_rngs={"params": True},
      in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),  # type: ignore[arg-type]  # Linen's own idiom
      length=repeats,
      metadata_params={nn.PARTITION_NAME: "layers"},
    )(c, unit)
    self.segments = [scan(unit, repeats) for unit, repeats in segments(c.layers)]

  def _embed_tokens(self, tokens_BxT: Array) -> Array:
    with jax.named_scope("embed"):
      x, factor = look_up(self.embedding, tokens_BxT, self.config.dtype), self.config.embedding_multiplier
      return constrain(x if factor == 1 else x * factor, "batch", "time", None)

  def __call__(
    self,
    tokens_BxT: Array,
    segment_ids_BxT: Array | None = None,
    positions_BxT: Array | None = None,
    lengths_B: Array | None = None,
  ) -> Array:
    """Return the hidden states [B, T, D] after the final norm.

    `segment_ids` int32 [B, T] separate packed documents, 0 is padding (None: one document a row); `positions` restart
    in every segment (None: they are counted). `lengths` int32 [B] say that each row is one document of so many tokens
    and then padding, as some kernels need it: see `attention_gpu`.
    """
    if segment_ids_BxT is None:
      segment_ids_BxT, lengths_B = one_document(tokens_BxT, lengths_B)
    if positions_BxT is None:
      positions_BxT = segment_positions(segment_ids_BxT)
    x = self._embed_tokens(tokens_BxT)
    if self.unrolled:
      for layer in self.layers:
        x = layer(x, positions_BxT, segment_ids_BxT, lengths_B)
    else:
      for segment in self.segments:
        x, _ = segment(x, positions_BxT, segment_ids_BxT, lengths_B)
    return self.final_norm(x)

  def first_block(self, tokens_BxT: Array, lengths_B: Array) -> Array:
    """Return the states [B, T, D] of right-padded rows without the blocks after the first.

    Needs `unrolled` parameters.
    """
    segment_ids, lengths = one_document(tokens_BxT, lengths_B)
    x = self._embed_tokens(tokens_BxT)
    return self.final_norm(self.layers[0](x, segment_positions(segment_ids), segment_ids, lengths))

  def logits(self, hidden: Array) -> Array:
    """Return the logits [..., V] in at least float32, with V padded; padding ids get the lowest finite number."""
    c = self.config
    flat_NxD = hidden.reshape(-1, c.d_model)  # as in `linear`
    logits = product(flat_NxD, self.head, c.matmul_dtype, transposed=True, out=accumulation_dtype(hidden.dtype))
    logits = logits.reshape(*hidden.shape[:-1], c.padded_vocab)
    if c.logits_scaling != 1:
      logits /= c.logits_scaling
    if c.logit_softcap is not None:
      logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
    if c.padded_vocab == c.vocab_size:
      return logits
    real = jnp.broadcast_to(jnp.arange(c.padded_vocab) < c.vocab_size, logits.shape)
    return jnp.where(real, logits, jnp.finfo(logits.dtype).min)

  def project(self, queries_BxD: Array) -> Array:
    """Project pooled queries by the learned matrix, if the model has one, before they are compared with chunks."""
    return jnp.dot(queries_BxD, jnp.asarray(self.projection)) if self.config.query_projection else queries_BxD

  def extend(self, tokens_BxT: Array, lengths_B: Array, cache: Cache) -> tuple[Array, Cache]:
    """Append the first `lengths[b]` tokens of each row: prefill, a retrieved document, or one decoded token.

    Returns the hidden states [B, T, D] (arbitrary on pads) and the new cache. Where `lengths == 0`, no bit of the row's
    cache changes. Needs `unrolled` parameters.
    """
    steps = jnp.arange(tokens_BxT.shape[1])[None, :]
    real = steps < lengths_B[:, None]
    positions = cache.lengths[:, None] + steps
    with whole(True):  # as decoding lays weights out
      x = self._embed_tokens(tokens_BxT)
    layers = []
    for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
      x, layer_cache = layer.extend(x, positions, real, layer_cache)
      layers.append(layer_cache)
    return self.final_norm(x), Cache(cache.lengths + lengths_B, tuple(layers))


def packed_states(
  config: ModelConfig,
  params: Params,
  tokens_BxT: Array,
  segment_ids_BxT: Array | None = None,
  lengths_B: Array | None = None,
) -> Array:
  """Return the hidden states [B, T, D] of stacked parameters as `LM` does, the tokens split over the mesh in use."""
  if segment_ids_BxT is None:
    segment_ids_BxT, lengths_B = one_document(tokens_BxT, lengths_B)
  apply: Any = LM(config).apply
  rows = tokens_BxT, segment_ids_BxT, segment_positions(segment_ids_BxT)
  if whole.value or not is_split():  # a rollout encodes short queries
    return apply(params, *rows, lengths_B)
  return on_parts(apply, params, *rows, multiple=_least_part(config, tokens_BxT.shape[1]))


def one_document(tokens_BxT: Array, lengths_B: Array | None) -> tuple[Array, Array]:
  """Return segment ids [B, T] and lengths [B] of right-padded rows of one document each (None: without padding)."""
  batch, time = jnp.shape(tokens_BxT)
  lengths = jnp.full(batch, time, jnp.int32) if lengths_B is None else jnp.asarray(lengths_B, jnp.int32)
  return length_mask(lengths, time, jnp).astype(jnp.int32), lengths


def _least_part(config: ModelConfig, time: int) -> int:
  """Return what the parts of a row of tokens are multiples of: long enough to convolve; whole blocks as the row is."""
  blocks = math.lcm(LANES, config.ssm_chunk)
  if platform() == "tpu" and time % blocks == 0:
    return blocks
  return SUBLANES * max(math.ceil((config.ssm_conv - 1) / SUBLANES), 1)


def segment_positions(segment_ids_BxT: Array) -> Array:
  """Count positions from 0 within each run of equal segment ids, int32 [B, T]."""
  index = jnp.broadcast_to(jnp.arange(segment_ids_BxT.shape[1]), segment_ids_BxT.shape)
  starts = segment_ids_BxT != jnp.pad(segment_ids_BxT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: PRNGKey) -> Params:
  """Draw stacked parameters, boxed with their logical axes (`nn.unbox` removes the boxes)."""
  return LM(config).init(key, jnp.zeros((1, 2), jnp.int32))


def unstack(config: ModelConfig, params: Params) -> Params:
  """Split the stacked parameters into layers, for `LM(config, unrolled=True)`."""
  stacked = params["params"]
  flat: dict[str, Any] = {name: value for name, value in stacked.items() if not name.startswith("segments_")}
  names = iter(range(config.n_layers))
  for s, (unit, repeats) in enumerate(segments(config.layers)):
    for r in range(repeats):
      for u in range(len(unit)):
        layer = stacked[f"segments_{s}"][f"layer_{u}"]
        flat[f"layers_{next(names)}"] = jax.tree.map(lambda leaf, r=r: leaf[r], layer)
  return {"params": flat}


def for_decoding(config: ModelConfig, params: Params, mesh: Mesh) -> Params:
  """Lay stacked parameters out for a decode loop: whole on every device but for the tensor axis.

  Weights are in the dtype that they are computed in. Over the layout of the training, a loop would gather all of them
  for every token.
  """
  boxed = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
  cast = lambda path, x: x.astype(config.dtype) if path[-1].key in WEIGHTS else x
  read = jax.tree_util.tree_map_with_path(cast, params)
  return jax.lax.with_sharding_constraint(read, shardings_of(boxed, mesh, DECODING_RULES))


def stack(config: ModelConfig, params: Params) -> Params:
  """Stack the parameters of single layers: the inverse of `unstack`."""
  flat = params["params"]
  stacked: dict[str, Any] = {name: value for name, value in flat.items() if not name.startswith("layers_")}
  first = 0
  for s, (unit, repeats) in enumerate(segments(config.layers)):
    layers: Mapping[str, Any] = {
      f"layer_{u}": jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(flat[f"layers_{first + r * len(unit) + u}"] for r in range(repeats))
      )
      for u in range(len(unit))
    }
    stacked[f"segments_{s}"] = layers
    first += len(unit) * repeats
  return {"params": stacked}
