"""The loaders of models: a trained checkpoint, or pretrained weights, as a config and its parameters; reward models."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.mesh import make_mesh, place
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.model.reward_model import init_reward_model, score
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.train.checkpoint import load, read_metadata
from selfrag_jax.train.lora import LoRAConfig, fingerprint, init_updates, merge
from selfrag_jax.train.state import Init, abstract_params, param_shardings
from selfrag_jax.typing import Array, ArrayLike, Params


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model: its config, its stacked parameters, and the metadata of its checkpoint (empty if pretrained).

  `tokenizer` is the pretrained model's, or the caller's, since a checkpoint holds only a fingerprint.
  `context_tokens` is the longest text that a pretrained model was made for; None if unknown. `base_vocab_size` is the
  number of ids that a pretrained model knows, without those that were appended; None for a checkpoint.
  """

  config: ModelConfig
  params: Params
  metadata: dict[str, Any]
  tokenizer: Tokenizer | None
  context_tokens: int | None = None
  base_vocab_size: int | None = None


def load_model(
  source: str | os.PathLike,
  phase: str | None = None,
  *,
  tokenizer: Tokenizer | None = None,
  model: ModelConfig | None = None,
  mesh: Mesh | None = None,
) -> LoadedModel:
  """Load a model for inference or further training.

  Args:
    source: a workdir of `launch/train.py`, or whatever `load_pretrained` takes (a Hugging Face folder or name, a GGUF
      file). After LoRA, the model that was adapted is loaded from where the training found it.
    phase: the phase of the workdir (None: the last one, which the most phases precede; its name goes to stderr).
    tokenizer: if given, it must be the tokenizer that the model was trained with.
    model: if given, the model must be this one.
    mesh: the devices that hold the parameters (None: all, as replicas).

  Raises:
    FileNotFoundError: there is no model to load, or no intact checkpoint.
    ValueError: the tokenizer or the model differs, the run trained no language model, `phase` is given for a source
      that is no workdir, or it is None and several phases could be the last one.
  """
  mesh = mesh or make_mesh()
  phases = epath.Path(source) / "checkpoints"
  if not phases.is_dir():
    if phase is not None:
      raise ValueError(f"{source} is no workdir of launch/train.py, so it has no phase {phase!r}")
    pretrained = load_pretrained(source)
    shardings = param_shardings(pretrained.config, mesh)
    if tokenizer and pretrained.tokenizer and tokenizer.fingerprint != pretrained.tokenizer.fingerprint:
      raise ValueError(f"the tokenizer of {source} is {pretrained.tokenizer.name}, not {tokenizer.name}")
    _check_model(source, pretrained.config, model)
    params = place(dict(pretrained.params), shardings)
    known = pretrained.context_tokens, pretrained.base_vocab_size
    return LoadedModel(pretrained.config, params, {}, tokenizer or pretrained.tokenizer, *known)
  known = {path.name: path for path in phases.iterdir() if path.is_dir()}
  name = phase or _last_phase(source, known)
  if name not in known or (metadata := read_metadata(known[name])) is None:
    names = ", ".join(sorted(known)) or "none"
    raise FileNotFoundError(f"{phases / name} has no intact checkpoint; the phases of {source} are {names}")
  folder = known[name]
  config = _read_config(folder, metadata, tokenizer)
  if metadata.get("head"):
    raise ValueError(f"{folder} holds a {metadata['head']} model, which writes no text: see load_reward_model")
  _check_model(folder, config, model)
  init = partial(init_params, config)
  if settings := metadata.get("lora"):
    lora = LoRAConfig(settings["rank"], settings["alpha"])
    base = _base_params(source, metadata, mesh)
    if fingerprint(base) != settings["adapts"]:
      raise ValueError(f"{folder} holds updates of another model: the one that its run began from has changed since")
    params = merge(base, _read(folder, partial(init_updates, init, lora.rank), mesh), lora)
  else:
    params = _read(folder, init, mesh)
  return LoadedModel(config, params, metadata, tokenizer)


