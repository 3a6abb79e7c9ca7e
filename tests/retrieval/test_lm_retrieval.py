"""A language model that embeds texts and judges passages, against sums by hand over its whole logits."""

import shutil

import jax
import numpy as np
import pytest
import torch
import transformers

from selfrag_jax.encoders.language_model import LMEncoder, pooled
from selfrag_jax.encoders.load import load_encoder
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.ragged import pad_rows
from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base
from selfrag_jax.retrieval.likelihood import Likelihood
from selfrag_jax.storage.atomic import write_bytes_atomic
from selfrag_jax.text.tokenizer import BPETokenizer

TEXTS = ["a harbor town", "the river and the forest", "", "zebra", "towns of the harbor " * 20]
DOCUMENTS = [Document(str(i), content=text) for i, text in enumerate(TEXTS) if text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  path = tmp_path_factory.mktemp("lm")
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=True,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).save_pretrained(path)
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(
    TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  )
  tokenizer.save(str(path / "tokenizer.json"))
  BPETokenizer.from_folder(path)  # it can be read
  return path


def test_vectors_are_states_weighted_by_rarity_and_padding_changes_nothing(folder):
  encoder, texts = LMEncoder.load(folder), [*TEXTS, "z"]
  rows = encoder.tokens(texts)
  plain = encoder(texts)  # before it is fitted, all tokens weigh the same
  encoder.fit(texts)
  constants = encoder.constants
  neutral = {"mean": np.zeros(64, np.float32), "scale": np.ones(64, np.float32), "query_mean": np.zeros(64, np.float32)}
  encoder.constants = {**constants, **neutral}
  found = encoder(texts)
  assert found.shape == (6, 64)
  assert not np.allclose(found, plain, atol=1e-3)
  np.testing.assert_allclose(np.linalg.norm(found, axis=1), [1, 1, 0, 1, 1, 1], atol=1e-5)
  model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
  for row, text, vectors in zip(rows, texts, zip(found, plain, strict=True), strict=True):
    np.testing.assert_allclose(encoder([text])[0], vectors[0], atol=1e-5)
    if text:
      having = np.array([sum(token in other for other in rows) for token in row])
      rarity = torch.tensor(np.log(1 + (len(rows) - having + 0.5) / (having + 0.5)), dtype=torch.float32)
      with torch.inference_mode():
        out = model(torch.tensor([row]), output_hidden_states=True)
        states = torch.cat([model.model.norm(out.hidden_states[1]), out.hidden_states[2]], dim=2)[0]
      for weights, vector in zip((rarity, torch.ones(len(row))), vectors, strict=True):
        counted = torch.arange(len(row)) > 0 if len(row) > 1 else torch.ones(1)
        mean = torch.nn.functional.normalize((weights * counted) @ states, dim=0)
        np.testing.assert_allclose(mean.numpy(), vector, atol=1e-4)


@pytest.mark.parametrize("name", ["granite", "gemma"])
def test_other_families_embed_too(folder, tmp_path, name):
  sizes = dict(vocab_size=300, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
  if name == "granite":
    model = transformers.GraniteMoeHybridForCausalLM(
      transformers.GraniteMoeHybridConfig(
        **sizes, layer_types=["linear_attention", "full_attention"], shared_intermediate_size=48, num_local_experts=0,
        mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4,
      )
    )  # fmt: skip
  else:
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, head_dim=8, intermediate_size=48))
  model.save_pretrained(tmp_path / name)
  shutil.copy(folder / "tokenizer.json", tmp_path / name)
  encoder = load_encoder(tmp_path / name)
  assert isinstance(encoder, LMEncoder)
  states = model.eval().model(torch.tensor(encoder.tokens(["zebra and town"]))).last_hidden_state[0].detach().numpy()
  found = np.asarray(encoder.apply(encoder.params, *pad_rows(encoder.tokens(["zebra and town"]), 16)))[0, 32:]
  weights = np.linalg.lstsq(states.T, found, rcond=None)[0]  # the second half is a mix of the last states
  np.testing.assert_allclose(weights @ states, found, atol=1e-3)
  assert abs(weights[0]) < 1e-3 < weights[1:].min()


