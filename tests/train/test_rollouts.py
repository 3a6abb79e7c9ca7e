"""Rollouts in training: a batch brings all its data; each row has its own question's score and its own advantage."""

import threading
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.generate.transcript import Transcript
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.lm import init_params
from selfrag_jax.ragged import round_up
from selfrag_jax.tasks.rewards import RAGRewardWeights, RewardConfig, search_reward
from selfrag_jax.tasks.search_task import Corpus, SearchBatch
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import render_conversation
from selfrag_jax.train.experience import packed
from selfrag_jax.train.experts import demonstrations
from selfrag_jax.train.losses import advantages, policy_loss
from selfrag_jax.train.phases import refrag
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.rewards import RolloutRewards
from selfrag_jax.train.rollouts import Episodes, MemoryConfig, RolloutRunner, Scores, evaluate

TASK = TwoHopSearch(n_entities=8, n_relations=2)
MODEL = ModelConfig(TASK.tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, init_scale=0.3)


@pytest.fixture
def runner():
  return RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=16), make_mesh(1, 1, 1, jax.devices()[:1]))


def episodes(slots, answers):
  """Two rollouts of each of three questions, the last of which has no gold document."""
  says = lambda text: None if text is None else tuple(TASK.tokenizer.encode(text))
  slots = np.array(slots, np.int32)
  host = SimpleNamespace(slots=slots, searches=(slots >= 0).any(axis=2).sum(axis=1))
  zeros = np.zeros(3, np.int32)
  asked = SearchBatch(
    indices=zeros, prompts=zeros[:, None], lengths=zeros + 1, questions=zeros[:, None], question_lengths=zeros + 1,
    group_ids=zeros, first_slots=zeros, corpus=None,
    gold=np.array([[3, 7, -1], [5, -1, -1], [-1, -1, -1]], np.int32),
    answers=[("Harrow",), ("Brindle", "Avalor"), ("ally",)],
  )  # fmt: skip
  transcripts = [Transcript((), says(answer), valid=answer is not None) for answer in answers]
  return Episodes(host, host, transcripts, asked, repeats=2)  # type: ignore[arg-type]


def test_scores_hold_each_rollout_against_its_own_question(runner):
  slots = [
    [[7, 3], [-1, -1]],  # both gold documents at once
    [[7, -1], [5, -1]],  # one of two, and that of the second hop first; 5 is another question's
    [[3, 7], [5, 0]],  # the only one, but later
    [[-1, -1], [-1, -1]],  # nothing found is no gold document, although gold is padded by the same -1
    [[-1, -1], [-1, -1]],
    [[3, 5], [7, -1]],
  ]
  answers = ["Harrow", "Harrow Corvane", None, "Avalor", "Harrow", "ally"]
  scores = runner.score(episodes(slots, answers))
  expected = Scores(
    exact_match=[1, 0, 0, 1, 0, 1],  # any accepted answer counts
    f1=[1, 2 / 3, 0, 1, 0, 1],
    first_gold=[1, 0, 0, 0, 0, 0],
    gold_recall=[1, 0.5, 1, 0, 0, 0],
    all_gold=[1, 0, 1, 0, 0, 0],
    searches=[1, 2, 2, 0, 0, 2],
    valid=[1, 1, 0, 1, 1, 1],
  )
  for name, column in zip(Scores._fields, scores, strict=True):
    assert column.dtype == np.float32
    np.testing.assert_allclose(column, getattr(expected, name), rtol=1e-6, err_msg=name)
  assert scores.means()["gold_recall"] == pytest.approx(2.5 / 6)


def test_without_a_search_nothing_is_found(runner):
  scores = runner.score(episodes(np.zeros((6, 0, 1)), ["Harrow"] * 6))
  np.testing.assert_array_equal(scores.exact_match, [1, 1, 0, 0, 0, 0])
  assert not np.any([scores.first_gold, scores.gold_recall, scores.all_gold, scores.searches])


