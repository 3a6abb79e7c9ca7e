"""Plans with other values of some keys: every combination, ranked, and a sweep that was stopped goes on."""

import json
from collections import Counter

import pytest

from selfrag_jax.aot import sweep
from selfrag_jax.aot.programs import Program
from selfrag_jax.chips import CHIPS

CHIP = CHIPS["v5e"]
CONFIG = {"mesh": {"data": -1, "fsdp": 1}, "model": {"remat": "none", "width": 8}, "seed": 0}
EMPTY = "HloModule f\n\nENTRY %main () -> () {\n}\n"


def planner(calls):
  """More shards take less memory, and computing everything again takes more products; three do not fit the mesh."""

  def plan(config):
    calls.append(config)
    shards, remat = config["mesh"]["fsdp"], config["model"]["remat"]
    if shards == 3:
      raise ValueError("4 devices are\nnot divisible by 3")
    work = Counter({"": CHIP.flops * (4 if remat == "full" else 3)})
    memory = int(40e9 / shards / (2 if remat == "full" else 1))
    return {"data": 4 // shards, "fsdp": shards}, [Program("train update", memory, 0, 0, 1.0, EMPTY, work)]

  return plan


def test_every_combination_of_the_values_is_tried():
  found = sweep.candidates(CONFIG, ["mesh.fsdp=2,4", "model.remat=none,full", "seed=5"], 4)
  assert len(found) == 4
  assert {"mesh.fsdp": 4, "model.remat": "none", "seed": 5} in found
  split = CONFIG | {"mesh": {"data": -1, "fsdp": 1, "sequence": 3, "tensor": 2}}
  assert sweep.candidates(split, ["mesh"], 12) == [{"mesh.data": -1, "mesh.fsdp": n} for n in (1, 2)]
  assert sweep.candidates(CONFIG, ["mesh"], 12) == [{"mesh.data": -1, "mesh.fsdp": n} for n in (1, 2, 4)]
  assert [one["model.remat"] for one in sweep.candidates(CONFIG, ["remat"], 4)] == ["none", "dots", "mixed", "full"]
  typed = sweep.candidates(CONFIG, ["seed=None,True,1,0.5,x"], 4)
  assert [repr(one["seed"]) for one in typed] == ["None", "True", "1", "0.5", "'x'"]


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ("model.remit=full", "the config has no model.remit; did you mean model.remat?"),
    ("modle.remat=full", "the config has no modle.remat; did you mean model?"),
    ("seed.x=1", "the config has no seed.x"),
    ("mesh.fsdp", "must be KEY=VALUE,VALUE or one of remat, mesh"),
    ("mesh", "mesh.fsdp is swept twice"),
    ("mesh.fsdp=1", "mesh.fsdp is swept twice"),
    ("mesh=1", "sweep the keys within a section"),
    ("seed=1,,2", "must be KEY=VALUE,VALUE or one of remat, mesh"),
    ("mesh.fsdp=", "must be KEY=VALUE,VALUE or one of remat, mesh"),
  ],
)
def test_a_wrong_sweep_is_an_error(given, message):
  with pytest.raises(ValueError, match=message):
    sweep.candidates(CONFIG, ["mesh.fsdp=2", given], 4)


def test_plans_that_fit_come_first_and_the_fastest_of_them_before(capsys):
  calls = []
  choices = sweep.candidates(CONFIG, ["mesh.fsdp=1,2,3,4", "model.remat=none,full"], 4)
  rows = sweep.sweep(CONFIG, choices, CHIP, planner(calls), {}, "")
  assert len(calls) == 8
  assert CONFIG["mesh"]["fsdp"] == 1
  order = [(row["choice"]["mesh.fsdp"], row["choice"]["model.remat"]) for row in rows]
  # within 0.9 of 17.2 GB: 10 and 5 GB on four shards, 10 on two with everything computed again
  assert order[0] == (4, "none")
  assert set(order[1:3]) == {(2, "full"), (4, "full")}
  assert {shards for shards, _ in order[-2:]} == {3}
  assert [sweep.fits(row) for row in rows[:6]] == [True] * 3 + [False] * 3
  sweep.print_ranking(rows)
  said = capsys.readouterr().out
  assert "8/8  mesh.fsdp=4 model.remat=full  ETA 0 min" in said
  assert "4 devices are not divisible by 3" in said
  assert said.count("does not fit") == 3


def test_a_sweep_that_was_stopped_goes_on(tmp_path):
  path, about = tmp_path / "sweep.json", {"topology": "v5e:2x2", "config": CONFIG}
  choices = sweep.candidates(CONFIG, ["mesh.fsdp=1,2,4"], 4)
  first, second = [], []
  sweep.sweep(CONFIG, choices[:2], CHIP, planner(first), about, str(path))
  rows = sweep.sweep(CONFIG, choices, CHIP, planner(second), about, str(path))
  assert (len(first), len(second)) == (2, 1)
  assert len(rows) == len(json.loads(path.read_text())["plans"]) == 3
  with pytest.raises(ValueError, match="holds plans of another config, other devices"):
    sweep.sweep(CONFIG, choices, CHIP, planner([]), about | {"topology": "v5e:4x4"}, str(path))
  path.write_text("{}")
  with pytest.raises(ValueError, match="holds no sweep"):
    sweep.sweep(CONFIG, choices, CHIP, planner([]), about, str(path))


def test_a_plan_that_failed_is_made_again_and_a_bug_is_not_hidden(tmp_path):
  path, calls = str(tmp_path / "sweep.json"), []
  choices = sweep.candidates(CONFIG, ["mesh.fsdp=3,4"], 4)
  for _ in range(2):
    sweep.sweep(CONFIG, choices, CHIP, planner(calls), {}, path)
  assert [config["mesh"]["fsdp"] for config in calls] == [3, 4, 3]
  with pytest.raises(ValueError, match="none of the plans can be made; the first of them: 4 devices are not"):
    sweep.sweep(CONFIG, choices[:1], CHIP, planner(calls), {}, "")

  def broken(config):
    raise RuntimeError("a bug")

  with pytest.raises(RuntimeError, match="a bug"):
    sweep.sweep(CONFIG, choices, CHIP, broken, {}, "")
