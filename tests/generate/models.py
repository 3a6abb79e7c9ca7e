"""Tiny random models for tests of the engine: attention, Mamba and both."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import LoadedModel

TOKENIZER = ByteTokenizer()
PATTERNS = {"attention": "TT", "mamba": "MM", "hybrid": "MTM"}


@functools.cache
def tiny(kind: str, **settings) -> LoadedModel:
  """Return a random model that writes all kinds of bytes."""
  pattern = PATTERNS[kind]
  config = ModelConfig(
    TOKENIZER.vocab_size, d_model=32, n_layers=len(pattern), n_heads=2, block_pattern=pattern, ssm_state=8,
    ssm_head_dim=16, mlp_dim=32, init_scale=0.3, **settings,
  )  # fmt: skip
  return LoadedModel(config, nn.unbox(init_params(config, jax.random.key(1))), {}, TOKENIZER, context_tokens=512)


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, tokens, segment_ids):
  lm = LM(config)
  return lm.apply(params, lm.apply(params, tokens, segment_ids), method="logits")


def full_logits(model: LoadedModel, ids: list[int]) -> np.ndarray:
  """Return the logits [V] of the token after `ids` by one forward pass over the whole text."""
  row = np.zeros((1, 256), np.int32)
  row[0, : len(ids)] = ids
  logits = _logits(
    model.config, model.params, jnp.asarray(row), jnp.asarray(np.arange(256)[None] < len(ids), jnp.int32)
  )
  return np.asarray(logits)[0, len(ids) - 1]


def greedy_by_full_forward(model: LoadedModel, ids: list[int], n: int, ends=()) -> list[int]:
  """Write n tokens, each the likeliest of a forward pass over the whole text so far: the oracle."""
  ids, start = list(ids), len(ids)
  while len(ids) < start + n:
    ids.append(int(full_logits(model, ids).argmax()))
    if ids[-1] in ends:
      break
  return ids[start:]