def trajectories(phase, asked, monkeypatch):
  """Return what the update of a step is made of: its rollouts, and its demonstrations."""
  given = []
  monkeypatch.setattr(refrag, "packed", lambda parts, *rows: given.extend(parts) or packed(parts, *rows))
  monkeypatch.setattr(phase, "_update", lambda state, batch: (state, {}))
  phase.step(phase.initial_state(), asked)
  return given


def test_the_advantage_of_a_rollout_reaches_its_own_row(runner, monkeypatch):
  indices, config = np.array([4, 9, 2]), RLConfig(steps=1, questions_per_step=3, rollouts_per_question=2)
  asked = TASK.batch("train", indices)
  prompts = asked.prompts
  params = nn.unbox(init_params(MODEL, jax.random.key(0)))
  bounds, mesh = RolloutConfig(1, 1, 3, 2), runner.mesh
  phase = Refrag("rl", runner, MODEL, config, bounds, mesh=mesh, seed=0, params=params, evaluate=lambda _: {})

  def gold_recall(tokens):
    """A reward that tells all rollouts apart, except those of the second question."""
    second = (tokens[:, : prompts.shape[1]] == prompts[1]).all(axis=1)
    return np.where(second, 0.5, (tokens * np.arange(tokens.shape[1])).sum(axis=1) % 97 / 97)

  def score(played):
    zeros = np.zeros(len(played.host.tokens))
    return Scores(zeros, zeros, zeros, gold_recall(played.host.tokens), zeros, zeros, zeros + 1)

  monkeypatch.setattr(runner, "score", score)
  [batch] = trajectories(phase, asked, monkeypatch)
  np.testing.assert_array_equal(batch.tokens[:, : prompts.shape[1]], np.repeat(prompts, 2, axis=0))
  ones, recall = np.ones(6), gold_recall(batch.tokens)
  expected, kept = advantages(search_reward(config.reward, 0 * ones, 0 * ones, recall, ones).reshape(3, 2), "mean")
  assert kept.tolist() == [True, False, True]
  assert len(set(expected.flat)) == 5
  for q in range(3):
    for r in range(2):
      assert batch.advantages[q * 2 + r] == expected[q, r]
      assert batch.kept[q * 2 + r] == kept[q]


def rl_phase(runner, **options):
  params = nn.unbox(init_params(MODEL, jax.random.key(0)))
  right = RewardConfig(f1_weight=0.0, retrieval_weight=0.0)  # no reward but for a right answer
  config = RLConfig(steps=1, questions_per_step=4, rollouts_per_question=2, reward=right, **options)
  bounds = RolloutConfig(2, 1, 4, 2)
  return Refrag("rl", runner, MODEL, config, bounds, mesh=runner.mesh, seed=0, params=params, evaluate=lambda _: {})


def demonstrated(phase, params, indices):
  """The mean log-probability of what the demonstrations of these questions write."""
  total = count = 0.0
  for index in indices:
    ids, mask = render_conversation(TASK.tokenizer, TASK.demonstration("train", index, "gold", 2), TASK.template)
    tokens, mask = np.array([ids]), np.array([mask])
    log_probs = sequence_log_probs(MODEL, params, tokens, np.ones_like(tokens))
    total, count = total + float((log_probs * mask).sum()), count + mask.sum()
  return total / count


def test_demonstrations_join_the_groups_of_their_questions(runner):
  """A fresh policy answers nothing right: only the demonstrations tell it apart, and become more probable."""
  asked = TASK.batch("train", np.arange(4))
  plain, taught = rl_phase(runner), rl_phase(runner, experts=True)
  state, metrics = plain.step(plain.initial_state(), asked)
  assert metrics["groups_kept"] == 0
  before = demonstrated(taught, taught.initial_state().params, range(4))
  assert demonstrated(plain, state.params, range(4)) == pytest.approx(before, abs=1e-5)
  state, metrics = taught.step(taught.initial_state(), asked)
  assert metrics["groups_kept"] == 1
  assert demonstrated(taught, state.params, range(4)) > before + 1e-3
  split = rl_phase(runner, experts=True, accumulate=2)
  other, _ = split.step(split.initial_state(), asked)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, other.params)


