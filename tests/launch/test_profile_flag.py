"""The flag of a profile, `--config.profile_steps=10,13`, for every config that trains."""

import sys
from pathlib import Path
from unittest import mock

import pytest
from absl import flags
from ml_collections import config_flags

from selfrag_jax.experiments.base import READING
from tests.launching import launch

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))


def read(name, *more):
  values, argv = flags.FlagValues(), ["train.py", f"--config={CONFIGS / name}.py", *more]
  with mock.patch.object(sys, "argv", argv):  # where the overrides are read from
    config = config_flags.DEFINE_config_file("config", flag_values=values, lock_config=True)
    values(argv)
    return config.value.to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_every_config_that_trains_takes_the_steps_of_a_profile(name):
  trains = (config := read(name))["experiment"] in (*READING, "position_recall")
  assert ("profile_steps" in config) == trains
  if trains:
    assert config["loop"]["profile_steps"] == ()
    assert read(name, "--config.profile_steps=10,13")["loop"]["profile_steps"] == (10, 13)


@pytest.mark.parametrize(("steps", "shown"), [("13,10", "(13, 10)"), ("10", "(10,)"), ("x", "('x',)")])
def test_steps_that_are_none_are_refused_before_the_work(steps, shown, tmp_path):
  run = launch(
    "launch/train.py", "--config=configs/refrag.py", f"--config.profile_steps={steps}", f"--workdir={tmp_path}"
  )
  said = f"error: config.loop: profile_steps is {shown}; give the first and the last step, such as 10,13"
  assert run.stderr.splitlines() == [said]
  assert (run.returncode, list(tmp_path.iterdir())) == (1, [])
