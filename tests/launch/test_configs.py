"""Configs: every variant builds, the controls are as large as the hybrid, and every section is checked."""

from dataclasses import asdict

import pytest

from configs.refrag import VARIANTS, get_config
from selfrag_jax.experiments.refrag import SECTIONS, build
from selfrag_jax.model.config import count_params
from selfrag_jax.settings import settings
from selfrag_jax.train.rollouts import MemoryConfig


@pytest.fixture(scope="module")
def experiments():
  return {variant: build(get_config(variant).to_dict()) for variant in VARIANTS}


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


@pytest.mark.parametrize("variant", [*VARIANTS, "smollm2_135m"])
def test_every_setting_can_be_overridden(variant):
  """A flag can change only what the config has: a field that it leaves out would be out of reach."""
  config = get_config(variant)
  for name, cls in {**SECTIONS, "memory": MemoryConfig}.items():
    assert set(_flat(asdict(settings(cls, config[name].to_dict(), name)))) == set(_flat(config[name].to_dict())), name


def _flat(section, prefix=""):
  for name, value in section.items():
    yield from _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]


def test_unknown_variants_are_refused_with_the_list():
  with pytest.raises(ValueError, match="no variant 'nope'; one of hybrid, transformer, mamba, smollm2_135m"):
    get_config("nope")
