"""The protocol of experiments: each module has its functions, a name finds its module, and reports are written."""

import inspect
import json

import pytest
from etils import epath

from selfrag_jax.experiments.base import NAMES, READING, ExperimentModule, find, write_report


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_the_functions_of_the_protocol(name):
  module = find(name)
  for function in ("build", "dry_run", "run", "evaluate", "value_names"):
    expected = list(inspect.signature(getattr(ExperimentModule, function)).parameters)[1:]
    assert list(inspect.signature(getattr(module, function)).parameters) == expected, function
  assert (name in READING) == ("by_reading" in inspect.getsource(module.evaluate))


def test_an_unknown_experiment_is_named():
  with pytest.raises(ValueError, match=r"config\.experiment is 'base'; one of refrag, self_rag, position_recall"):
    find("base")


def test_the_report_is_written_last(tmp_path):
  rows = [["name", "value"], ["a", 1], ["b, c", 0.5]]
  write_report(epath.Path(tmp_path), "mine", {"a": 1}, rows, config={"seed": 0})
  assert (tmp_path / "mine.csv").read_text() == 'name,value\na,1\n"b, c",0.5\n'
  assert json.loads((tmp_path / "mine.json").read_text()) == {"a": 1}
  assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 0}
  with pytest.raises(ValueError, match="not JSON compliant"):
    write_report(epath.Path(tmp_path), "other", {"a": float("nan")}, rows)
  assert (tmp_path / "other.csv").exists()
  assert not (tmp_path / "other.json").exists()