def test_queries_have_a_mean_of_their_own(folder, tmp_path):
  """States of questions share a direction that says nothing about their documents."""
  encoder = LMEncoder.load(folder)
  with pytest.raises(ValueError, match="fit the encoder to documents first"):
    encoder.fit_queries(encoder.tokens(TEXTS[:2]))
  encoder.fit([document.text for document in DOCUMENTS])
  questions = [f"where is {text}?" for text in TEXTS if text]
  np.testing.assert_array_equal(encoder.for_queries(questions), encoder(questions))  # no query has been seen yet
  encoder.fit_queries(encoder.tokens(questions))
  assert not np.allclose(encoder.for_queries(questions), encoder(questions), atol=1e-2)
  standard = encoder.constants["scale"] * (pooled_of(encoder, questions) - encoder.constants["query_mean"])
  np.testing.assert_allclose(standard.mean(axis=0), 0, atol=1e-4)
  expected = standard / np.linalg.norm(standard, axis=1, keepdims=True)
  np.testing.assert_allclose(encoder.for_queries(questions), expected, atol=1e-4)
  retriever = DenseRetriever(encoder=encoder, backend="numpy")
  retriever.add_documents(DOCUMENTS)
  scores = expected @ encoder([document.text for document in DOCUMENTS]).T
  assert [retriever.retrieve(q, 1)[0].id for q in questions] == [DOCUMENTS[i].id for i in scores.argmax(axis=1)]
  encoder.save(tmp_path / "out", encoder.params)
  np.testing.assert_allclose(load_encoder(tmp_path / "out").for_queries(questions), expected, atol=1e-4)


def test_the_scale_can_be_that_of_another_collection(folder):
  encoder = LMEncoder.load(folder)
  encoder.fit([document.text for document in DOCUMENTS])
  encoder.fit_queries(encoder.tokens(["where is it?", "who was it?"]))
  before, texts = encoder.constants, [f"{text} and more" for text in TEXTS]
  encoder.fit_scale(texts)
  for name in ("mean", "query_mean"):
    np.testing.assert_array_equal(encoder.constants[name], before[name])
  np.testing.assert_allclose(encoder.constants["scale"], 1 / pooled_of(encoder, texts).std(axis=0), rtol=1e-3)
  assert not np.allclose(encoder.constants["scale"], before["scale"], rtol=0.1)
  [more] = {row[-1] for row in encoder.tokens(texts)}  # in all of these texts, in none of the others
  assert encoder.constants["weights"][more] < 0.1 < 1 < before["weights"][more]


def pooled_of(encoder, texts):
  tokens, lengths = pad_rows(encoder.tokens(texts), 96)
  return np.asarray(pooled(encoder.config, encoder.params, tokens, lengths))


def test_fitting_gives_each_dimension_the_same_weight_and_is_kept(folder, tmp_path):
  retriever = DenseRetriever(str(folder), backend="numpy")
  retriever.add_documents(DOCUMENTS)
  constants = retriever.encoder.constants
  assert np.abs(constants["mean"]).max() > 0.01
  found = retriever.retrieve("harbor", 4)
  retriever.save(tmp_path / "kb")
  again = load(tmp_path / "kb")
  assert [(d.id, d.score) for d in again.retrieve("harbor", 4)] == [(d.id, d.score) for d in found]
  np.testing.assert_array_equal(again.encoder.constants["scale"], constants["scale"])
  retriever.encoder.save(tmp_path / "encoder", jax.device_get(retriever.encoder.params))
  np.testing.assert_allclose(load_encoder(tmp_path / "encoder")(TEXTS), retriever.encoder(TEXTS), atol=1e-6)


def test_a_saved_encoder_is_the_same_language_model(folder, tmp_path):
  encoder, before = LMEncoder.load(folder), load_pretrained(folder)
  assert before.base_vocab_size < before.config.vocab_size  # rows were appended for the tokenizer's control tokens
  encoder.fit(TEXTS)
  encoder.save(tmp_path / "out", encoder.params)
  after = load_pretrained(tmp_path / "out")
  assert (after.base_vocab_size, after.context_tokens) == (before.base_vocab_size, before.context_tokens) == (300, 512)
  np.testing.assert_array_equal(LMEncoder.load(tmp_path / "out")(TEXTS), encoder(TEXTS))


def test_likelihood_is_the_mean_log_probability_of_the_query(folder):
  judge = Likelihood.load(str(folder))
  query = "where is the town"
  scores = judge(query, DOCUMENTS)
  model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
  tokenizer = load_pretrained(folder).tokenizer
  asked = tokenizer.encode(f" {query}")
  for document, score in zip(DOCUMENTS, scores, strict=True):
    prompt = [
      *tokenizer.encode(f"Passage: {document.text}")[:256],
      *tokenizer.encode("\nA question about this passage:"),
    ]
    with torch.inference_mode():
      log_probs = model(torch.tensor([[*prompt, *asked]])).logits[0].log_softmax(-1)
    wanted = np.mean([log_probs[len(prompt) - 1 + i, token].item() for i, token in enumerate(asked)])
    assert score == pytest.approx(wanted, abs=1e-4)