def test_a_demonstration_earns_what_such_a_rollout_would(runner):
  """Not a constant 1, beside which rollouts that are as good would be pushed down."""
  asked = TASK.batch("train", np.arange(4))
  weights = RAGRewardWeights(answer=0.6, relevance=0.3, efficiency=0.1)
  rewards = RolloutRewards(runner, RewardConfig(terms="weighted", weights=weights), 3)
  _, earned = demonstrations(TASK, asked, 3, 200, rewards)
  np.testing.assert_allclose(earned, 0.6 + 0.3 + 0.1 * (1 - 2 / 3), rtol=1e-6)  # both gold documents, two searches
  missing = asked._replace(gold=np.where(np.arange(2) == 0, asked.gold, (asked.gold + 1) % len(asked.corpus.tokens)))
  _, half = demonstrations(TASK, missing, 3, 200, rewards)
  assert (half < earned - 0.1).any()
  _, right = demonstrations(TASK, asked, 2, 200, RolloutRewards(runner, RewardConfig(), 2))
  assert right.tolist() == [1] * 4
  said = [("Oslo", ["Title: Norway\nContent: Its capital is Oslo."]), ("Rome", ["Title: Norway\nContent: None."])]
  of_texts = RolloutRewards(runner, RewardConfig(terms="weighted", weights=RAGRewardWeights(0, 0, 0, 0, 1)), 1)
  supported, alone = of_texts.of_right_answers(said, np.zeros(2), np.zeros(2))
  assert supported > alone
  with pytest.raises(ValueError, match=r"experts earn as right answers"):
    RLConfig(experts=True, reward=RewardConfig(terms="weighted", model="runs/reward_model"))


def test_a_demonstration_that_is_worse_than_the_rollouts_is_left_alone(runner, monkeypatch):
  """Its ratio stays at 1: nothing would bound how improbable a negative advantage makes it."""
  phase = rl_phase(runner, experts=True)
  monkeypatch.setattr(phase, "_score_rewards", SimpleNamespace(of_right_answers=lambda *_: np.array([0, 0, 1, 1.0])))
  monkeypatch.setattr(phase, "_rewards", lambda episodes, scores: np.full(8, 0.5, np.float32))
  rollouts, experts = trajectories(phase, TASK.batch("train", np.arange(4)), monkeypatch)
  worse, better = experts.advantages[:2], experts.advantages[2:]
  assert (worse == 0).all()
  assert (better > 0).all()
  assert (rollouts.advantages.reshape(4, 2)[:2] > 0).all()


def test_a_step_tells_how_probable_the_tokens_of_right_rollouts_are(runner, monkeypatch):
  """What the alarm watches: a mean over their sampled tokens, not over the rollouts; nothing where none is right."""
  phase, played, right = rl_phase(runner), [], np.zeros(8)

  def score(episodes):
    played.append(episodes.host)
    zeros = np.zeros(8)
    return Scores(right, zeros, zeros, zeros, zeros, zeros, zeros + 1)

  monkeypatch.setattr(runner, "score", score)
  found = {}
  for rows in ((), (1, 6), range(8)):
    right[:] = np.isin(np.arange(8), rows)
    state = phase.initial_state()
    params = jax.device_get(state.params)
    found[rows] = phase.step(state, TASK.batch("train", np.arange(4)))[1].get("right_log_prob")
  assert found[()] is None
  host = played[0]
  inside = (np.arange(host.tokens.shape[1]) < np.asarray(host.lengths)[:, None]).astype(np.int32)
  log_probs = np.asarray(sequence_log_probs(MODEL, params, host.tokens, inside))
  assert len({host.sampled[row].sum() for row in (1, 6)}) == 2  # a mean over rollouts would be another
  for rows in ((1, 6), range(8)):
    expected = np.concatenate([log_probs[row][host.sampled[row]] for row in rows]).mean()
    assert found[rows] == pytest.approx(expected, abs=1e-4), rows
  assert abs(found[1, 6] - found[range(8)]) > 1e-3


