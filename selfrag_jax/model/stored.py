"""The tensors of a file by name; their shapes and types are checked before any byte is read."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.storage.atomic import temporary_name, write_json
from selfrag_jax.storage.json_lines import refuse_pointer

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the types that weights may have
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG, SENTENCE_PIECES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
MARK = {"format": "pt", "written_by": "selfrag_jax"}  # transformers requires `format`


class Stored(NamedTuple):
  """A tensor in a file: its shape, the type of its numbers, and a function that reads them."""

  shape: tuple[int, ...]
  dtype: str
  read: Callable[[], np.ndarray]


Tensors = dict[str, Stored]


def open_safetensors(path: Path) -> Tensors:
  """Return the tensors of a safetensors file by name. Raises ValueError, with its name, if the file is damaged."""
  file, tensors = _open(path), {}
  for name in file.keys():  # noqa: SIM118, not a mapping
    part = file.get_slice(name)
    tensors[name] = Stored(tuple(part.get_shape()), part.get_dtype(), lambda name=name: file.get_tensor(name))
  return tensors


def read_weight(path: Path, tensors: Tensors, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Read one tensor of a model.

  Raises ValueError, with file and tensor, if it has another shape or holds no floating-point numbers: integers would
  have to be multiplied by scales, which this reader does not know.
  """
  tensor = tensors[name]
  if tensor.shape != shape:
    raise ValueError(f"{path}: tensor {name} has shape {tensor.shape}; the model's config makes it {shape}")
  if tensor.dtype not in FLOATS:
    raise ValueError(
      f"{path}: tensor {name} is stored as {tensor.dtype}, weights are read as one of {', '.join(FLOATS)}: dequantise "
      "the model first, with the library that quantised it"
    )
  return tensor.read()


@contextlib.contextmanager
def export_folder(folder: Path, config: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[None]:
  """Publish a model: the body of the `with` writes its files, then `config.json` makes the folder loadable.

  The config of an older export in the folder is deleted first. Raises like `check_export`.
  """
  check_export(folder, names)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / CONFIG).unlink(missing_ok=True)
  yield
  write_json(folder / CONFIG, config)


def check_export(folder: Path, names: tuple[str, ...]) -> None:
  """Check that a folder is missing, empty, or an earlier export of files with these names.

  Raises FileExistsError for any other folder: a model that somebody else has written is not overwritten.
  """
  if folder.exists() and not folder.is_dir():
    raise FileExistsError(f"{folder} is a file; give a folder for the model")
  ours = {CONFIG, WEIGHTS, *names}
  ours |= {temporary_name(name) for name in ours}
  others = sorted(file.name for file in folder.glob("*") if file.name not in ours)
  if not others and (folder / WEIGHTS).exists() and not _is_export(folder / WEIGHTS):
    others = [WEIGHTS]
  if not others and (folder / CONFIG).exists() and not (folder / WEIGHTS).exists():
    others = [CONFIG]
  if others:
    raise FileExistsError(f"{folder} holds {others[0]}, which was not exported from here; give a new or empty folder")


def _is_export(path: Path) -> bool:
  try:
    return (_open(path).metadata() or {}).get("written_by") == MARK["written_by"]
  except ValueError:  # a damaged file, perhaps the only copy of a model, is not overwritten
    return False


def _open(path: Path) -> Any:
  from safetensors import SafetensorError, safe_open

  refuse_pointer(path)
  try:
    return safe_open(path, framework="numpy")
  except SafetensorError as error:
    raise ValueError(f"{path} is damaged, or no safetensors file ({error}); download it again") from None