def test_weights_stay_in_float32_where_bfloat16_computes(folder, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  encoder = load_encoder(folder)
  assert encoder.config.dtype == "bfloat16"
  # the steps of a training would be lost in bfloat16 weights
  assert {leaf.dtype.name for leaf in jax.tree.leaves(encoder.params)} == {"float32"}


def test_constants_of_other_vectors_are_refused(folder):
  """Until 2026-11-29 a token counted by its surprise."""
  zeros = np.zeros(64, np.float32)
  with pytest.raises(ValueError, match="no weights: a version before 2026-11-29"):
    load_encoder(folder).constants = {"mean": zeros, "scale": zeros + 1, "query_mean": zeros}


def test_sync_keeps_what_a_model_was_standardised_by(folder, tmp_path):
  source = tmp_path / "source"
  source.mkdir()
  for document in DOCUMENTS:
    (source / f"{document.id}.txt").write_text(document.content)
  options = {"settings": {"model_name": str(folder), "backend": "numpy"}, "progress": False}
  prepare_knowledge_base(source, tmp_path / "kb", "dense", **options)
  before = load(tmp_path / "kb")
  (source / "new.txt").write_text("one more harbor")
  assert prepare_knowledge_base(source, tmp_path / "kb", "dense", sync=True, **options)["embedded"] == 1
  after = load(tmp_path / "kb")
  np.testing.assert_array_equal(after.encoder.constants["mean"], before.encoder.constants["mean"])
  np.testing.assert_array_equal(after.vectors[: len(before)], before.vectors)


def test_an_encoder_whose_saving_dies_is_not_loaded_without_its_constants(folder, tmp_path, monkeypatch):
  """Vectors of states that are not standardised are other vectors."""
  encoder = LMEncoder.load(folder)
  encoder.fit(TEXTS)
  encoder.save(tmp_path / "out", encoder.params)
  np.testing.assert_array_equal(LMEncoder.load(tmp_path / "out").constants["mean"], encoder.constants["mean"])
  write = write_bytes_atomic

  def die(path, data):
    if path.name == "encoder.npz":
      raise OSError("disk full")
    write(path, data)

  monkeypatch.setattr("selfrag_jax.model.export.write_bytes_atomic", die)
  for target in ("out", "new"):
    with pytest.raises(OSError, match="disk full"):
      encoder.save(tmp_path / target, encoder.params)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
      LMEncoder.load(tmp_path / target)


@pytest.mark.parametrize(
  ("arrays", "message"),
  [
    ({}, "no mean, scale, query_mean, weights"),
    ({"mean": 3}, "mean is int64 \\(\\); 64 finite"),
    ({"weights": np.ones(5, np.float32)}, r"weights is float32 \(5,\); \d+ finite"),
    ({"scale": np.full(64, np.nan, np.float32)}, "scale is float32"),
    (None, ""),
  ],
)
def test_constants_that_are_none_are_named(folder, tmp_path, arrays, message):
  copy = shutil.copytree(folder, tmp_path / "copy")
  if arrays is None:
    (copy / "encoder.npz").write_bytes(b"no arrays")
  else:
    encoder = LMEncoder.load(folder)
    encoder.fit(TEXTS)
    np.savez(copy / "encoder.npz", **({**encoder.constants, **arrays} if arrays else {}))
  with pytest.raises(ValueError, match=rf"encoder\.npz cannot be read \(.*{message}"):
    LMEncoder.load(copy)


def test_weights_are_counted_over_all_texts_and_the_rest_over_a_sample(folder, monkeypatch):
  monkeypatch.setattr("selfrag_jax.encoders.language_model.SAMPLE", 2)
  texts = [text for text in TEXTS if text]
  encoder, by_tokens = LMEncoder.load(folder), LMEncoder.load(folder)
  encoder.fit(texts)
  by_tokens.fit_tokens(by_tokens.tokens(texts))
  for name, values in encoder.constants.items():
    np.testing.assert_array_equal(by_tokens.constants[name], values)
  having = np.array([sum(i in row for row in encoder.tokens(texts)) for i in range(encoder.config.vocab_size)])
  expected = np.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
  expected[list(encoder.tokenizer.special.values())] = 0  # they are in queries to a memory, and say nothing
  np.testing.assert_allclose(encoder.constants["weights"], expected, rtol=1e-6)
  np.testing.assert_allclose(
    encoder.constants["mean"], pooled_of(encoder, [texts[0], texts[2]]).mean(axis=0), atol=1e-5
  )


def test_a_row_of_control_tokens_alone_has_a_vector_of_its_own(folder):
  encoder = LMEncoder.load(folder)
  encoder.fit(TEXTS)
  special = list(encoder.tokenizer.special.values())
  rows, lengths = np.array([special[:2], special[1::-1]]), np.array([2, 2])
  states = np.asarray(pooled(encoder.config, encoder.params, rows, lengths))
  assert np.abs(states).min(axis=1).max() > 0
  assert not np.allclose(states[0], states[1], atol=1e-3)