def test_wrong_rollouts_are_pulled_to_the_policy_before(runner):
  """They are also where a group teaches nothing; without the pull, nothing moves."""
  phase = rl_phase(runner, kl_weight=0.5, kl_on="wrong")
  asked, start = TASK.batch("train", np.arange(4)), phase.initial_state().params
  away = lambda: jax.tree.map(lambda x: x * 1.1, start)
  _, metrics = phase.step(phase.initial_state().replace(params=away()), asked)
  assert metrics["groups_kept"] == 0
  assert metrics["kl"] > 0
  assert metrics["grad_norm"] > 0
  everywhere = rl_phase(runner, kl_weight=0.5)
  _, metrics = everywhere.step(everywhere.initial_state().replace(params=away()), asked)
  assert metrics["grad_norm"] == 0
  with pytest.raises(ValueError, match="kl_weight is 0"):
    RLConfig(kl_on="wrong")


def test_micro_batches_without_a_token_are_not_computed(runner, monkeypatch):
  """Their loss is not a number here."""

  def strict(log_probs, old, advantages, rewarded, **options):
    sums = policy_loss(log_probs, old, advantages, rewarded, **options)
    return sums._replace(loss=jnp.where(rewarded.any(), sums.loss, jnp.nan))

  monkeypatch.setattr(refrag, "policy_loss", strict)
  losses = {}
  for last in (2, 8):  # of 8 rollouts with a reward of their own, the others earn the same
    phase = rl_phase(runner, accumulate=8)
    earned = np.where(np.arange(8) < last, np.arange(8) % 2, 0.5).astype(np.float32)
    monkeypatch.setattr(phase, "_rewards", lambda episodes, scores, earned=earned: earned)
    _, metrics = phase.step(phase.initial_state(), TASK.batch("train", np.arange(4)))
    losses[last] = float(metrics["loss"])
    assert metrics["groups_kept"] == last / 8
    assert metrics["tokens"] > 8 * 10  # of all rollouts
  assert np.isfinite(list(losses.values())).all()


@pytest.mark.parametrize(
  "options", [{}, {"experts": True}, {"kl_weight": 0.5, "kl_on": "wrong"}], ids=["plain", "experts", "wrong"]
)
def test_the_rows_of_an_update_are_those_that_it_is_planned_for(runner, options, monkeypatch):
  """Also where they do not split evenly; and what is pulled or shown alone is no empty micro-batch."""
  rows, learned = [], []
  monkeypatch.setattr(refrag, "packed", lambda *args: rows.append(packed(*args)) or rows[-1])
  for accumulate in (1, 3):
    phase = rl_phase(runner, accumulate=accumulate, **options)
    start = phase.initial_state()
    moved = start.replace(params=jax.tree.map(lambda x: x * 1.1, start.params))  # the KL to it is not 0
    state, metrics = phase.step(moved, TASK.batch("train", np.arange(4)))
    assert (metrics["grad_norm"] > 0) == bool(options)
    learned.append(state.params)
    planned = phase.trace()["update"].in_avals[0][1]
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(planned) == shapes(rows[-1])
    assert len(rows[-1].tokens) == round_up(12 if "experts" in options else 8, accumulate)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *learned)


@pytest.mark.parametrize("options", [{"experts": True}, {"kl_weight": 0.1, "kl_on": "wrong"}])
def test_a_control_is_not_shown_what_it_must_not_know(options):
  with pytest.raises(ValueError, match="the control random_reward hides the right answers"):
    RLConfig(control="random_reward", **options)


def test_a_demonstration_that_is_longer_than_a_rollout_changes_nothing(runner, monkeypatch):
  asked = TASK.batch("train", np.arange(4))
  plain, taught = rl_phase(runner), rl_phase(runner, experts=True)
  shown, earned = taught._demonstrations(asked, 200)
  assert shown.kept.all()
  assert not taught._demonstrations(asked, int(shown.lengths.min()) - 1)[0].kept.any()
  assert earned.tolist() == [1] * 4
  render = taught._demonstrations
  too_long = lambda *args: (render(*args)[0]._replace(kept=np.zeros(4, bool)), earned)
  monkeypatch.setattr(taught, "_demonstrations", too_long)
  (state, metrics), (other, _) = (phase.step(phase.initial_state(), asked) for phase in (taught, plain))
  assert metrics["groups_kept"] == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, other.params)


