"""The sentence encoder gives the vectors of the reference implementation, whatever else is in a batch."""

import json
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers

from selfrag_jax.retrieval.batches import Spread
from selfrag_jax.retrieval.bert import BertConfig, init_bert
from selfrag_jax.retrieval.embedding import encoder_key
from selfrag_jax.retrieval.encoder import embed, load_encoder
from selfrag_jax.tasks.search import pad_rows
from selfrag_jax.text.wordpiece import SPECIAL

WORDS = [
  "zebra",
  "otter",
  "heron",
  "badger",
  "lynx",
  "river",
  "forest",
  "marsh",
  "desert",
  "harbor",
  "the",
  "a",
  "in",
  "of",
  "lives",
]
VOCABULARY = [*SPECIAL, *WORDS]
TEXTS = ["the zebra lives in the forest", "", "otter", "a lynx of the marsh " * 30, "unheard heron"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("bert")
  torch.manual_seed(0)
  config = transformers.BertConfig(
    vocab_size=len(VOCABULARY), hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
    max_position_embeddings=64, layer_norm_eps=1e-12, initializer_range=0.3,
  )  # fmt: skip
  transformers.BertModel(config, add_pooling_layer=False).save_pretrained(path)
  (path / "vocab.txt").write_text("\n".join(VOCABULARY))
  (path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
  return path


def reference(folder, ids):
  model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
  with torch.inference_mode():
    mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
  return torch.nn.functional.normalize(mean, dim=0).numpy()


def test_vectors_are_those_of_transformers(folder):
  encoder = load_encoder(folder)
  found = encoder(TEXTS)
  assert found.shape == (5, 24)
  assert found.dtype == np.float32
  for ids, vector in zip(encoder.tokens(TEXTS), found, strict=True):
    np.testing.assert_allclose(vector, reference(folder, ids), atol=2e-6)


def test_batches_and_order_change_nothing(folder):
  encoder = load_encoder(folder)
  many = [" ".join(WORDS[i % 15] for i in range(n, 2 * n)) for n in (1, 30, 2, 9, 17, 4, 12)] + TEXTS
  whole = encoder(many)
  for text, vector in zip(many, whole, strict=True):
    np.testing.assert_allclose(encoder([text])[0], vector, atol=1e-6)
  np.testing.assert_allclose(encoder(many[::-1])[::-1], whole, atol=1e-6)
  assert encoder([]).shape == (0, 24)


def test_long_texts_are_cut(folder):
  encoder = load_encoder(folder)
  [ids] = encoder.tokens(["zebra " * 100])
  assert len(ids) == 32
  assert ids[-1] == encoder.tokenizer.special["[SEP]"]


def test_rows_that_fill_the_batch_are_zero(folder):
  encoder = load_encoder(folder)
  rows = embed(encoder.config, encoder.params, np.zeros((2, 8), np.int32), np.array([3, 0]))
  assert np.isfinite(rows).all()
  assert not np.any(rows[1])


def test_half_precision_is_close(folder):
  ours, half = (load_encoder(folder, dtype)(TEXTS) for dtype in ("float32", "bfloat16"))
  assert half.dtype == np.float32
  cosine = np.sum(ours * half, axis=1) / np.linalg.norm(half, axis=1)
  assert cosine.min() > 0.99
  assert not np.array_equal(ours, half)


def test_what_does_not_fit_is_named(folder, tmp_path):
  with pytest.raises(FileNotFoundError, match="nowhere does not exist; give a folder, all-MiniLM-L6-v2 or"):
    load_encoder("nowhere")
  for file in ("config.json", "model.safetensors", "vocab.txt"):
    (tmp_path / file).write_bytes((folder / file).read_bytes())
  fields = json.loads((tmp_path / "config.json").read_text())
  for changes, message in (
    ({"model_type": "roberta"}, "a BERT with gelu"),
    ({"num_hidden_layers": 4}, "has no tensor encoder.layer.3"),
    ({"intermediate_size": 48}, r"'down_0'.*has shape \(40, 24\), the config makes it \(48, 24\)"),
  ):
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(ValueError, match=message):
      load_encoder(tmp_path)
  (tmp_path / "vocab.txt").unlink()
  with pytest.raises(FileNotFoundError, match=r"no vocab\.txt"):
    load_encoder(tmp_path)


def test_the_defaults_are_those_of_minilm():
  shapes = jax.eval_shape(lambda: init_bert(BertConfig(), jax.random.key(0)))
  assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == 22_565_376


def test_a_written_encoder_is_that_of_transformers(folder, tmp_path):
  encoder = load_encoder(folder)
  encoder.save(tmp_path / "out", encoder.params)
  again = load_encoder(tmp_path / "out")
  assert again.config == encoder.config
  np.testing.assert_array_equal(again(TEXTS), encoder(TEXTS))
  [ids] = encoder.tokens(TEXTS[:1])
  np.testing.assert_allclose(reference(tmp_path / "out", ids), encoder(TEXTS[:1])[0], atol=2e-6)
  modules = json.loads((tmp_path / "out" / "modules.json").read_text())
  assert [module["type"].rsplit(".", 1)[1] for module in modules] == ["Transformer", "Pooling", "Normalize"]


def test_a_written_encoder_is_that_of_sentence_transformers(folder, tmp_path):
  import sentence_transformers  # it takes seconds to import

  encoder = load_encoder(folder)
  encoder.save(tmp_path / "out", encoder.params)
  theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
  texts = [text for text in TEXTS if text]
  np.testing.assert_allclose(theirs.encode(texts), encoder(texts), atol=2e-6)


def test_all_devices_take_their_share(folder):
  """Eight rows are one on each of the eight devices; the vectors are those of one device."""
  encoder = load_encoder(folder)
  many = [" ".join(WORDS[i % 15] for i in range(n, n + 9)) for n in range(16)]
  seen = []
  function = lambda params, tokens, lengths: seen.append(tokens) or encoder.embed(params, tokens, lengths)
  encoder._spread = Spread(function, encoder.params)
  found = encoder(many)
  assert [len(tokens.sharding.device_set) for tokens in seen] == [8]
  alone = embed(encoder.config, encoder.params, *pad_rows(encoder.tokens(many), 16))
  np.testing.assert_allclose(found, alone, atol=1e-6)
  seen.clear()
  np.testing.assert_allclose(encoder(many[:3]), found[:3], atol=1e-6)
  assert isinstance(seen[0], np.ndarray)  # four rows for eight devices: one takes them


def test_key_tells_encoders_apart_that_read_texts_differently(folder, tmp_path):
  """Vectors are taken over by key: what is read of a text counts, as the parameters do."""
  keys = [encoder_key(load_encoder(str(folder)), "x")]
  changes = {"sentence_bert_config.json": '{"max_seq_length": 3}', "vocab.txt": "\n".join([*SPECIAL, *WORDS[::-1]])}
  for name, content in changes.items():
    copy = tmp_path / name
    shutil.copytree(folder, copy)
    (copy / name).write_text(content)
    keys.append(encoder_key(load_encoder(str(copy)), "x"))
  assert encoder_key(load_encoder(str(folder)), "x") == keys[0]
  assert len(set(keys)) == 3
