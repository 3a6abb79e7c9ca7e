"""Encoders and cross-encoders learn to rank; chunks and devices change neither the loss nor the gradient."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from selfrag_jax.encoders.bert import BertConfig, BertEncoder, init_bert
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.cross_encoder import CrossEncoder
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.rerank import RerankRetriever
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.text.wordpiece import SPECIAL, WordPieceTokenizer
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.encoder import EncoderPhase, EncoderPhaseConfig
from selfrag_jax.train.phases.rerank import RerankPhase, RerankPhaseConfig

NAMES = [f"name{chr(97 + i)}{chr(97 + j)}" for i in range(6) for j in range(4)]
FAST = OptimizerConfig(learning_rate=3e-3, b2=0.999)


@pytest.fixture(scope="module")
def data():
  """Questions share one word with their document and one with all others."""
  documents = [Document(name, content=f"the code of {name} is here") for name in NAMES]
  queries = {name: f"where is {name} ?" for name in NAMES}
  return Judged(documents, queries, {name: {name: 1.0} for name in NAMES})


@pytest.fixture(scope="module")
def encoder():
  tokenizer = WordPieceTokenizer([*SPECIAL, *NAMES, "the", "code", "of", "is", "here", "where", "?"])
  config = BertConfig(tokenizer.vocab_size, 32, 2, 4, 64, 16, max_tokens=12)
  params = jax.jit(lambda key: jax.tree.map(lambda x: x, init(config, key)))(jax.random.key(0))
  return BertEncoder(config, params, tokenizer)


def init(config, key):
  return nn.unbox(init_bert(config, key))


def encoder_phase(data, encoder, devices=1, **options):
  config = EncoderPhaseConfig(
    **{"steps": 40, "batch_size": 8, "query_tokens": 8, "document_tokens": 12, "optimizer": FAST, **options}
  )
  mesh = make_mesh(-1, 1, 1, jax.devices()[:devices])
  task = RankingTask(data, config.hard_negatives)
  return EncoderPhase("encoder", task, encoder, config, mesh=mesh, seed=0, params=encoder.params, evaluate=lambda _: {})


def first_step(phase):
  with jax.set_mesh(phase._mesh):
    state, metrics = phase.step(phase.initial_state(), phase.batch(0))
  return jax.device_get(state.params), {name: float(value) for name, value in metrics.items()}


def test_micro_batches_and_devices_change_nothing(data, encoder):
  params, metrics = first_step(encoder_phase(data, encoder))
  assert metrics["loss"] > 1
  for options in ({"accumulate": 4}, {"devices": 4}, {"accumulate": 2, "devices": 2}):
    other, found = first_step(encoder_phase(data, encoder, **options))
    assert found == pytest.approx(metrics, rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params, other)


def test_micro_batches_need_less_memory(data, encoder):
  sizes = []
  for accumulate in (1, 16):
    phase = encoder_phase(data, encoder, accumulate=accumulate, batch_size=64)
    with jax.set_mesh(phase._mesh):
      [program] = phase.trace().values()
      sizes.append(program.lower().compile().memory_analysis().temp_size_in_bytes)
  assert sizes[1] < 0.5 * sizes[0]


def test_other_relevant_documents_are_no_negatives(data, encoder):
  """A query whose document also belongs to another one of the batch does not push it away."""
  phase = encoder_phase(data, encoder, hard_negatives=0)
  batch = phase.batch(0)
  twin = {**batch, "known": np.ones_like(batch["known"])}
  with jax.set_mesh(phase._mesh):
    _, metrics = phase.step(phase.initial_state(), twin)
  assert float(metrics["loss"]) == pytest.approx(0.0, abs=1e-6)


def test_an_encoder_learns_what_is_relevant(data, encoder):
  phase = encoder_phase(data, encoder)
  with jax.set_mesh(phase._mesh):
    state = phase.initial_state()
    for step in range(40):
      state, metrics = phase.step(state, phase.batch(step))
  before, after = encoder, encoder.with_params(jax.device_get(state.params))
  hits = []
  for embed in (before, after):
    scores = embed(list(data.queries.values())) @ embed([d.text for d in data.documents]).T
    hits.append((scores.argmax(axis=1) == np.arange(len(NAMES))).mean())
  assert float(metrics["accuracy"]) > 0.9
  assert hits[1] > 0.9 > hits[0]


def test_queries_can_be_trained_alone(data, encoder):
  phase = encoder_phase(data, encoder, trained="queries")
  vectors = encoder([d.text for d in data.documents])
  batch = phase.batch(0)
  assert "documents" not in batch
  np.testing.assert_array_equal(batch["vectors"], vectors[phase.task.examples(range(8)).documents])
  # the loss by hand: all documents of the batch compete with the question's own
  queries = encoder([phase.task.queries[i] for i in phase.task.examples(range(8)).queries])
  scores = queries.astype(np.float64) @ batch["vectors"].reshape(16, -1).T / 0.05
  scores[batch["known"] & (np.arange(16) != 2 * np.arange(8)[:, None])] = -np.inf  # it may also be a hard negative
  expected = np.mean([np.log(np.exp(row).sum()) - row[2 * i] for i, row in enumerate(scores)])
  with jax.set_mesh(phase._mesh):
    state = phase.initial_state()
    for step in range(40):
      state, metrics = phase.step(state, phase.batch(step))
      if not step:
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-3)
  trained = encoder.with_params(jax.device_get(state.params))
  found = (trained(list(data.queries.values())) @ vectors.T).argmax(axis=1)
  assert (found == np.arange(len(NAMES))).mean() > 0.9


def test_a_cross_encoder_learns_what_is_relevant(encoder):
  """BM25 cannot tell the two documents about a name apart; the cross-encoder can, of names that it was not taught."""
  documents = [
    Document(f"{name}{end}", content=f"the code of {name} is {end}") for name in NAMES for end in ("here", "?")
  ]
  about = lambda names: Judged(documents, {n: f"where is {n}" for n in names}, {n: {f"{n}?": 1.0} for n in names})
  start = CrossEncoder.from_encoder(encoder, jax.random.key(1))
  config = RerankPhaseConfig(steps=60, batch_size=8, negatives=1, depth=10, tokens=16, optimizer=FAST)
  task = RankingTask(about(NAMES[:16]), config.negatives, mined=config.depth)
  states = {}
  for devices, accumulate in ((1, 1), (4, 2)):
    mesh = make_mesh(-1, 1, 1, jax.devices()[:devices])
    split = RerankPhaseConfig(**{**vars(config), "accumulate": accumulate})
    phase = RerankPhase("rerank", task, start, split, mesh=mesh, seed=0, params=start.params, evaluate=lambda _: {})
    with jax.set_mesh(mesh):
      states[devices], first = phase.step(phase.initial_state(), phase.batch(0))
    assert float(first["loss"]) == pytest.approx(np.log(2), abs=0.2)  # a guess between two
  one, four = (jax.device_get(states[n].params)["params"] for n in (1, 4))
  del one["head"]["bias"], four["head"]["bias"]  # a softmax does not see it: its gradient is noise
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), one, four)
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  phase = RerankPhase("rerank", task, start, config, mesh=mesh, seed=0, params=start.params, evaluate=lambda _: {})
  with jax.set_mesh(mesh):
    state = phase.initial_state()
    for step in range(config.steps):
      state, _ = phase.step(state, phase.batch(step))
  trained = CrossEncoder(start.config, jax.device_get(state.params), start.tokenizer)
  chosen = []
  for reranker in (start, trained):
    retriever = RerankRetriever("bm25", reranker, depth=2)
    retriever.add_documents(documents)
    chosen.append([retriever.retrieve(f"where is {name}", 1)[0].id == f"{name}?" for name in NAMES[16:]])
  assert np.mean(chosen[1]) == 1.0 > np.mean(chosen[0])


def test_long_rows_keep_their_end(data, encoder):
  phase = encoder_phase(data, encoder, document_tokens=6)
  batch = phase.batch(0)
  assert (batch["lengths"] == 6).all()
  assert (batch["documents"][..., 5] == encoder.tokenizer.special["[SEP]"]).all()


@pytest.fixture(scope="module")
def lm_encoder(data):
  tokenizer = ByteTokenizer()
  config = ModelConfig(tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, ssm_head_dim=16, block_pattern="MT")
  return LMEncoder(config, nn.unbox(init_params(config, jax.random.key(0))), tokenizer, max_tokens=32)


def test_a_language_model_can_be_the_encoder(data, lm_encoder):
  encoder = lm_encoder.with_params(lm_encoder.params)
  assert encoder.constants == {}
  encoder.fit([document.text for document in data.documents])
  phase = encoder_phase(data, encoder, query_tokens=24, document_tokens=32, steps=15)
  with jax.set_mesh(phase._mesh):
    state, losses = phase.initial_state(), []
    for step in range(15):
      state, metrics = phase.step(state, phase.batch(step))
      losses.append(float(metrics["loss"]))
  assert np.mean(losses[-3:]) < 0.8 * losses[0]
  trained = encoder.with_params(jax.device_get(state.params))
  retriever = DenseRetriever(encoder=trained, backend="numpy")
  retriever.add_documents(data.documents)  # which does not fit it again
  np.testing.assert_array_equal(trained.constants["mean"], jax.device_get(state.params)["mean"])
  for name, values in encoder.constants.items():  # the queries learn a mean of their own; weights are counted
    assert np.array_equal(trained.constants[name], values) == (name == "weights"), name
  assert not np.allclose(trained.constants["query_mean"], trained.constants["mean"], atol=1e-4)


def test_a_language_model_learns_to_embed_and_to_write(data, lm_encoder):
  options = {"query_tokens": 24, "document_tokens": 20, "batch_size": 4, "steps": 25}
  weights = {
    "contrast": {},
    "both": {"language_weight": 0.5},
    "text": {"contrastive_weight": 0, "language_weight": 0.5},
  }
  phases = {name: encoder_phase(data, lm_encoder, **options, **of) for name, of in weights.items()}
  first, last, accuracy = {}, {}, {}
  for name, phase in phases.items():
    with jax.set_mesh(phase._mesh):
      state = phase.initial_state()
      for step in range(25):
        state, metrics = phase.step(state, phase.batch(step))
        first.setdefault(name, metrics)
      last[name], accuracy[name] = metrics, float(metrics["accuracy"])
  # the documents are cut to 20 bytes: those between the first and the last are predicted
  batch, config, params = phases["both"].batch(0), lm_encoder.config, lm_encoder.params["model"]
  tokens = batch["documents"].reshape(8, 20)
  logits = LM(config).apply(params, LM(config).apply(params, tokens), method="logits")
  log_probs = np.asarray(jax.nn.log_softmax(np.asarray(logits, np.float64)[:, :18]))
  written = -np.take_along_axis(log_probs, tokens[:, 1:19, None], axis=2).mean()
  assert (batch["lengths"] == 20).all()
  assert float(first["both"]["language_loss"]) == pytest.approx(written, rel=1e-4)
  assert float(first["both"]["loss"]) == pytest.approx(float(first["contrast"]["loss"]) + 0.5 * written, rel=1e-4)
  assert float(first["text"]["loss"]) == pytest.approx(0.5 * written, rel=1e-4)
  for name in ("both", "text"):
    assert float(last[name]["language_loss"]) < 0.9 * written
  assert accuracy["both"] > accuracy["text"]


def test_micro_batches_change_neither_loss_nor_gradient_of_embedding_and_writing(data, lm_encoder):
  options = {"query_tokens": 24, "document_tokens": 20, "batch_size": 8, "language_weight": 0.5}
  whole, parts = (encoder_phase(data, lm_encoder, **options, accumulate=n) for n in (1, 2))
  batch = whole.batch(0)
  loss = lambda phase: lambda params: phase._loss(params, batch).loss
  gradient = lambda phase: jax.jit(jax.value_and_grad(loss(phase)))(lm_encoder.params)
  with jax.set_mesh(whole._mesh):
    (a, da), (b, db) = gradient(whole), gradient(parts)
  assert float(a) == pytest.approx(float(b), rel=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), da, db)


def test_products_of_the_training_are_rounded_and_those_of_the_encoder_are_not(data, encoder, lm_encoder):
  options = {"query_tokens": 24, "document_tokens": 20, "batch_size": 4, "language_weight": 0.5}
  exact, rounded = (encoder_phase(data, lm_encoder, **options, matmul_dtype=d) for d in ("auto", "bfloat16"))
  batch = exact.batch(0)
  with jax.set_mesh(exact._mesh):
    losses = [float(phase._loss(lm_encoder.params, batch).loss) for phase in (exact, rounded)]
  assert losses[0] == pytest.approx(losses[1], rel=1e-2)
  assert losses[0] != losses[1]
  assert lm_encoder.config.matmul_dtype is None
  with pytest.raises(ValueError, match=r"encoder\.matmul_dtype = bfloat16 is for language models"):
    encoder_phase(data, encoder, matmul_dtype="bfloat16")


def test_the_language_loss_needs_a_language_model_that_reads_documents(data, encoder, lm_encoder):
  with pytest.raises(ValueError, match=r"encoder\.language_weight = 0\.5 needs a language model"):
    encoder_phase(data, encoder, language_weight=0.5)
  with pytest.raises(ValueError, match="both 0"):
    encoder_phase(data, lm_encoder, contrastive_weight=0)
  with pytest.raises(ValueError, match="which trained = 'queries' does not read"):
    encoder_phase(data, lm_encoder, language_weight=0.5, trained="queries")