def test_each_table_is_drawn_once_and_ahead_of_its_step(monkeypatch):
  """The prefetch thread makes batches; the thread that waits for the devices draws the encoder's table at most."""
  drawn, task = [], TwoHopSearch(n_entities=8, n_relations=2)
  draw = task.kb.question
  note = lambda split, index: (drawn.append((threading.current_thread(), split, index)), draw(split, index))[1]
  monkeypatch.setattr(task.kb, "question", note)
  mesh, config = make_mesh(1, 1, 1, jax.devices()[:1]), RLConfig(steps=3, questions_per_step=2)
  params = nn.unbox(init_params(MODEL, jax.random.key(0)))
  runner = RolloutRunner(task, MODEL, MemoryConfig(d_embed=16), mesh)
  bounds = RolloutConfig(1, 1, 3, 2)
  phase = Refrag("rl", runner, MODEL, config, bounds, mesh=mesh, seed=0, params=params, evaluate=lambda _: {})
  state = phase.initial_state()
  for batch in phase.batches(0):
    state, _ = phase.step(state, batch)
  evaluate(runner, params, "valid", 3, 2, bounds)
  here = [question for thread, *question in drawn if thread is threading.current_thread()]
  ahead = [question for thread, *question in drawn if thread is not threading.current_thread()]
  assert here == [["train", 0]]
  assert ahead == [["train", i] for i in range(6)] + [["valid", i] for i in (0, 1, 2, 2)]


class OneCorpus:
  """The task, as if all its questions were asked over the documents of the first."""

  corpus = TASK.batch("train", [0]).corpus

  def __getattr__(self, name):
    return getattr(TASK, name)

  def batch(self, split, indices):
    return TASK.batch(split, indices)._replace(corpus=self.corpus)


@pytest.mark.parametrize(("task", "built"), [(OneCorpus(), 1), (TASK, 3)], ids=["one", "fresh"])
def test_the_memory_of_a_shared_corpus_is_built_once(task, built, monkeypatch):
  runner = RolloutRunner(task, MODEL, MemoryConfig(d_embed=16), make_mesh(1, 1, 1, jax.devices()[:1]))
  builds, build = [], runner._build
  monkeypatch.setattr(runner, "_build", lambda *args: builds.append(args) or build(*args))
  params = nn.unbox(init_params(MODEL, jax.random.key(0)))
  scores = evaluate(runner, params, "valid", 5, 2, RolloutConfig(1, 1, 3, 2))
  assert len(scores.exact_match) == 5
  assert len(builds) == built


@pytest.mark.parametrize("devices", [1, 8])
def test_keys_are_embedded_by_their_lengths_and_stored_in_their_order(devices):
  rng, n = np.random.default_rng(0), 37
  lengths = np.append(rng.integers(1, 250, n - 1), 300).astype(np.int32)
  keys = np.where(np.arange(300) < lengths[:, None], rng.integers(1, TASK.tokenizer.vocab_size, (n, 300)), 0)
  corpus = Corpus(keys.astype(np.int32), lengths, np.zeros((n, 4), np.int32), np.ones(n, np.int32), np.arange(n))
  runner = RolloutRunner(
    TASK, MODEL, MemoryConfig(encoder="lm"), make_mesh(1, devices, 1, jax.devices()[:devices]),
    encoder_params=nn.unbox(init_params(MODEL, jax.random.key(0))),
  )  # fmt: skip
  shapes, embed = [], runner._embed
  runner._embed = lambda params, rows, of: shapes.append(rows.shape[1]) or embed(params, rows, of)
  stored = np.asarray(runner.memory(corpus).embeddings)
  assert shapes == [64, 128, 256, 300]
  np.testing.assert_allclose(stored[:n], runner.encoder.apply(runner.encoder.params, keys, lengths), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_memory_is_kept_in_the_type_that_the_config_names(dtype):
  runner = RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=16, dtype=dtype), make_mesh(1, 1, 1, jax.devices()[:1]))
  assert runner.memory(TASK.batch("train", range(2)).corpus).embeddings.dtype == dtype
