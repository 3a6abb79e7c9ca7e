"""Cross-encoders: they score pairs like the reference implementation, and can be written and read."""

import jax
import numpy as np
import pytest
import torch
import transformers

from selfrag_jax.encoders.load import load_encoder
from selfrag_jax.retrieval.cross_encoder import CrossEncoder, load_cross_encoder
from selfrag_jax.retrieval.document import Document
from selfrag_jax.text.wordpiece import SPECIAL

WORDS = ["zebra", "otter", "heron", "river", "forest", "where", "does", "live", "the", "in", "?"]
DOCUMENTS = [
  Document("1", "zebra", "the zebra live in the forest"),
  Document("2", "", "heron"),
  Document("3", "", "a " * 60),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("cross")
  torch.manual_seed(0)
  config = transformers.BertConfig(
    vocab_size=len(SPECIAL) + len(WORDS), hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=40, max_position_embeddings=48, initializer_range=0.4, num_labels=1,
  )  # fmt: skip
  transformers.BertForSequenceClassification(config).save_pretrained(path)
  (path / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]))
  return path


def reference(folder, encoder, query, documents):
  """Score each pair alone with transformers, segments by their lengths."""
  model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
  scores = []
  for row in encoder.pairs([query] * len(documents), [document.text for document in documents]):
    first = row.index(encoder.tokenizer.special["[SEP]"]) + 1
    types = [0] * first + [1] * (len(row) - first)
    with torch.inference_mode():
      scores.append(model(torch.tensor([row]), token_type_ids=torch.tensor([types])).logits[0, 0].item())
  return scores


def test_scores_are_those_of_transformers(folder):
  encoder = load_cross_encoder(folder)
  query = "where does the zebra live?"
  found = encoder(query, DOCUMENTS)
  np.testing.assert_allclose(found, reference(folder, encoder, query, DOCUMENTS), atol=2e-5)
  rows = encoder.pairs([query] * 3, [document.text for document in DOCUMENTS])
  assert max(map(len, rows)) == 48  # what is too long is cut, and closed
  assert all(row.count(encoder.tokenizer.special["[SEP]"]) == 2 for row in rows)


def test_a_query_that_spells_the_separator_is_text(folder):
  encoder = load_cross_encoder(folder)
  [row] = encoder.pairs(["zebra [SEP] otter"], ["heron"])
  assert row.count(encoder.tokenizer.special["[SEP]"]) == 2


def test_what_is_written_is_read(folder, tmp_path):
  encoder = load_cross_encoder(folder)
  encoder.save(tmp_path, encoder.params)
  again = load_cross_encoder(tmp_path)
  np.testing.assert_array_equal(again("otter", DOCUMENTS), encoder("otter", DOCUMENTS))
  np.testing.assert_allclose(encoder("otter", DOCUMENTS), reference(tmp_path, encoder, "otter", DOCUMENTS), atol=2e-5)


def test_one_starts_from_an_encoder_of_texts(folder, tmp_path):
  whole = load_cross_encoder(folder)
  body = transformers.BertModel(transformers.BertConfig.from_pretrained(folder), add_pooling_layer=False)
  body.save_pretrained(tmp_path)
  (tmp_path / "vocab.txt").write_text((folder / "vocab.txt").read_text())
  texts = load_encoder(tmp_path)
  made = CrossEncoder.from_encoder(texts, jax.random.key(0))
  assert jax.tree.map(np.shape, made.params) == jax.tree.map(np.shape, whole.params)
  np.testing.assert_array_equal(
    made.params["params"]["tokens"]["embedding"], texts.params["params"]["tokens"]["embedding"]
  )
  assert np.isfinite(made("otter", DOCUMENTS)).all()
