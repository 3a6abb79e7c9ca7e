"""The sentence encoder: it gives the vectors of the reference implementation, whatever else is in a batch."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from selfrag_jax.encoders.batches import Spread
from selfrag_jax.encoders.bert import BertConfig, embed, init_bert
from selfrag_jax.encoders.cached import encoder_key
from selfrag_jax.encoders.load import load_encoder
from selfrag_jax.ragged import pad_rows
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
    ({"num_hidden_layers": 4}, r"has no tensor encoder\.layer\.3"),
    ({"intermediate_size": 48}, r"encoder\.layer\.0\.\S* has shape \(\S+ ?\S*\); the model's config makes it \("),
    ({"num_attention_heads": 5}, "d_model 24 is not divisible by n_heads 5"),
    ({"num_hidden_layers": 10**9}, r"n_layers is 1000000000; it must be at most"),
    ({"hidden_size": "24"}, r"config\.json: hidden_size is '24'; it must be a whole number"),
    ({"layer_norm_eps": None}, r"config\.json: layer_norm_eps is None; it must be a number"),
    ({"vocab_size": 12}, r"vocab\.txt has 20 pieces, config\.json a vocab_size of 12"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; implemented is only"),
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
  function = lambda params, tokens, lengths: seen.append(tokens) or encoder.apply(params, tokens, lengths)
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


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("config.json", "[1]", "a JSON object was expected, not list"),
    ("config.json", '{"model_type": ["bert"]}', "is of a .'bert'. with None; a BERT with gelu is read"),
    ("sentence_bert_config.json", "3", "a JSON object was expected, not int"),
    ("sentence_bert_config.json", '{"max_seq_length": "32"}', "max_seq_length is '32'; it must be a whole number"),
    ("sentence_bert_config.json", '{"max_seq_length": 65}', "max_tokens 65 is not from 3 to max_positions 64"),
    ("sentence_bert_config.json", '{"max_seq_length": 2}', "max_tokens 2 is not from 3 to"),
    ("tokenizer_config.json", '{"do_lower_case": false}', "do_lower_case is False; only true is implemented"),
    ("modules.json", "{}", "expected a list of objects with path and type"),
    ("modules.json", "[3]", "expected a list of objects with path and type"),
    ("modules.json", '[{"path": "", "type": "x.Dense"}]', "there is a module 'Dense'"),
    ("modules.json", '[{"path": "../1_Pooling", "type": "x.Pooling"}]', "'../1_Pooling' is no folder beside it"),
    ("vocab.txt", "\ud800", "expected one piece a line in UTF-8"),
    ("vocab.txt", "version https://git-lfs.github.com/spec/v1\n", r"vocab\.txt is a pointer of git-lfs"),
    ("model.safetensors", "no tensors", r"model\.safetensors is damaged"),
  ],
)
def test_files_of_the_wrong_kind_are_named(folder, tmp_path, name, content, message):
  copy = shutil.copytree(folder, tmp_path / "copy")
  (copy / name).write_bytes(content.encode("utf-8", "surrogatepass"))
  with pytest.raises(ValueError, match=message) as raised:
    load_encoder(copy)
  assert str(copy) in str(raised.value)


@pytest.mark.parametrize(
  ("pooling", "is_read"),
  [
    ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, True),
    ({"pooling_mode": "mean"}, True),
    ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, False),
    ({"pooling_mode_weightedmean_tokens": True}, False),
    ({"pooling_mode": ["mean", "max"]}, False),
  ],
)
def test_another_pooling_than_the_mean_is_refused(folder, tmp_path, pooling, is_read):
  """Its vectors would be those of another function than the one that was trained."""
  copy = shutil.copytree(folder, tmp_path / "copy")
  (copy / "modules.json").write_text('[{"path": "", "type": "m.Transformer"}, {"path": "1_P", "type": "m.Pooling"}]')
  (copy / "1_P").mkdir()
  (copy / "1_P" / "config.json").write_text(json.dumps(pooling))
  if is_read:
    assert load_encoder(copy).width == 24
    return
  with pytest.raises(ValueError, match=r"the pooling is .*; implemented is only the mean"):
    load_encoder(copy)


def test_an_unlimited_length_is_that_of_the_positions(folder, tmp_path):
  copy = shutil.copytree(folder, tmp_path / "copy")
  (copy / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
  assert load_encoder(copy).max_tokens == 64


def test_weights_that_are_not_floating_point_are_refused(folder, tmp_path):
  copy = shutil.copytree(folder, tmp_path / "copy")
  tensors = safetensors.torch.load_file(copy / "model.safetensors")
  name = "encoder.layer.1.output.dense.weight"
  safetensors.torch.save_file(tensors | {name: (tensors[name] * 100).to(torch.int8)}, copy / "model.safetensors")
  with pytest.raises(ValueError, match=rf"tensor {name} is stored as I8, .*: dequantise the model"):
    load_encoder(copy)


def test_an_encoder_is_written_over_its_own_export_only(folder, tmp_path):
  encoder = load_encoder(folder)
  for _ in range(2):
    encoder.save(tmp_path / "out", encoder.params)
  (tmp_path / "out" / "notes.txt").write_text("mine")
  with pytest.raises(FileExistsError, match=r"out holds notes\.txt, which was not exported from here"):
    encoder.save(tmp_path / "out", encoder.params)
  with pytest.raises(FileExistsError, match="which was not exported from here"):
    encoder.save(folder, encoder.params)
