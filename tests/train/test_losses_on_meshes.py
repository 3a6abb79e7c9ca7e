"""The likelihood on a mesh: what one device gives, with the head gathered once and its gradient added up once."""

import dataclasses
import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.aot.collectives import collectives
from selfrag_jax.mesh import batch_sharding, make_mesh, shardings_of
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import CHUNK, sequence_log_probs
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.vocabulary import look_up
from selfrag_jax.train.losses import masked_lm_loss

ROWS, TIME = 8, 2 * CHUNK + 64
SIZES = {"vocab_size": 500, "d_model": 64, "n_layers": 1, "n_heads": 2, "mlp_dim": 64, "remat": "none"}


@pytest.fixture(autouse=True)
def model():
  with jax.enable_x64(True):
    yield ModelConfig(**SIZES, dtype="float64", param_dtype="float64")


def batch(share):
  rng = np.random.default_rng(0)
  return {
    "tokens": rng.integers(0, 500, (ROWS, TIME), dtype=np.int32),
    "segment_ids": np.where(np.arange(TIME) < TIME - 9, 1 + (np.arange(TIME) > 300), 0)[None].repeat(ROWS, 0),
    "mask": rng.random((ROWS, TIME)) < share,
  }


def supervised(model, params, rows):
  return masked_lm_loss(model, params, rows).loss


def policy(model, params, rows):
  log_probs = sequence_log_probs(model, params, rows["tokens"], rows["segment_ids"])
  return (log_probs * jnp.cos(jnp.arange(TIME))[None]).sum()


def placed(model, sizes, rows):
  """Return a mesh, and fresh parameters and rows on it. A fourth size is that of the axis `sequence`."""
  mesh = make_mesh(*sizes[:3], sequence=(*sizes, 1)[3])
  boxed = init_params(model, jax.random.key(0))
  params = jax.device_put(nn.unbox(boxed), shardings_of(boxed, mesh))
  return mesh, params, jax.device_put(rows, batch_sharding(mesh))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 1, 8), (2, 1, 2, 2), (1, 2, 2, 2)])
@pytest.mark.parametrize(("loss", "share"), [(supervised, 0.05), (supervised, 1.0), (policy, 1.0)])
def test_a_mesh_gives_the_loss_and_the_gradient_of_one_device(model, loss, share, sizes):
  rows = batch(share)
  expected = jax.jit(jax.value_and_grad(partial(loss, model)))(nn.unbox(init_params(model, jax.random.key(0))), rows)
  mesh, params, placed_rows = placed(model, sizes, rows)
  with jax.set_mesh(mesh):
    found = jax.jit(jax.value_and_grad(partial(loss, model)))(params, placed_rows)
  same = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
  jax.tree.map(lambda x, y: same(np.asarray(x), np.asarray(y)), found, expected)


@pytest.mark.parametrize("loss", [supervised, policy])
def test_no_loop_over_chunks_sends_the_head_or_its_gradient(model, loss):
  mesh, params, rows = placed(model, (2, 4, 1), batch(1.0))
  with jax.set_mesh(mesh):
    text = jax.jit(jax.value_and_grad(partial(loss, model))).lower(params, rows).compile().as_text()
  head = model.padded_vocab * model.d_model * 8
  large = [one for one in collectives(text) if one.bytes >= head / 8]
  assert any(one.bytes == head for one in large)  # it is gathered, and its gradient added up
  assert not [one for one in large if one.loops]


@pytest.mark.parametrize("tied", [True, False])
def test_neither_end_of_the_vocabulary_is_added_up_whole(model, tied):
  model = dataclasses.replace(model, tie_embeddings=tied, vocab_size=1000)  # more than a device has tokens
  mesh, params, rows = placed(model, (2, 4, 1), batch(1.0))
  with jax.set_mesh(mesh):
    text = jax.jit(jax.value_and_grad(partial(supervised, model))).lower(params, rows).compile().as_text()
  table = model.padded_vocab * model.d_model * 8
  whole = [one.kind for one in collectives(text) if one.bytes == table]
  assert sorted(whole) == ["all-gather", "reduce-scatter"]  # of the head
  # each device's columns, over `data`: of the embedding and of the head, though they may be one
  columns = [one for one in collectives(text) if one.kind == "all-reduce" and table // 4 in map(size, one.shapes)]
  assert sum(list(map(size, one.shapes)).count(table // 4) for one in columns) == 2


def size(shape) -> int:
  return 8 * math.prod(shape)


def test_tokens_are_looked_up_by_columns(model):
  table, tokens = np.arange(48.0).reshape(6, 8), np.random.default_rng(0).integers(0, 6, (8, 3))
  of = partial(look_up, dtype="float64")
  with jax.set_mesh(make_mesh(2, 4, 1)):
    found, gradient = jax.jit(jax.value_and_grad(lambda table: (look_up(table, tokens, "float64") ** 2).sum()))(table)
    odd = jax.jit(of)(table, tokens[:5])  # rows that the devices cannot share
    many = jax.jit(of)(table, tokens.repeat(3, 1))  # more tokens than rows of the table
  counts = np.bincount(tokens.ravel(), minlength=6)[:, None]
  np.testing.assert_array_equal(found, (table[tokens] ** 2).sum())
  np.testing.assert_array_equal(gradient, 2 * counts * table)
  np.testing.assert_array_equal(odd, table[tokens[:5]])
  np.testing.assert_array_equal(many, table[tokens.repeat(3, 1)])


def test_the_gradient_of_a_frequent_token_is_summed_in_the_dtype_of_the_table():
  table, tokens = jnp.zeros((2048, 8), jnp.float32), np.zeros((8, 200), np.int32)  # bfloat16 counts to 256
  for sizes in ((2, 4, 1), (8, 1, 1)):
    with jax.set_mesh(make_mesh(*sizes)):
      gradient = jax.jit(jax.grad(lambda table: look_up(table, tokens, "bfloat16").sum()))(table)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient[0], 1600)
