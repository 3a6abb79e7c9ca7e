"""Recall by depth: each condition shows what it says, and parts and narrowed contexts change no answer."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from selfrag_jax.evals.recall import measure, variance_change
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.self_rag import SelfRAGConfig, memory_tokens
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.tasks.sequences import of_facts
from selfrag_jax.train.reading import Reader, gold_slots, seen
from selfrag_jax.train.settings import RecallConfig

TASK = Facts("two_fact", 12)  # two chunks are needed
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, block_pattern="MT",
  ssm_state=8, ssm_head_dim=16, ssm_chunk=16, init_scale=0.2,
)  # fmt: skip
READER = Reader(MODEL, SelfRAGConfig(top_k=4, chunk_size=16, order="position"), memory_tokens(TASK.tokenizer))
PARAMS = nn.unbox(init_params(MODEL, jax.random.key(0)))
CONFIG = RecallConfig(questions=6, depths=4, tokens=400)  # parts of two or three contexts


def episodes(depth):
  return of_facts(TASK.episodes("test", range(6), [depth] * 6))


@pytest.mark.parametrize(
  ("sight", "expected"),
  [
    ("tail", [8, 9, 10, 11]),
    ("head_tail", [0, 1, 10, 11]),
    ("full", list(range(12))),
    ("none", [-1] * 4),
  ],
)
def test_what_is_seen_without_a_search(sight, expected):
  slots = seen(sight, episodes(3), 4)
  np.testing.assert_array_equal(np.where(slots >= 0, slots - 12 * np.arange(6)[:, None], -1), [expected] * 6)


def test_the_oracle_shows_what_is_needed_and_random_never_does():
  batch = episodes(5)
  gold = np.asarray(gold_slots(batch))
  np.testing.assert_array_equal(seen("oracle", batch, 4)[:, :2], gold)
  assert (seen("oracle", batch, 4)[:, 2:] == -1).all()
  drawn = np.concatenate([seen("random", batch, 4, np.random.default_rng(i)) for i in range(50)], axis=1)
  assert not (drawn[:, :, None] == gold[:, None, :]).any()
  for row in range(6):  # each of the ten others, about equally often
    counts = np.unique(drawn[row], return_counts=True)[1]
    assert len(counts) == 10
    assert counts.max() < 2.5 * counts.min()


@pytest.mark.parametrize("sight", ["memory", "deleted", "head_tail", "oracle", "full"])
def test_a_curve_is_what_reading_whole_contexts_gives(sight):
  curve = measure(READER, PARAMS, TASK, sight, CONFIG)
  assert curve.loss.shape == curve.right.shape == curve.found.shape == (6, 4)
  for column, depth in enumerate(TASK.depths(4)):
    batch = episodes(depth)
    gold = np.asarray(gold_slots(batch))
    if sight in ("memory", "deleted"):
      forgotten = np.zeros(72, bool)
      forgotten[gold.reshape(-1)] = sight == "deleted"
      slots = np.asarray(READER.retrieve(PARAMS, batch, forgotten).slots)
    else:
      slots = seen(sight, batch, 4)
    log_probs, hits, counted = map(np.asarray, READER.read(PARAMS, batch, slots))
    np.testing.assert_allclose(curve.loss[:, column], -log_probs[counted], atol=1e-5)
    np.testing.assert_array_equal(curve.right[:, column], hits[counted])
    np.testing.assert_array_equal(curve.first[:, column], slots[:, 0] == gold[:, 0])
    np.testing.assert_array_equal(curve.found[:, column], (slots == gold[:, :1]).any(axis=1))
  if sight == "deleted":
    assert not curve.found.any()
  if sight in ("oracle", "full"):
    assert curve.found.all()


def test_changed_facts_expect_the_other_answer():
  before, after = (measure(READER, PARAMS, TASK, "oracle", CONFIG, changed=changed) for changed in (False, True))
  assert (before.loss != after.loss).all()


def test_the_variance_over_depths_is_compared_with_its_interval():
  curve = measure(READER, PARAMS, TASK, "tail", CONFIG)
  rng = np.random.default_rng(0)
  uneven = curve._replace(loss=np.linspace(1, 2, 4)[None] + 0.01 * rng.normal(size=(6, 4)))
  even = curve._replace(loss=1 + 0.01 * rng.normal(size=(6, 4)))
  change = variance_change(uneven, even)
  assert change["before"] == pytest.approx(np.var([1, 4 / 3, 5 / 3, 2]), rel=0.1)
  assert change["interval"][1] < 0
  assert variance_change(even, even)["interval"] == [0, 0]
