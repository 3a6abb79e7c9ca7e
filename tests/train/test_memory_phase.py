"""Training with memory: one compiled step equals a loop over chunks, a numpy search and plain forward passes."""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.generate.augment import memory_tokens
from selfrag_jax.memory.topk_numpy import search_numpy
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.tasks.context_batch import ContextBatch, of_facts
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.train.memory_reader import MemoryReader
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.memory import MemoryPhase, MemoryPhaseConfig

TASK = Facts("sentence", 12)
IDS = memory_tokens(TASK.tokenizer)
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, block_pattern="T",
  init_scale=0.2, query_projection=True,
)  # fmt: skip
CONFIG = SelfRAGConfig(top_k=3, chunk_size=8, order="position", memory_dropout=0.3, contrastive_weight=0.5)


def contexts(rows: Sequence[int]) -> ContextBatch:
  """Lists with three questions each."""
  return of_facts(TASK.lists("train", rows, 3))


def random_params():
  params = nn.unbox(init_params(MODEL, jax.random.key(0)))
  projection = jax.random.normal(jax.random.key(1), (32, 32)) / 6
  return {"params": params["params"] | {"query_projection": projection}}


PARAMS = random_params()


def pairs(rows: Sequence[int]) -> ContextBatch:
  """Lists with a question each that takes two facts, of which one names the other."""
  return of_facts(Facts("two_fact", 12).lists("train", rows))


def phase(config=CONFIG, mesh=None, contexts=contexts, **overrides) -> MemoryPhase:
  mesh = mesh or make_mesh(1, 1, 1, jax.devices()[:1])
  optimizer = OptimizerConfig(learning_rate=5e-3)
  settings = MemoryPhaseConfig(
    **({"steps": 30, "batch_size": 8, "temperature": 0.1, "optimizer": optimizer} | overrides)
  )
  reader = MemoryReader(MODEL, config, IDS, mesh)
  return MemoryPhase("memory", contexts, reader, settings, mesh=mesh, seed=0, params=PARAMS, evaluate=lambda _: {})


def first_metrics(p: MemoryPhase) -> dict[str, float]:
  _, metrics = p.step(p.initial_state(), p.batch(0))
  return {name: float(value) for name, value in metrics.items()}


def embed_one(tokens, pooling) -> np.ndarray:
  """Embed one unpadded text: the oracle."""
  tokens = [*tokens, IDS.sep] if pooling == "cls" else tokens
  states = hidden(tokens)
  return states.mean(0) if pooling == "mean" else states[-1]


def hidden(tokens) -> np.ndarray:
  """The states of one text; what stands behind it cannot be seen, so one program serves all."""
  return np.asarray(HIDDEN(jnp.asarray([[*tokens, *[0] * (128 - len(tokens))]])))[0, : len(tokens)]


HIDDEN = jax.jit(lambda tokens: LM(MODEL).apply(PARAMS, tokens))
HEAD = jax.jit(lambda hidden: LM(MODEL).apply(PARAMS, hidden, method="logits"))


def slow_metrics(config: SelfRAGConfig, batch: ContextBatch, temperature: float) -> dict[str, float]:
  """What a step should say before it moves: one context, one question, one chunk at a time."""
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  total = dict.fromkeys(["language_loss", "contrastive_loss", "accuracy", "recall_at_1", "recall_at_k"], 0.0)
  chunks = [[c[:n].tolist() for c, n in zip(*pair, strict=True)] for pair in zip(*batch[:2], strict=True)]
  rows = np.stack([[embed_one(c, config.embed_pooling) for c in context] for context in chunks])
  everything = rows.reshape(-1, rows.shape[2])
  everything = unit(everything) if config.metric == "cosine" else everything
  for e, context in enumerate(chunks):
    for j, tokens in enumerate(batch.inputs[e]):
      n, size, gold = batch.query_lengths[e, j], batch.lengths[e, j], batch.gold[e, j]
      marked = lambda slots, of=context: [
        *(token for slot in sorted(slots) for token in (IDS.mem, *of[slot])), *[IDS.sep] * bool(slots)
      ]  # fmt: skip
      found, best = [], []
      for turn, share in enumerate(config.shares):
        query = embed_one([*marked(best), *tokens[:n]], config.embed_pooling)
        if config.retrieval_method == "learned":
          query = query @ np.asarray(PARAMS["params"]["query_projection"])
        slots = search_numpy({"embeddings": rows[e]}, query[None], config.top_k, metric=config.metric).slots[0]
        new = [slot for slot in slots.tolist() if slot not in found][:share]
        found, best = found + new, best + new[:1]
        scores = everything @ (unit(query) if config.metric == "cosine" else query) / temperature
        wanted = e * len(context) + gold[min(turn, len(gold) - 1)]
        scores[[e * len(context) + other for other in gold if e * len(context) + other != wanted]] = -np.inf
        total["contrastive_loss"] += np.log(np.exp(scores - scores[wanted]).sum()) / config.searches
        total["recall_at_1"] += (scores.argmax() == wanted) * (turn == 0)
      total["recall_at_k"] += set(gold.tolist()) <= set(found)
      before = marked(found) if batch.use_memory[e, j] else []
      logits = np.asarray(HEAD(hidden([*before, *tokens[:size]])[len(before) + n - 1 : -1]))
      log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
      total["language_loss"] -= log_probs[np.arange(size - n), tokens[n:size]].sum()
      total["accuracy"] += (logits.argmax(axis=-1) == tokens[n:size]).sum()
  return {name: value / batch.inputs[..., 0].size for name, value in total.items()}


