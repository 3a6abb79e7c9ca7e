"""Configs: every variant builds, the controls are as large as the hybrid, and every section is checked."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
from absl import flags
from ml_collections import config_flags

from configs.gradient_rag import VARIANTS
from configs.pretrain import MODELS
from configs.refrag import PRETRAINED, get_config
from selfrag_jax.experiments.base import find
from selfrag_jax.experiments.refrag import build
from selfrag_jax.experiments.self_rag import FactsData
from selfrag_jax.model.config import count_params
from selfrag_jax.settings import settings
from selfrag_jax.tasks.context_batch import ListKind
from selfrag_jax.tasks.facts import WORDINGS

ROOT = Path(__file__).resolve().parents[2]
ALL = [(name, None) for name in ("encoder", "rerank", "second_query", "headlines")]
ALL += [("encoder", "smollm2_135m"), *(("qa", variant) for variant in ("hotpotqa", "musique", "squad"))]
ALL += [(name, variant) for name in ("pretrain", "memory") for variant in (*WORDINGS, "text")]
ALL += [("position_recall", variant) for variant in (*WORDINGS, "documents")]
ALL += [("refrag", variant) for variant in (*MODELS, *PRETRAINED)] + [
  ("rag", variant) for variant in (*MODELS, "smollm2_135m")
]
ALL += [("reward_model", variant) for variant in (*MODELS, "smollm2_135m")]
ALL += [("retrieval", "all"), ("retrieval", "words"), *(("gradient_rag", variant) for variant in VARIANTS)]


@pytest.fixture(scope="module")
def experiments():
  return {variant: build(get_config(variant).to_dict()) for variant in MODELS}


def test_the_variants_are_of_one_size(experiments):
  sizes = {variant: count_params(experiment.model)["total"] for variant, experiment in experiments.items()}
  assert max(sizes.values()) <= 1.03 * min(sizes.values()), sizes
  assert {experiment.model.block_pattern for experiment in experiments.values()} == {
    ("M", "T", "M"), ("T", "T", "T"), ("M", "M", "M", "M"),
  }  # fmt: skip


def test_rollouts_fit_the_demonstrations_that_teach_them(experiments):
  experiment = experiments["hybrid"]
  batch = experiment.sft_phase("sft", experiment.sft).batch(0)
  assert batch["tokens"].shape == (experiment.sft.batch_size, experiment.sft.max_tokens)


@pytest.mark.parametrize(("name", "variant"), ALL, ids=[f"{name}:{variant}" for name, variant in ALL])
def test_every_setting_can_be_overridden(name, variant):
  """A flag can change only what the config has: a field that it leaves out would be out of reach."""
  get_config = importlib.import_module(f"configs.{name}").get_config
  config = (get_config(variant) if variant else get_config()).to_dict()
  module: Any = find(config["experiment"])
  by_phases = config["experiment"] in ("self_rag", "position_recall")
  sections = module.sections(config) if by_phases else module.SECTIONS
  short = {"profile_steps"} if "loop" in sections else set()  # config.loop.profile_steps
  assert config.keys() == {"experiment", "workdir", *sections} | short
  for key, kind in sections.items():
    kind = kind[config[key]["name"]] if isinstance(kind, dict) else kind
    if dataclasses.is_dataclass(kind) and (config["experiment"], key) != ("gradient_rag", "task"):
      unused = {name.partition(".")[2] for name in module.UNUSED if name.startswith(key)} if by_phases else set()
      everything = set(_flat(dataclasses.asdict(settings(kind, config[key], key)))) - unused
      assert set(_flat(config[key])) == everything, key


def _flat(section, prefix=""):
  for name, value in section.items():
    yield from _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]


def test_kinds_of_lists_are_overridden_by_named_keys():
  override = "({'n_facts': 8, 'alike': True}, {'n_facts': 4, 'variant': 'sentence'})"
  argv = ["launch", f"--config={ROOT / 'configs' / 'pretrain.py'}", f"--config.data.text={override}"]
  flag_values = flags.FlagValues()
  config_flags.DEFINE_config_file("config", lock_config=True, flag_values=flag_values, sys_argv=argv)
  flag_values(argv)
  section = flag_values.config.data.to_dict()
  assert settings(FactsData, section, "data").text == (ListKind(8, alike=True), ListKind(4, variant="sentence"))
  section["text"] = ({"n_facts": 8}, {"facts": 4})
  with pytest.raises(ValueError, match=r"text\[1\] has no 'facts'; did you mean data\.text\[1\]\.n_facts\?"):
    settings(FactsData, section, "data")
  section["text"] = ((4,),)
  with pytest.raises(ValueError, match=r"config\.data\.text\[0\] is \(4,\); it must be a section"):
    settings(FactsData, section, "data")


def test_unknown_variants_are_refused_with_the_list():
  with pytest.raises(ValueError, match="no variant 'nope'; one of hybrid, transformer, mamba, smollm2_135m"):
    get_config("nope")