def load_reward_model(
  workdir: str | os.PathLike,
  phase: str = "reward_model",
  *,
  tokenizer: Tokenizer | None = None,
  mesh: Mesh | None = None,
) -> Callable[[ArrayLike, ArrayLike], Array]:
  """Load a reward model that `configs/reward_model.py` trained.

  Returns a jitted function `(tokens int32 [B, T], lengths [B]) -> float32 [B]`: the rewards in (0, 1) of right-padded
  conversations that end with their answers, as finished rollouts do. A row of length 0 has an arbitrary reward.
  `tokenizer`: if given, it must be the tokenizer that the model was trained with. `mesh`: the devices that hold the
  parameters (None: all, as replicas).

  Raises FileNotFoundError if there is no intact checkpoint, and ValueError if the tokenizer differs or the phase
  trained another kind of model.
  """
  folder = epath.Path(workdir) / "checkpoints" / phase
  if (metadata := read_metadata(folder)) is None:
    raise FileNotFoundError(f"{folder} has no intact checkpoint: train one, with configs/reward_model.py")
  config = _read_config(folder, metadata, tokenizer)
  if metadata.get("head") != "reward":
    raise ValueError(f"{folder} holds no reward model; configs/reward_model.py trains one")
  params = _read(folder, partial(init_reward_model, config), mesh or make_mesh())
  rewards = jax.jit(lambda *args: jax.nn.sigmoid(score(config, *args)))
  return partial(rewards, params)


def _read_config(folder: epath.Path, metadata: Mapping[str, Any], tokenizer: Tokenizer | None) -> ModelConfig:
  """Return the config of a checkpoint's model. Raises ValueError for another tokenizer, or if it has no model."""
  if not isinstance(metadata.get("model"), dict) or not isinstance(metadata.get("tokenizer"), dict):
    raise ValueError(f"{folder} holds no language model: an experiment of another kind wrote it")
  if tokenizer is not None and metadata["tokenizer"].get("fingerprint") != tokenizer.fingerprint:
    ours = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
    saved = json.dumps(metadata["tokenizer"])
    raise ValueError(f"{folder} was trained with the tokenizer {saved}, not {json.dumps(ours)}")
  try:
    return ModelConfig(**metadata["model"])
  except (TypeError, ValueError) as error:
    raise ValueError(f"{folder} describes a model that this version does not know: {error}") from error


def _read(folder: epath.Path, init: Init, mesh: Mesh) -> Params:
  restored = load(folder, {"params": abstract_params(init, mesh)})
  assert restored is not None  # its metadata was just read
  return restored.state["params"]


def _base_params(source: str | os.PathLike, metadata: Mapping[str, Any], mesh: Mesh) -> Params:
  """Load the parameters that a phase with LoRA began from."""
  if origin := metadata.get("origin"):
    return load_model(origin.get("workdir", source), origin["phase"], mesh=mesh).params
  init = metadata["config"]["init"]
  try:
    return load_model(init, mesh=mesh).params
  except FileNotFoundError as error:
    raise FileNotFoundError(f"{source} holds updates of the model {init}, which is not found: {error}") from None


def _check_model(source: os.PathLike | str, found: ModelConfig, wanted: ModelConfig | None) -> None:
  if wanted not in (None, found):
    raise ValueError(f"{source} holds the model {found}, not {wanted}")


def _last_phase(source: str | os.PathLike, known: Mapping[str, epath.Path]) -> str:
  """Return the phase that the most phases precede; the metadata of a phase names the phase that it began from.

  Returns a phase without an intact checkpoint at once, since its origin is unknown. Raises ValueError for a tie.
  """
  origins: dict[str, str | None] = {}
  for name, folder in sorted(known.items()):
    if (metadata := read_metadata(folder)) is None:
      return name
    origin = metadata.get("origin")
    origins[name] = origin.get("phase") if isinstance(origin, dict) else None
  depths = {name: len(_line_of(name, origins)) for name in origins}
  last = [name for name in depths if depths[name] == max(depths.values())]
  if len(last) > 1:
    raise ValueError(
      f"{source} has the phases {', '.join(known)}, of which {' and '.join(last)} may be meant: name one"
    )
  if len(known) > 1:
    print(f"{source}: phase {last[0]}, of {', '.join(sorted(known))}", file=sys.stderr, flush=True)
  return last[0] if last else ""


def _line_of(name: str | None, origins: Mapping[str, str | None]) -> list[str]:
  """Return a phase and the phases that it descends from, those of other workdirs included."""
  line: list[str] = []
  while name is not None and name not in line:
    line.append(name)
    name = origins.get(name)
  return line