@pytest.mark.parametrize(
  "changed",
  [{}, {"embed_pooling": "last", "retrieval_method": "dot"}, {"embed_pooling": "cls", "retrieval_method": "learned"}],
)
def test_a_step_is_what_a_loop_over_chunks_does(changed):
  config = dataclasses.replace(CONFIG, **changed)
  p = phase(config, temperature=1.0)
  got, batch = first_metrics(p), p.batch(0)
  assert 0 < batch.use_memory.mean() < 1
  expected = slow_metrics(config, batch, temperature=1.0)
  for name, value in expected.items():
    np.testing.assert_allclose(got[name], value, atol=2e-4, err_msg=name)
  both = expected["language_loss"] + config.contrastive_weight * expected["contrastive_loss"]
  np.testing.assert_allclose(got["loss"], both, atol=2e-4)


@pytest.mark.parametrize("changed", [{}, {"embed_pooling": "last", "retrieval_method": "dot", "searches": 3}])
def test_a_further_search_asks_with_what_was_found_before(changed):
  config = dataclasses.replace(CONFIG, **{"top_k": 5, "searches": 2, "memory_dropout": 0.0, **changed})
  p = phase(config, contexts=pairs, temperature=1.0)
  got, expected = first_metrics(p), slow_metrics(config, p.batch(0), temperature=1.0)
  for name, value in expected.items():
    np.testing.assert_allclose(got[name], value, atol=2e-4, err_msg=name)
  once = slow_metrics(dataclasses.replace(config, searches=1), p.batch(0), temperature=1.0)
  assert abs(once["contrastive_loss"] - expected["contrastive_loss"]) > 0.01


@pytest.mark.parametrize("searches", [1, 2])
def test_eight_devices_take_the_step_of_one(searches):
  mesh, config = make_mesh(), dataclasses.replace(CONFIG, searches=searches)
  with jax.set_mesh(mesh):
    sharded = first_metrics(phase(config, mesh=mesh))
  single = first_metrics(phase(config))
  for name, value in single.items():
    np.testing.assert_allclose(sharded[name], value, rtol=1e-4, err_msg=name)


def test_the_share_of_inputs_without_memory_is_memory_dropout():
  p = phase()
  used = np.stack([p.batch(step).use_memory for step in range(200)])
  assert abs(used.mean() - 0.7) < 0.02  # 4,800 draws: 3 standard deviations
  np.testing.assert_array_equal(phase().batch(7).use_memory, used[7])
  assert phase(dataclasses.replace(CONFIG, memory_dropout=0.0)).batch(0).use_memory.all()
  nothing = first_metrics(phase(dataclasses.replace(CONFIG, memory_dropout=1.0)))
  alone = slow_metrics(CONFIG, p.batch(0)._replace(use_memory=np.zeros((8, 3), bool)), 0.1)
  np.testing.assert_allclose(nothing["language_loss"], alone["language_loss"], atol=2e-4)


def test_the_contrastive_loss_teaches_to_find():
  recall = {}
  for weight in (0.0, 1.0):
    p = phase(dataclasses.replace(CONFIG, contrastive_weight=weight, embed_pooling="last"))
    state = p.initial_state()
    for batch in p.batches(0):
      state, metrics = p.step(state, batch)
    recall[weight] = float(metrics["recall_at_1"])
  assert recall[1.0] > recall[0.0] + 0.2, recall


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match=r"memory\.batch_size / memory\.accumulate = 4 is not divisible by the 8"):
    phase(mesh=make_mesh(), accumulate=2)
  with pytest.raises(ValueError, match="temperature is 0"):
    phase(temperature=0)
