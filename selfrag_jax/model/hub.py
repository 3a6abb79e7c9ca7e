"""The location of a pretrained model: a local folder or file, an installed package, or the Hugging Face hub."""

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path


def package_folder(name: str) -> Path | None:
  """Return the folder of an installed package without importing it; None if it is not installed."""
  spec = importlib.util.find_spec(name)
  return Path(spec.origin).parent if spec and spec.origin else None


def locate(
  source: str, files: Sequence[str], *, cache_dir: str | Path | None = None, others: str = "", advice: str = ""
) -> Path:
  """Return an existing path unchanged, or the folder of `organisation/name[@revision]` with `files` from the hub.

  Raises FileNotFoundError if neither the path nor the name exists, or if the hub cannot be reached. Its message has
  `others`, further names that the caller knows, and `advice`, another way to get the weights.
  """
  if os.path.exists(source):
    return Path(source)
  name, _, revision = source.partition("@")
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
    raise FileNotFoundError(f"{source} does not exist; give a folder, {others}organisation/name")

  from huggingface_hub import snapshot_download

  try:
    folder = snapshot_download(name, revision=revision or None, cache_dir=cache_dir, allow_patterns=list(files))
    return Path(folder)
  except OSError as error:  # offline, not found or not allowed
    raise FileNotFoundError(
      f"{source} is no folder here and the Hugging Face hub did not give it ({error}). Check the name, go online, or "
      f"copy the model's folder to this machine and pass its path{advice}"
    ) from error
