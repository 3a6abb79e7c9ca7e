"""Files of weights: a damaged, hostile or foreign file is an error that names the file, at no cost."""

import json
import shutil
import struct

import gguf
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from selfrag_jax.model.export import export_safetensors
from selfrag_jax.model.gguf import read_gguf
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.model.stored import open_safetensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
  folder = tmp_path_factory.mktemp("llama")
  sizes = dict(vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
  LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
  return folder


@pytest.fixture
def llama(original, tmp_path):
  return shutil.copytree(original, tmp_path / "llama")


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
  path = tmp_path_factory.mktemp("gguf") / "small.gguf"
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_block_count(1)
  writer.add_rope_freq_base(1e4)
  writer.add_token_list(["a", "bc"])
  writer.add_token_types([1, 3])
  writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
  quantized = gguf.quantize(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), gguf.GGMLQuantizationType.Q8_0)
  writer.add_tensor("output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path.read_bytes()


def safetensors_file(header, data=b""):
  encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack("<Q", len(encoded)) + encoded + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
  return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_not_floating_point_are_refused_with_the_fix(llama, dtype):
  name = "model.layers.1.mlp.up_proj.weight"
  tensors = load_file(llama / "model.safetensors")
  tensors[name] = (tensors[name] * 100).to(dtype)
  save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
  with pytest.raises(ValueError, match=r"llama: tensor .*up_proj\.weight is stored as \w+, .*: dequantise the model"):
    load_pretrained(llama)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pointers_of_git_lfs_are_named(llama, name):
  (llama / name).write_bytes(POINTER)
  with pytest.raises(ValueError, match=rf"{name} is a pointer of git-lfs.*git lfs pull"):
    load_pretrained(llama)


def test_a_gguf_that_is_a_pointer_is_named(tmp_path):
  (tmp_path / "a.gguf").write_bytes(POINTER)
  with pytest.raises(ValueError, match=r"a\.gguf is a pointer of git-lfs"):
    load_pretrained(tmp_path / "a.gguf")


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"abc",
    struct.pack("<Q", 2**60) + b"{}",
    safetensors_file(b"no json"),
    safetensors_file(b"[" * 100_000),
    safetensors_file([1]),
    safetensors_file({"a": 3}),
    safetensors_file({"a": tensor(offsets=(0, 8000))}, bytes(8)),
    safetensors_file({"a": tensor(), "b": tensor(offsets=(4, 12))}, bytes(12)),
    safetensors_file({"a": tensor(shape=(2**62, 2**62))}, bytes(8)),
    safetensors_file({"a": tensor(shape=(-2,))}, bytes(8)),
  ],
)
def test_damaged_safetensors_are_named(tmp_path, content):
  (tmp_path / "model.safetensors").write_bytes(content)
  with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or no safetensors file .*download it again"):
    open_safetensors(tmp_path / "model.safetensors")


def test_a_truncated_model_is_named(llama):
  path = llama / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-10])
  with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
    load_pretrained(llama)


@pytest.mark.parametrize(
  ("index", "error", "message"),
  [
    (
      {"weight_map": {"a": "model-00002.safetensors"}},
      FileNotFoundError,
      r"model-00002\.safetensors is missing, which",
    ),
    ({"weight_map": {"a": "../other/model.safetensors"}}, ValueError, "is no safetensors file of this folder"),
    ({"weight_map": {"a": "/etc/x.safetensors"}}, ValueError, "is no safetensors file of this folder"),
    ({"weight_map": {"a": "x\0.safetensors"}}, ValueError, "is no safetensors file of this folder"),
    ({"weight_map": {"a": "config.json"}}, ValueError, "is no safetensors file of this folder"),
    ({"weight_map": ["model.safetensors"]}, ValueError, "weight_map is missing or wrong"),
    ({"weight_map": {"a": 3}}, ValueError, "weight_map is missing or wrong"),
    ({"weight_map": {}}, ValueError, "weight_map is missing or wrong"),
    ({}, ValueError, "weight_map is missing or wrong"),
    ([], ValueError, "a JSON object was expected, not list"),
  ],
)
def test_an_index_names_files_of_its_folder(llama, index, error, message):
  (llama / "model.safetensors.index.json").write_text(json.dumps(index))
  with pytest.raises(error, match=message):
    load_pretrained(llama)


