"""Near misses: which rollouts are tried again, that they go on behind their first search, and what an update reads."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.lm import init_params
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train.experience import packed
from selfrag_jax.train.losses import advantages
from selfrag_jax.train.near_misses import as_whole, behind_searches, near_misses, searches_kept
from selfrag_jax.train.phases import refrag
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner, Scores

TASK = TwoHopSearch(n_entities=4, n_relations=2)
MODEL = ModelConfig(TASK.tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, init_scale=0.3, tie_embeddings=False)
BOUNDS = RolloutConfig(2, 1, 3, 2)
Q, R, S = 4, 3, 2


@pytest.fixture(scope="module")
def runner():
  return RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=16), make_mesh(1, 1, 1, jax.devices()[:1]))


@pytest.fixture(scope="module")
def params(runner):
  """A random policy whose head is pushed towards the tokens that open and close searches and answers."""
  fresh, control = nn.unbox(init_params(MODEL, jax.random.key(0))), runner.control
  scale = np.ones((MODEL.padded_vocab, 1), np.float32)
  scale[[control.search_start, control.search_end, control.answer_start, control.answer_end], 0] = 6, 4, 4, 4
  return {"params": fresh["params"] | {"unembed": fresh["params"]["unembed"] * scale}}


def phase(runner, params, bounds=BOUNDS, **options):
  config = RLConfig(steps=1, questions_per_step=Q, rollouts_per_question=R, resample=S, advantage="grpo", **options)
  return Refrag("rl", runner, MODEL, config, bounds, mesh=runner.mesh, seed=0, params=params, evaluate=lambda _: {})


def rolled_out(runner, params, bounds=BOUNDS):
  return runner.run(params, TASK.batch("train", range(Q)), bounds, jax.random.key(3), repeats=R)


def test_a_near_miss_found_a_gold_document_first_and_answered_wrongly(runner, params):
  episodes = rolled_out(runner, params)
  gold, slots = episodes.batch.gold, np.full((Q * R, 2, 1), -1)
  slots[[1, 2, 4, 8], 0, 0] = gold[0, 1], gold[0, 0], gold[1, 0], gold[2, 1]  # the second gold document counts, too
  slots[3, 1, 0] = gold[1, 0]  # in the second search
  slots[10, 0, 0] = gold[0, 0]  # of another question
  exact = np.zeros(Q * R)
  exact[[2, 8]] = 1
  rows, missed = near_misses(episodes._replace(host=episodes.host.replace(slots=slots)), exact, 1)
  assert rows.tolist() == [1, 4, 6, 9]
  assert missed.tolist() == [True, True, False, False]
  # where a rule writes the first query, all rollouts of a question have what it found: the second search counts
  rows, missed = near_misses(episodes._replace(host=episodes.host.replace(slots=slots)), exact, 2)
  assert rows.tolist() == [0, 3, 6, 9]
  assert missed.tolist() == [False, True, False, False]


@pytest.mark.parametrize("first", ["question", "policy"])
def test_rollouts_go_on_behind_the_searches_that_are_kept(runner, params, first):
  """A rule searches in every row, this policy in none: then a row starts again behind what there is."""
  bounds = dataclasses.replace(BOUNDS, max_hops=3, first_query=first)
  before, made, rows = rolled_out(runner, params, bounds), phase(runner, params, bounds), np.arange(Q) * R
  kept = searches_kept(bounds)
  assert made._bounds_behind.max_hops == 3 - kept == (1 if first == "question" else 2)
  prompts = behind_searches(before, rows, kept, made._width_behind(before.batch), runner.control)
  again = runner.run(params, prompts, made._bounds_behind, jax.random.key(9), repeats=S)
  whole = as_whole(before, rows, kept, again, runner.control)
  assert again.host.tokens.shape[1] == before.host.tokens.shape[1]  # the update reads both at once
  assert (before.host.searches[rows] >= 1).all() == (first == "question")
  for i, transcript in enumerate(whole.transcripts):
    row, start = rows[i // S], prompts.lengths[i // S]
    for name in ("tokens", "sampled"):
      np.testing.assert_array_equal(getattr(whole.host, name)[i, :start], getattr(before.host, name)[row, :start])
    np.testing.assert_array_equal(whole.host.slots[i, 0], before.host.slots[row, 0])
    assert whole.host.searches[i] == again.host.searches[i] + (first == "question") <= bounds.max_hops
    assert not again.host.sampled[i, :start].any()
    if first == "question":
      assert whole.host.tokens[i, start - 1] == runner.control.retrieval_end
      assert transcript.queries[0] == before.transcripts[row].queries[0]
    else:
      assert start == before.batch.lengths[i // S]
  inside = (np.arange(again.host.tokens.shape[1])[None] < again.host.lengths[:, None]).astype(np.int32)
  gap = np.abs(np.asarray(sequence_log_probs(MODEL, params, again.host.tokens, inside)) - again.host.log_probs)
  assert again.host.sampled.sum() > Q * S
  assert gap[again.host.sampled].max() < 1e-4


def test_what_is_kept_ends_with_what_the_last_kept_search_found(runner, params):
  before, control = rolled_out(runner, params), runner.control
  start, found = 2, control.retrieval_end
  tokens = np.full((Q * R, 12), control.pad)
  tokens[0, :12] = [found, 1, 5, found, 5, found, 5, found, 1, 1, 1, 1]  # a closing within the prompt is none
  tokens[3, :6] = [1, 1, 5, found, 5, 1]
  sampled = np.zeros_like(tokens, bool)
  sampled[0, 3] = True  # written by the policy, as its text
  host = before.host.replace(tokens=tokens, sampled=sampled, prompt_lengths=np.full(Q * R, start))
  for kept, ends in ((1, [6, 4, 2, 2]), (2, [8, 4, 2, 2])):
    prompts = behind_searches(before._replace(host=host), np.arange(Q) * R, kept, 12, control)
    assert prompts.lengths.tolist() == ends
    assert prompts.prompts[0, : ends[0]].tolist() == tokens[0, : ends[0]].tolist()


def test_what_a_near_miss_has_seen_is_not_shown_again(runner, params, monkeypatch):
  bounds, calls = dataclasses.replace(BOUNDS, distinct=True), []
  made, run = phase(runner, params, bounds), runner.run

  def noted(*args, **options):
    """Rollouts of which the second of each question is tried again, behind a first search that found 7 + question."""
    calls.append(options)
    done = run(*args, **options)
    slots = np.arange(len(done.host.slots)).reshape(-1, done.repeats) // done.repeats + 7
    shown = np.where(np.arange(done.repeats) == 1, slots, 0).reshape(-1, 1, 1) + np.zeros_like(done.host.slots)
    return done._replace(host=done.host.replace(slots=shown)) if len(calls) == 1 else done

  monkeypatch.setattr(runner, "run", noted)
  monkeypatch.setattr(
    "selfrag_jax.train.phases.refrag.near_misses", lambda *_: (np.arange(Q) * R + 1, np.ones(Q, bool))
  )
  made.step(made.initial_state(), TASK.batch("train", np.arange(Q)))
  first, again = calls
  assert "seen" not in first
  np.testing.assert_array_equal(again["seen"], [[7], [8], [9], [10]])
  assert set(made.trace()) == {"rollout", "again", "update"}


def test_an_update_reads_near_misses_as_groups_of_their_own(runner, params, monkeypatch):
  made, given, scored = phase(runner, params), [], []

  def score(played):
    """The first search of questions 0 and 2 found a gold document; rewards tell all rollouts apart."""
    n = len(played.host.tokens)
    values = (played.host.tokens * np.arange(1, played.host.tokens.shape[1] + 1)).sum(axis=1) % 97 / 97
    scored.append(values)
    zeros = np.zeros(n)
    return Scores(zeros, zeros, zeros, values, zeros, zeros, zeros + 1)

  monkeypatch.setattr(runner, "score", score)
  monkeypatch.setattr(
    "selfrag_jax.train.phases.refrag.near_misses",
    lambda episodes, exact, kept: (np.arange(Q) * R + 1, np.array([True, False, True, False])),
  )
  monkeypatch.setattr(refrag, "packed", lambda parts, *rows: given.extend(parts) or packed(parts, *rows))
  update, shapes = made._update, []
  monkeypatch.setattr(made, "_update", lambda state, rows: shapes.append(rows.tokens.shape) or update(state, rows))
  _, metrics = made.step(made.initial_state(), TASK.batch("train", np.arange(Q)))
  before, behind = given
  assert metrics["near_misses"] == 0.5
  assert len(before.tokens) + len(behind.tokens) == made._n_rows == Q * (R + S)
  first, again = scored
  expected, _ = advantages((0.3 * again).astype(np.float32).reshape(Q, S), "grpo")
  np.testing.assert_allclose(behind.advantages, expected.reshape(-1), rtol=1e-4, atol=1e-5)
  assert behind.kept.reshape(Q, S).tolist() == [[True] * S, [False] * S, [True] * S, [False] * S]
  own, _ = advantages((0.3 * first).astype(np.float32).reshape(Q, R), "grpo")
  np.testing.assert_allclose(before.advantages, own.reshape(-1), rtol=1e-4, atol=1e-5)
  programs = phase(runner, params).trace()
  assert set(programs) == {"rollout", "again", "update"}
  planned = programs["update"].in_avals
  assert shapes[0] in [x.shape for x in jax.tree.leaves(planned)]


def test_near_misses_teach_where_the_rollouts_before_do_not(runner, params, monkeypatch):
  """The first rollouts of a question all earn the same; those that go on behind its near miss do not."""

  def score(played):
    first, zeros = played.repeats == R, np.zeros(len(played.host.tokens))
    return Scores(zeros, zeros, zeros, zeros if first else zeros + np.arange(len(zeros)) % 2, zeros, zeros, zeros + 1)

  monkeypatch.setattr(runner, "score", score)
  every = lambda found: lambda *_: (np.arange(Q) * R, np.full(Q, found))
  for found in (False, True):
    monkeypatch.setattr("selfrag_jax.train.phases.refrag.near_misses", every(found))
    made = phase(runner, params)
    state, metrics = made.step(made.initial_state(), TASK.batch("train", np.arange(Q)))
    assert metrics["groups_kept"] == 0
    assert metrics["near_misses"] == found
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, params)
    assert (max(jax.tree.leaves(moved)) > 1e-6) == found


def test_what_cannot_go_on_is_refused(runner, params):
  with pytest.raises(ValueError, match=r"resample = 1: a rollout alone"):
    RLConfig(resample=1)
  with pytest.raises(ValueError, match=r"rl\.resample = 2 goes on behind search 1: set rollout\.max_hops to 2"):
    Refrag(
      "rl", runner, MODEL, RLConfig(resample=2, questions_per_step=4), RolloutConfig(1, 1, 3, 2),
      mesh=runner.mesh, seed=0, params=params, evaluate=lambda _: {},
    )  # fmt: skip
