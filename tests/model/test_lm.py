"""The language model: decode = forward, packed = separate, causality by gradient, pads that change no bit."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from selfrag_jax.mesh import LOGICAL_RULES, make_mesh
from selfrag_jax.model.cache import init_cache
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.model.lm import LM, init_params, segment_positions, stack, unstack
from selfrag_jax.train.losses import masked_lm_loss

PATTERNS = ("TTMM", "MMTT", "MMMM", "TTTT", "TMTM")


def small(pattern="TM", **overrides) -> ModelConfig:
  fields = dict(vocab_size=61, d_model=32, n_layers=len(pattern), n_heads=4, n_kv_heads=2, block_pattern=pattern)
  fields |= dict(ssm_state=8, ssm_head_dim=16, ssm_groups=2, ssm_chunk=8, init_scale=0.2)
  return ModelConfig(**(fields | overrides))


@functools.cache
def params_of(config):
  return nn.unbox(init_params(config, jax.random.key(0)))


@functools.cache
def forward(config, unrolled=False):
  return jax.jit(LM(config, unrolled=unrolled).apply)


@functools.cache
def extend_of(config):
  lm = LM(config, unrolled=True)
  return jax.jit(lambda params, tokens, lengths, cache: lm.apply(params, tokens, lengths, cache, method="extend"))


@functools.cache
def logits_at(config, unrolled=False):
  lm = LM(config, unrolled=unrolled)
  return jax.jit(lambda params, hidden: lm.apply(params, hidden, method="logits"))


def logits_of(config, params, tokens):
  return logits_at(config)(params, forward(config)(params, tokens))


def tokens_of(config, shape, seed=1):
  return jax.random.randint(jax.random.key(seed), shape, 0, config.vocab_size)


def assert_decode_equals_forward(config):
  params = params_of(config)
  flat = unstack(config, params)
  tokens = tokens_of(config, (3, 24))
  expected = logits_of(config, params, tokens)
  extend = extend_of(config)

  cache = init_cache(config, batch=3, capacity=24)
  done = np.zeros(3, int)
  # prefill ragged prompts, decode two tokens (row 1 waits), append ragged documents, decode again
  for lengths, width in [
    ((5, 7, 3), 9),
    ((1, 0, 1), 1),
    ((1, 0, 1), 1),
    ((9, 0, 4), 9),
    ((1, 1, 1), 1),
    ((2, 9, 9), 9),
  ]:
    block = np.full((3, width), 60)
    for row, n in enumerate(lengths):
      block[row, :n] = tokens[row, done[row] : done[row] + n]
    hidden, cache = extend(flat, jnp.asarray(block), jnp.asarray(lengths), cache)
    logits = logits_at(config, unrolled=True)(flat, hidden)
    for row, n in enumerate(lengths):
      np.testing.assert_allclose(logits[row, :n], expected[row, done[row] : done[row] + n], atol=1e-4)
    done += lengths
    np.testing.assert_array_equal(cache.lengths, done)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_decode_equals_forward_on_ragged_rows_with_appended_documents(pattern):
  assert_decode_equals_forward(small(pattern))


@pytest.mark.parametrize(
  "options",
  [
    {"block_pattern": "LMT", "n_layers": 3, "window": 4, "window_rope_base": 100.0},
    {"post_norms": True, "norm_plus_one": True, "mamba_mlp": True},
    {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    {"qk_norm": True},
    {"rope": False},
    {"block_pattern": "LT", "window": 4, "full_rope": False},
    {"attention_softcap": 1.0, "logit_softcap": 1.0},
    {"mamba_mlp": True},
  ],
  ids=" ".join,
)
def test_decode_equals_forward_under_every_option(options):
  assert_decode_equals_forward(small("TM", **options))


@pytest.mark.parametrize("width", [1, 6])
def test_a_row_of_length_zero_keeps_every_bit(width):
  config = small("TM")
  flat = unstack(config, params_of(config))
  extend = extend_of(config)
  _, before = extend(flat, tokens_of(config, (2, 5)), jnp.array([5, 3]), init_cache(config, 2, 16))
  before = jax.tree.map(lambda x: jnp.where(x == 0, -0.0, x) if x.dtype == jnp.float32 else x, before)
  _, after = extend(flat, tokens_of(config, (2, width), seed=2), jnp.array([0, 1]), before)
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    assert np.asarray(old[0]).tobytes() == np.asarray(new[0]).tobytes()
    assert np.asarray(old[1]).tobytes() != np.asarray(new[1]).tobytes()


@pytest.mark.parametrize("pattern", ["L", "M", "TMM", "LMT"])
def test_packed_documents_equal_separate_ones(pattern):
  config = small(pattern, window=12 if "L" in pattern else None)
  params = params_of(config)
  lengths, starts = (5, 11, 1, 7), (0, 5, 16, 17)
  documents = tokens_of(config, (4, 26))
  packed = jnp.concatenate([documents[i, :n] for i, n in enumerate(lengths)] + [documents[0, :2]])
  segments = jnp.asarray([i + 1 for i, n in enumerate(lengths) for _ in range(n)] + [0, 0])
  alone = (jnp.arange(26)[None, :] < jnp.asarray(lengths)[:, None]).astype(jnp.int32)
  # one row holds all four documents, the others one each
  rows = jnp.concatenate([packed[None], documents])
  hidden = forward(config)(params, rows, jnp.concatenate([segments[None], alone]))
  for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
    np.testing.assert_allclose(hidden[0, start : start + n], hidden[i + 1, :n], atol=5e-6)


@pytest.mark.parametrize("pattern", ["T", "M"])
def test_gradients_neither_reach_the_future_nor_another_document(pattern):
  config = small(pattern)
  params = params_of(config)
  tokens = tokens_of(config, (1, 12))
  segments = jnp.asarray([[1] * 5 + [2] * 7])

  def probe(noise_TxD):
    perturbed = jax.tree.map(lambda x: x, params)
    embed = perturbed["params"]["embed"]
    # give every position an embedding row of its own, so that the gradient is by position
    perturbed["params"]["embed"] = embed.at[100:112].set(embed[tokens[0]] + noise_TxD)
    hidden = forward(config)(perturbed, jnp.arange(100, 112)[None], segments)
    return jnp.sum(jnp.sin(hidden[0, 8]))

  gradient = np.abs(jax.jit(jax.grad(probe))(jnp.zeros((12, config.d_model)))).sum(axis=1)
  assert (gradient[:5] == 0).all(), "another document"
  assert (gradient[9:] == 0).all(), "the future"
  assert (gradient[5:9] > 0).all()


def test_the_window_limits_what_is_seen():
  config = small("L", window=4)
  params = params_of(config)
  tokens = tokens_of(config, (1, 12))
  changed = tokens.at[0, 5].set((tokens[0, 5] + 1) % 61)
  same = np.isclose(forward(config)(params, tokens), forward(config)(params, changed)).all(axis=-1)[0]
  assert same.tolist() == [True] * 5 + [False] * 4 + [True] * 3


@pytest.mark.parametrize("rope", [True, False])
def test_attention_sees_the_order_of_tokens_by_the_rotary_embedding_alone(rope):
  config = small("T", rope=rope)
  params, tokens = params_of(config), tokens_of(config, (1, 12))
  reversed_ = tokens.at[0, :11].set(tokens[0, 10::-1])
  last = [np.asarray(forward(config)(params, x)[0, -1]) for x in (tokens, reversed_)]
  assert np.allclose(*last, atol=1e-6) == (not rope)


@pytest.mark.parametrize(("window", "sees_order"), [(1, False), (4, True)])
def test_without_full_rope_the_layers_of_a_window_alone_see_the_order_of_tokens(window, sees_order):
  config = small("LT", window=window, full_rope=False)  # a token that sees itself alone sees no order
  params, tokens = params_of(config), tokens_of(config, (1, 12))
  reversed_ = tokens.at[0, :11].set(tokens[0, 10::-1])
  last = [np.asarray(forward(config)(params, x)[0, -1]) for x in (tokens, reversed_)]
  assert np.allclose(*last, atol=1e-6) != sees_order


def test_stack_undoes_unstack_and_the_unrolled_forward_is_the_same():
  config = small("TMM")  # one unit alone, one repeated
  params = params_of(config)
  flat = unstack(config, params)
  again = stack(config, flat)
  assert jax.tree.structure(again) == jax.tree.structure(jax.tree.map(lambda x: x, dict(params)))
  jax.tree.map(np.testing.assert_array_equal, again, dict(params))
  tokens = tokens_of(config, (2, 8))
  unrolled = forward(config, unrolled=True)(flat, tokens)
  np.testing.assert_allclose(forward(config)(params, tokens), unrolled, atol=1e-5)


@pytest.mark.parametrize(
  "overrides", [{}, {"mlp": "relu2"}, {"qk_norm": True, "tie_embeddings": False}, {"mamba_mlp": True}]
)
def test_parameter_count_is_that_of_the_tree(overrides):
  config = small("TMM", **overrides)
  shapes = jax.eval_shape(lambda: nn.unbox(init_params(config, jax.random.key(0))))
  assert count_params(config)["total"] == sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
  "option", [{"attention_softcap": 1.0}, {"logit_softcap": 1.0}, {"qk_norm": True}, {"rope": False}, {"mlp": "geglu"}]
)
def test_options_change_the_logits(option):
  base, changed = small("TM"), small("TM", **option)
  tokens = tokens_of(base, (1, 6))
  logits = [logits_of(config, params_of(config), tokens) for config in (base, changed)]
  assert not np.allclose(logits[0][..., :61], logits[1][..., :61])


def test_padding_ids_are_never_likely():
  config = small("T")
  params = params_of(config)
  logits = logits_of(config, params, tokens_of(config, (1, 3)))
  assert logits.shape[-1] == 128
  assert (jax.nn.softmax(logits)[..., 61:] == 0).all()


@pytest.mark.parametrize("pattern", ["TTTT", "MMMM"])
@pytest.mark.parametrize("remat", ["dots", "mixed", "full", "offload"])
def test_remat_changes_memory_and_not_gradients(remat, pattern):
  gradients, sizes = {}, {}
  with jax.enable_x64(True):
    for policy in ("none", remat):
      config = small(pattern, remat=policy, dtype="float64", param_dtype="float64")
      params, tokens = params_of(config), tokens_of(config, (2, 64))
      of = jax.jit(jax.grad(lambda p, config=config, tokens=tokens: jnp.sum(jnp.sin(LM(config).apply(p, tokens)))))
      gradients[policy] = of(params)
      sizes[policy] = of.lower(params).compile().memory_analysis().temp_size_in_bytes
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
  jax.tree.map(close, gradients["none"], gradients[remat])
  assert sizes[remat] < sizes["none"]


def products(jaxpr):
  """Yield the dot_generals of a program, those of its loops and calls included."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from products(inner)