def test_a_tensor_in_two_files_is_an_error(llama):
  shutil.copy(llama / "model.safetensors", llama / "b.safetensors")
  names = {"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}
  (llama / "model.safetensors.index.json").write_text(json.dumps(names))
  with pytest.raises(ValueError, match=r"is in another file of model\.safetensors\.index\.json too"):
    load_pretrained(llama)


def header(n_tensors=0, n_values=0, rest=b"", magic=b"GGUF", version=3):
  return magic + struct.pack("<IQQ", version, n_tensors, n_values) + rest


def value(key, kind, data):
  return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + data


def described(name=b"a", axes=(32,), kind=0, offset=0):
  return struct.pack(f"<Q{len(name)}sI{len(axes)}QIQ", len(name), name, len(axes), *axes, kind, offset)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "empty"),
    (b"GGUF", "it ends within its version"),
    (header(magic=b"GGML"), "does not begin with GGUF"),
    (header(version=1), "its version is 1"),
    (header(version=3 << 24), "least byte first"),
    (header(n_values=2**63), "it ends within"),
    (header(n_tensors=2**63), "it ends within"),
    (header(n_values=1, rest=struct.pack("<Q", 2**62)), "it ends within"),
    (header(n_values=1, rest=value(b"k", 8, struct.pack("<Q", 2**62))), "it ends within k"),
    (header(n_values=1, rest=value(b"k", 9, struct.pack("<IQ", 8, 2**62))), "it ends within k"),
    (header(n_values=1, rest=value(b"k", 9, struct.pack("<IQ", 0, 2**62))), "it ends within k"),
    (header(n_values=1, rest=value(b"k", 9, struct.pack("<IQ", 9, 1) * 5000)), "k is a list of values of type 9"),
    (header(n_values=1, rest=value(b"k", 77, b"")), "k has the type 77"),
    (header(n_values=1, rest=value(b"\xff", 0, b"\0")), "can't decode"),
    (header(n_values=2, rest=value(b"k", 0, b"\0") * 2), "the key k occurs twice"),
    (header(n_values=1, rest=value(b"general.alignment", 4, struct.pack("<I", 0))), "alignment is 0"),
    (header(n_values=1, rest=value(b"general.alignment", 4, struct.pack("<I", 1 << 31))), "alignment is 2147483648"),
    (header(1, rest=described(axes=(32,) * 5)), "a has 5 axes"),
    (header(1, rest=described(axes=(2**62, 2**62))), "the tensor a ends at byte"),
    (header(1, rest=described(axes=(32, 0))), r"the shape \(0, 32\)"),
    (header(1, rest=described(axes=(31,), kind=8)), "in blocks of 32"),
    (header(1, rest=described(kind=999)), "quantisation 999"),
    (header(1, rest=described(offset=2**63)), "the tensor a ends at byte"),
    (header(2, rest=described() * 2 + bytes(400)), "the tensor a occurs twice"),
    (header(2, rest=described() + described(b"b", offset=64) + bytes(400)), "the tensors a and b overlap"),
  ],
)
def test_damaged_gguf_files_are_named_with_what_is_wrong(tmp_path, content, message):
  (tmp_path / "a.gguf").write_bytes(content)
  with pytest.raises(ValueError, match=rf"a\.gguf is damaged, or no GGUF file that can be read: .*{message}.*again"):
    read_gguf(tmp_path / "a.gguf")


