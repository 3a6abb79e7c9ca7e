"""Losses against numpy and the plain policy gradient; one update against the same update in micro-batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.train.losses import advantages, info_nce, masked_lm_loss, policy_loss
from selfrag_jax.train.state import LossSums, TrainState, make_update

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
REWARDS = np.array([[1, 0, 0, 1], [0.3, 0, 1, 0.3], [0.3, 0.3, 0.3, 0.3], [0, 0, 0, 0]], np.float32)


def advantage_oracle(rewards, kind):
  one = {
    "mean": lambda group, r: group[r] - group.mean(),
    "grpo": lambda group, r: (group[r] - group.mean()) / (group.std() + 1e-6),
    "rloo": lambda group, r: group[r] - np.delete(group, r).mean(),
    "reinforce": lambda group, r: group[r] - rewards.mean(),
  }[kind]
  return [[one(group, r) for r in range(len(group))] for group in rewards]


@pytest.mark.parametrize("kind", ["mean", "grpo", "rloo", "reinforce"])
def test_advantages_equal_their_definition(kind):
  got, kept = advantages(REWARDS, kind)
  np.testing.assert_array_equal(kept, [True, True, False, False])
  np.testing.assert_allclose(got[:2], advantage_oracle(REWARDS, kind)[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0])
def test_equal_rewards_teach_nothing_whatever_their_rounding(reward):
  for size in range(2, 40):
    _, kept = advantages(np.full((1, size), reward, np.float32), "grpo")
    assert not kept, size


def test_an_unknown_advantage_is_named():
  with pytest.raises(ValueError, match="one of mean, grpo, rloo, reinforce"):
    advantages(np.zeros((1, 2)), "ppo")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def batch():
  rng = np.random.default_rng(0)
  log_probs = -rng.exponential(size=(3, 6)).astype(np.float32)
  return {
    "log_probs": jnp.asarray(log_probs),
    "advantages": jnp.asarray([[1.5], [-0.5], [0.25]], jnp.float32),
    "mask": jnp.asarray(rng.random((3, 6)) < 0.6),
  }


def test_the_gradient_at_ratio_1_is_the_policy_gradient(batch):
  clipped = lambda x: policy_loss(x, batch["log_probs"], batch["advantages"], batch["mask"], **CLIP).loss
  plain = lambda x: -jnp.sum(jnp.where(batch["mask"], x * batch["advantages"], 0))
  np.testing.assert_allclose(
    jax.grad(clipped)(batch["log_probs"]), jax.grad(plain)(batch["log_probs"]), rtol=1e-6, atol=0
  )


@pytest.mark.parametrize(
  ("ratio", "advantage", "moves"),
  [
    (1.27, 1.0, True), (1.29, 1.0, False),  # a good token rises up to the upper epsilon
    (0.79, 1.0, True), (0.50, 1.0, True),  # and may always come back
    (0.81, -1.0, True), (0.79, -1.0, False),  # a bad one falls down to the lower epsilon
    (1.29, -1.0, True), (3.00, -1.0, True),
  ],
)  # fmt: skip
def test_clipping_stops_what_has_gone_far_enough(ratio, advantage, moves):
  def loss(log_prob):
    sums = policy_loss(log_prob, jnp.zeros((1, 1)), jnp.full((1, 1), advantage), jnp.ones((1, 1), bool), **CLIP)
    return sums.loss, sums

  (_, sums), grad = jax.value_and_grad(loss, has_aux=True)(jnp.log(jnp.full((1, 1), ratio)))
  assert sums.metrics["clipped"].total == (not moves)
  np.testing.assert_allclose(grad, -ratio * advantage if moves else 0, rtol=1e-5)
  bound = 1.28 if advantage > 0 else 0.8
  np.testing.assert_allclose(sums.loss, -advantage * (ratio if moves else bound), rtol=1e-5)


def test_masked_tokens_have_no_part_in_anything(batch):
  # what was never sampled may have any log-probability at all, also one that overflows the ratio
  old = jnp.where(batch["mask"], batch["log_probs"] + 0.1, -jnp.inf)
  reference = jnp.where(batch["mask"], batch["log_probs"] - 0.1, 1e4)

  def loss(x):
    sums = policy_loss(
      x, old, batch["advantages"], batch["mask"], **CLIP, kl_weight=0.1, reference_log_probs_BxT=reference
    )
    return sums.loss, sums

  (_, sums), grad = jax.value_and_grad(loss, has_aux=True)(batch["log_probs"])
  assert sums.weight == batch["mask"].sum()
  assert all(np.isfinite(value) for value in jax.tree.leaves(sums))
  np.testing.assert_array_equal(np.asarray(grad)[~np.asarray(batch["mask"])], 0)
  assert np.all(np.asarray(grad)[np.asarray(batch["mask"])] != 0)


def test_kl_is_k3(batch):
  reference = jax.random.normal(jax.random.key(0), (3, 6))
  arguments = (batch["log_probs"], batch["log_probs"], batch["advantages"], batch["mask"])
  sums = policy_loss(*arguments, **CLIP, kl_weight=0.5, reference_log_probs_BxT=reference)
  gap = np.asarray(reference - batch["log_probs"])[np.asarray(batch["mask"])]
  k3 = np.exp(gap) - gap - 1
  assert np.all(k3 >= 0)
  np.testing.assert_allclose(sums.metrics["kl"].total, k3.sum(), rtol=1e-5)
  np.testing.assert_allclose(sums.loss, policy_loss(*arguments, **CLIP).loss + 0.5 * k3.sum(), rtol=1e-5)
  same = policy_loss(*arguments, **CLIP, kl_weight=0.5, reference_log_probs_BxT=batch["log_probs"])
  assert same.metrics["kl"].total == 0


def test_the_kl_can_act_on_other_tokens_than_the_reward(batch):
  reference = jax.random.normal(jax.random.key(0), (3, 6))
  arguments = (batch["log_probs"], batch["log_probs"], batch["advantages"])
  pulled = jnp.zeros((3, 6), bool).at[1].set(True)
  rewarded = batch["mask"].at[1].set(False)
  options = {**CLIP, "kl_weight": 0.5, "reference_log_probs_BxT": reference, "kl_mask_BxT": pulled}
  sums = policy_loss(*arguments, rewarded, **options)
  gap = np.asarray(reference - batch["log_probs"])[1]
  k3 = (np.exp(gap) - gap - 1).sum()
  np.testing.assert_allclose(sums.metrics["kl"].total, k3, rtol=1e-5)
  np.testing.assert_allclose(sums.loss, policy_loss(*arguments, rewarded, **CLIP).loss + 0.5 * k3, rtol=1e-5)
  assert sums.weight == rewarded.sum() + 6
  alone = policy_loss(*arguments, rewarded, **CLIP)
  assert sums.metrics["kl"].weight == sums.weight
  for name in ("ratio_gap", "clipped", "surprise"):  # means over the tokens of the reward, as without a KL
    np.testing.assert_allclose(sums.metrics[name], alone.metrics[name], rtol=1e-5)


@pytest.fixture(scope="module")
def model():
  config = ModelConfig(20, d_model=16, n_layers=2, n_heads=2, block_pattern="TM", ssm_state=8, ssm_head_dim=8)
  draw = lambda key: jax.tree.map(lambda x: 10 * x, nn.unbox(init_params(config, key)))
  return config, jax.jit(draw)(jax.random.key(0))


PACKED = np.array([[1, 1, 1, 1, 2, 2, 2, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4]], np.int32)
DOCUMENTS = ((0, slice(0, 4)), (0, slice(4, 7)), (0, slice(7, 8)), (1, slice(0, 10)))
TOKENS = np.random.default_rng(1).integers(20, size=PACKED.shape).astype(np.int32)


@pytest.fixture(scope="module")
def logits(model):
  """The logits of each document in a row of its own, over the 20 tokens that there are."""
  config, params = model
  alone = np.zeros((len(DOCUMENTS), 10), np.int32)
  for i, (row, segment) in enumerate(DOCUMENTS):
    document = TOKENS[row, segment]
    alone[i, : len(document)] = document
  lm = LM(config)
  return np.asarray(jax.jit(lambda p: lm.apply(p, lm.apply(p, alone), method="logits"))(params))[..., :20]


@pytest.mark.parametrize(("chunk", "temperature"), [(3, 1.0), (5, 0.5), (256, 1.0)])  # 3 does not divide the 10 tokens
def test_sequence_log_probs_equal_the_whole_softmax(model, logits, chunk, temperature):
  config, params = model
  got = jax.jit(lambda p: sequence_log_probs(config, p, TOKENS, PACKED, temperature=temperature, chunk=chunk))(params)
  expected = np.zeros(PACKED.shape, np.float32)
  for i, (row, segment) in enumerate(DOCUMENTS):
    document = TOKENS[row, segment]
    exponentials = np.exp(logits[i] / temperature)
    log_probs = np.log(exponentials / exponentials.sum(axis=-1, keepdims=True))
    expected[row, segment] = [0, *(log_probs[t, document[t + 1]] for t in range(len(document) - 1))]
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
  assert np.ptp(expected) > 1


def test_chunks_have_the_gradient_of_the_whole(model):
  config, params = model
  log_prob = lambda params, chunk: sequence_log_probs(config, params, TOKENS, PACKED, chunk=chunk).sum()
  gradient = jax.jit(jax.grad(log_prob), static_argnums=1)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradient(params, 4), gradient(params, 256)
  )


def test_accumulation_weighs_every_token_the_same():
  rng = np.random.default_rng(3)
  # rows of very different numbers of tokens: a mean of the means of micro-batches would differ
  lengths = np.array([1, 6, 2, 5, 6, 1, 0, 3])
  batch = {
    "x": rng.normal(size=(8, 6, 4)).astype(np.float32),
    "y": rng.normal(size=(8, 6)).astype(np.float32),
    "mask": np.arange(6)[None] < lengths[:, None],
  }

  def loss(params, batch):
    error = jnp.einsum("BTD,D->BT", batch["x"], params["w"]) - batch["y"]
    total = lambda values: jnp.sum(jnp.where(batch["mask"], values, 0))
    return LossSums(total(error**2), jnp.sum(batch["mask"]), {"error": total(jnp.abs(error))})

  def step(accumulate):
    optimizer, params = optax.sgd(0.1), {"w": jnp.ones(4)}
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(0))
    return make_update(loss, optimizer, accumulate)(state, batch)

  (whole, metrics), (split, split_metrics) = step(1), step(4)
  np.testing.assert_allclose(split.params["w"], whole.params["w"], rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), split_metrics, metrics)
  assert int(split.step) == 1
  # and the loss is the mean over the 24 tokens
  errors = (batch["x"].sum(axis=-1) - batch["y"])[batch["mask"]]
  np.testing.assert_allclose(metrics["loss"], (errors**2).mean(), rtol=1e-5)


def test_a_batch_without_any_token_changes_nothing():
  loss = lambda params, batch: LossSums(jnp.sum(params["w"] * batch), jnp.zeros((), jnp.int32), {})
  optimizer, params = optax.sgd(0.1), {"w": jnp.ones(4)}
  state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(0))
  state, metrics = make_update(loss, optimizer)(state, jnp.zeros(4))
  np.testing.assert_array_equal(state.params["w"], 1)
  assert metrics["loss"] == 0


def test_info_nce_is_the_cross_entropy_of_the_gold_chunk():
  rng = np.random.default_rng(0)
  queries, chunks = rng.normal(size=(4, 8)), rng.normal(size=(6, 8))
  gold, known = np.array([2, 0, 5, 2]), np.zeros((4, 6), bool)
  known[0, [2, 3]] = known[2, 1] = True  # no negatives; the gold chunk itself stays
  losses, first = info_nce(*map(jnp.asarray, (queries, chunks, gold, known)), temperature=0.5)
  for b in range(4):
    others = [c for c in range(6) if c == gold[b] or not known[b, c]]
    scores = np.exp(chunks[others] @ queries[b] / 0.5)
    share = scores[others.index(gold[b])] / scores.sum()
    np.testing.assert_allclose(losses[b], -np.log(share), atol=1e-5)
    assert bool(first[b]) == (scores.argmax() == others.index(gold[b]))
  assert 0 < np.asarray(first).sum() < 4


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_a_long_row_computes_the_head_for_masked_tokens_alone_and_nothing_changes(share):
  config = ModelConfig(vocab_size=50, d_model=16, n_layers=2, n_heads=2, block_pattern="TM", ssm_head_dim=8)
  params = nn.unbox(init_params(config, jax.random.key(0)))
  rng = np.random.default_rng(0)
  segment_ids = np.repeat([[1] * 100 + [2] * 150 + [0] * 50, [1] * 299 + [2]], 1, axis=0)
  batch = {
    "tokens": jnp.asarray(rng.integers(0, 50, (2, 300))),
    "segment_ids": jnp.asarray(segment_ids),
    "mask": jnp.asarray(rng.random((2, 300)) < share),  # also first tokens of segments and padding
  }

  def whole(params):
    log_probs = sequence_log_probs(config, params, batch["tokens"], batch["segment_ids"])
    return -jnp.sum(jnp.where(batch["mask"], log_probs, 0))

  compact = lambda params: masked_lm_loss(config, params, batch).loss
  (ours, gradient), (theirs, wanted) = (jax.value_and_grad(loss)(params) for loss in (compact, whole))
  assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
  assert (float(ours) == 0) == (share == 0)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, wanted)
