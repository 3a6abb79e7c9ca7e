"""The location of pretrained models and data sets: a local path, an installed package, or the Hugging Face hub.

What comes from the hub is kept in its cache (`HF_HOME`); its library reads the token for what is private or gated from
`HF_TOKEN`, or from `hf auth login`. With `HF_HUB_OFFLINE=1` the cache alone is read.
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from etils import epath

NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^:]+))?(:(?P<part>.+))?")


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
  if not (named := NAME.fullmatch(source)) or named["part"]:
    raise FileNotFoundError(f"{source} does not exist; give a folder, {others}organisation/name")
  return _download("model", source, named, {"allow_patterns": list(files), "cache_dir": cache_dir}, advice)


def locate_data(source: epath.PathLike, files: Sequence[str]) -> epath.Path:
  """Return the path of a data set whose name on the hub is given; any other path, and one that exists, unchanged.

  A name is `organisation/name[@revision][:part]`, where the part is a folder or a file of the repository. Of a folder,
  those files are downloaded that match one of the patterns `files`; in deeper folders only if a pattern has a slash.

  Raises FileNotFoundError if the hub has no such data set or cannot be reached, and if no file matches.
  """
  path, text = epath.Path(source), os.fspath(source)
  if not (named := NAME.fullmatch(text)) or path.exists():
    return path
  part = (named["part"] or "").strip("/")
  inside = f"{part}/" if part else ""
  wanted: dict[str, Any] = {"allow_patterns": [*([part] if part else []), *(inside + file for file in files)]}
  if not any("/" in file for file in files):
    wanted["ignore_patterns"] = [f"{inside}*/*"]
  there = _download("dataset", text, named, wanted) / part
  if not there.is_file() and not any(next(there.glob(file), None) for file in files):
    raise FileNotFoundError(
      f"the data set {text} has no {' and no '.join(files)}, which would be read, or {there} holds only a part of it: "
      f"name another folder or a file, as in {named['name']}:FOLDER, or go online"
    )
  return epath.Path(there)


def _download(
  kind: Literal["model", "dataset"], source: str, named: re.Match[str], wanted: dict[str, Any], advice: str = ""
) -> Path:
  """Return the folder of a repository in the cache of the hub, with the files that are `wanted`."""
  try:
    from huggingface_hub import snapshot_download
  except ModuleNotFoundError as error:
    raise FileNotFoundError(
      f"{source} is no file or folder here, and names on the Hugging Face hub need {error.name}: pip install -e "
      "'.[weights]'"
    ) from None
  name, revision, part = named["name"], named["revision"], named["part"]
  try:
    return Path(snapshot_download(name, repo_type=kind, revision=revision, **wanted))
  except OSError as error:  # offline, not found or not allowed
    command = f"hf download {name} --repo-type {kind}{f' --revision {revision}' if revision else ''}"
    command, path = (f"{command} --include '{part}*'", f"FOLDER/{part}") if part else (command, "FOLDER")
    raise FileNotFoundError(
      f"{source} is no file or folder here, and the Hugging Face hub did not give it ({error}). Check the name, go "
      "online (with HF_TOKEN for what is private or gated), or copy the "
      f"{'model' if kind == 'model' else 'data set'}'s folder to this machine and pass its path: {path} after "
      f"`{command} --local-dir FOLDER`{advice}"
    ) from error