def test_gguf_is_read_as_by_its_own_library(tmp_path, small_gguf):
  (tmp_path / "a.gguf").write_bytes(small_gguf)
  metadata, tensors = read_gguf(tmp_path / "a.gguf")
  theirs = gguf.GGUFReader(tmp_path / "a.gguf")
  fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
  assert metadata == fields
  assert [*tensors] == [tensor.name for tensor in theirs.tensors]
  for tensor in theirs.tensors:
    np.testing.assert_array_equal(tensors[tensor.name].read(), gguf.dequantize(tensor.data, tensor.tensor_type))
    assert tensors[tensor.name].shape == tuple(tensor.shape[::-1])


def mutated(draw, content):
  """Cut the file, or change a few of its bytes."""
  content = bytearray(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)
  for _ in range(draw(st.integers(0, 4)) if content else 0):
    # most of what a reader trusts stands at the beginning
    at = draw(st.integers(0, min(len(content), 400) - 1) | st.integers(0, len(content) - 1))
    content[at] = draw(st.integers(0, 255))
  return bytes(content)


@fuzzed
@given(data=st.data())
def test_a_changed_gguf_has_other_values_or_is_refused(tmp_path, small_gguf, data):
  (tmp_path / "a.gguf").write_bytes(mutated(data.draw, small_gguf))
  refusal, shapes = "a.gguf", []
  try:
    _, tensors = read_gguf(tmp_path / "a.gguf")
    with np.errstate(all="ignore"):
      shapes = [(stored.shape, stored.read().shape) for stored in tensors.values()]
  except ValueError as error:
    refusal = str(error)
  assert "a.gguf" in refusal
  assert all(said == read for said, read in shapes)


@fuzzed
@given(data=st.data())
def test_a_changed_model_has_other_numbers_or_is_refused(tmp_path, original, data):
  folder = tmp_path / "changed"
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(original, folder)
  path = folder / data.draw(st.sampled_from(["model.safetensors", "model.safetensors", "config.json"]))
  path.write_bytes(mutated(data.draw, path.read_bytes()))
  refusal = str(folder)
  try:
    loaded = load_pretrained(folder)
    assert loaded.params["params"]["embed"].shape == (128, 8)
  except (ValueError, FileNotFoundError) as error:
    refusal = str(error)
  assert str(folder) in refusal


def test_an_export_that_dies_leaves_no_folder_that_loads(llama, tmp_path_factory, monkeypatch):
  loaded, folder = load_pretrained(llama), tmp_path_factory.mktemp("export")
  export_safetensors(folder, loaded.config, loaded.params)

  def die(tensors, path, metadata):
    path.write_bytes(b"half")
    raise OSError("disk full")

  monkeypatch.setattr(safetensors.numpy, "save_file", die)
  with pytest.raises(OSError, match="disk full"):
    export_safetensors(folder, loaded.config, loaded.params)
  assert [file.name for file in folder.iterdir()] == ["model.safetensors"]  # the older one, and no half of the new one
  with pytest.raises(FileNotFoundError, match=r"config\.json"):
    load_pretrained(folder)
  monkeypatch.undo()
  export_safetensors(folder, loaded.config, loaded.params)
  assert load_pretrained(folder).config == loaded.config


def test_a_model_that_was_not_exported_from_here_is_not_written_over(llama, tmp_path_factory):
  loaded, weights = load_pretrained(llama), (llama / "model.safetensors").read_bytes()
  with pytest.raises(FileExistsError, match="which was not exported from here; give a new or empty folder"):
    export_safetensors(llama, loaded.config, loaded.params)
  for name in ("generation_config.json", "README.md"):
    (llama / name).unlink(missing_ok=True)
  with pytest.raises(FileExistsError, match=r"holds model\.safetensors, which was not exported from here"):
    export_safetensors(llama, loaded.config, loaded.params)
  assert (llama / "model.safetensors").read_bytes() == weights
  assert load_pretrained(llama).config == loaded.config
  file = tmp_path_factory.mktemp("export") / "model"
  file.write_text("mine")
  with pytest.raises(FileExistsError, match="is a file; give a folder"):
    export_safetensors(file, loaded.config, {})  # said before the parameters are looked at