def test_activations_meet_weights_as_two_matrices_forward_and_backward():
  """XLA's CPU backend takes twice as long for the gradients of products with three axes."""
  config = small("TM")
  batch = {"tokens": tokens_of(config, (2, 24)), "segment_ids": jnp.ones((2, 24), int), "mask": jnp.ones((2, 24), bool)}
  program = jax.make_jaxpr(jax.grad(lambda params: masked_lm_loss(config, params, batch).loss))(params_of(config)).jaxpr
  unbatched = [p for p in products(program) if not p.params["dimension_numbers"][1][0]]
  # q, k, v, o, up, gate, down, in_proj, out_proj and the head: one forward, two backward
  assert len(unbatched) >= 30
  assert {operand.aval.ndim for product in unbatched for operand in product.invars} == {2}


def test_nnx_users_can_take_the_model_over():
  """Under a mesh and the logical rules, which say where its parameters lie."""
  config = small("TM")
  params, tokens = params_of(config), tokens_of(config, (2, 8))
  with jax.set_mesh(make_mesh(1, 2, 2, jax.devices()[:4])), nn.logical_axis_rules(LOGICAL_RULES):
    model = nnx.jit(lambda: bridge.ToNNX(LM(config), rngs=nnx.Rngs(0)).lazy_init(tokens))()
    assert model.embed.sharding.spec == P("tensor", "fsdp")
    nnx.update(model, params["params"])
    logits = nnx.jit(lambda model, tokens: model.logits(model(tokens)))(model, tokens)
  np.testing.assert_allclose(logits, logits_of(config, params, tokens), atol=1e-4)


def test_heads_that_cannot_share_keys_are_refused_with_both_numbers():
  with pytest.raises(ValueError, match="n_heads 4 is not divisible by n_kv_heads 3"):
    small("T", n_kv_heads=3)


def test_segment_positions_restart():
  np.testing.assert_array_equal(segment_positions(jnp.array([[1, 1, 2, 3, 3, 3, 0]])), [[0, 1, 0, 0, 1, 2, 0]])
