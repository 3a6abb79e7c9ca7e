"""`launch/compile.py`: a training is compiled for a pod that is not there, and what it says of it holds."""

import json
from collections import Counter

import jax
import numpy as np
import pytest
from launching import launch

from configs.rag import get_config
from selfrag_jax.aot import chips
from selfrag_jax.aot.chips import SHAPES, topology
from selfrag_jax.aot.programs import Program, compile_phases
from selfrag_jax.aot.roofline import traffic
from selfrag_jax.aot.table import advice, as_json
from selfrag_jax.chips import CHIPS
from selfrag_jax.experiments.rag import build, planned

SMALL = (
  "--config.rl.questions_per_step=4", "--config.rl.rollouts_per_question=2", "--config.sft.batch_size=4",
  "--config.evaluation.batch_size=4",
)  # fmt: skip
COUNTRIES = (
  "--config.pretrain.steps=0", "--config.choose.steps=0",
  "--config.rag.batch_size=4", "--config.rag.accumulate=1", "--config.model.d_model=64",
)  # fmt: skip


def compile_for(name, *flags, config="configs/refrag.py"):
  return launch("launch/compile.py", f"--config={config}", *([f"--topology={name}"] if name else []), *flags)


def test_a_rollout_for_a_slice_that_is_not_there_fits_and_sends_its_weights_once(tmp_path):
  ended = compile_for("v5e:2x2", *SMALL, "--mesh=host", f"--json={tmp_path / 'plan.json'}")
  assert ended.returncode == 0, ended.stderr
  plan = json.loads((tmp_path / "plan.json").read_text())
  assert plan["mesh"] == {"data": 1, "fsdp": 4, "sequence": 1, "tensor": 1}
  of = {program["program"]: program for program in plan["programs"]}
  assert list(of) == ["sft update", "rl rollout", "rl update"]
  for program in of.values():
    sizes = program["bytes"]
    assert sizes["memory"] == sizes["arguments"] + sizes["temporary"] + sizes["results"]
    assert (program["fits"], sizes["device"]) == (True, 16 * 2**30)
  once = [row for row in of["rl rollout"]["collectives"] if not row["loop"]]
  within = [row for row in of["rl rollout"]["collectives"] if row["loop"].endswith("while/body/while")]
  assert sum(row["number"] for row in once if row["kind"] == "all-gather") >= 10  # the weights
  assert sum(row["bytes"] for row in within) < 100  # whether any row is still writing
  for said in ("4 TPU v5 lite devices", "rl rollout: ", "of a device's 16 GiB, fits", "all-gather         along fsdp"):
    assert said in ended.stdout


def test_a_training_beside_documents_that_bm25_finds_is_compiled():
  ended = compile_for("v5e:2x2", *COUNTRIES, config="configs/rag.py")
  assert ended.returncode == 0, ended.stderr
  assert "rag update: " in ended.stdout


def test_the_phases_of_position_recall_are_compiled():
  flags = ("--config.pretrain.batch_size=4", "--config.memory.batch_size=4", "--config.position_recall.batch_size=4")
  ended = compile_for("v5e:2x2", *flags, config="configs/position_recall.py")
  assert ended.returncode == 0, ended.stderr
  assert all(f"{phase} update: " in ended.stdout for phase in ("pretrain", "memory", "position_recall"))


def test_a_sweep_ranks_plans(tmp_path):
  sweeps = "--sweep=mesh.fsdp=3,4", "--sweep=model.remat=full", f"--json={tmp_path / 'plans.json'}"
  ended = compile_for("v5e:2x2", *COUNTRIES, *sweeps, config="configs/rag.py")
  assert ended.returncode == 0, ended.stderr
  best, worst = ended.stdout.splitlines()[-2:]
  assert best.startswith("mesh.fsdp=4 model.remat=full  ")
  assert worst.startswith("mesh.fsdp=3 model.remat=full  mesh {")
  assert len(json.loads((tmp_path / "plans.json").read_text())["plans"]) == 2
  ended = compile_for("v5e:2x2", *COUNTRIES, sweeps[-1], config="configs/rag.py")
  assert "holds a sweep, which took longer than a plan; give another --json" in ended.stderr


@pytest.mark.parametrize(
  ("name", "flags", "message"),
  [
    ("", (), "which devices? --topology=v5e:4x4"),
    ("v9:4x4", (), "no topology 'v9:4x4': it is a chip and a shape such as v5e:4x4; chips are v5e, v5p"),
    ("v5e:3x5", (), f"v5e has the shapes {SHAPES['v5e']}"),
    ("h100:0", (), "h100 has the shapes 1 2 4 8"),
    ("h100:8*2", (), "behind the * stands the number of slices of TPUs, from 2 to 64"),
    ("v5e:2x2*", (), "behind the * stands the number of slices of TPUs, from 2 to 64"),
    ("v5e:2x2*0064", (), "behind the * stands the number of slices of TPUs, from 2 to 64"),
    ("v5e:2x2", ("--mesh=host", "--sweep=mesh"), "--mesh=host sets every size of the mesh; give it, or a sweep"),
    ("v5e:2x2*one", (), "behind the * stands the number of slices of TPUs, from 2 to 64"),
    ("v5e:2x2*2", ("--config.mesh.data=1", "--config.mesh.fsdp=8"), "data = 1 is not divisible by their number"),
    ("v5e:2x2", ("--config.mesh.fsdp=3",), "4 devices are not divisible by 3"),
    ("v5e:2x2", ("--config.rl.questions_per_step=3",), "rl.questions_per_step = 3 is not divisible by the 4"),
    ("v5e:2x2", ("--mesh=v5e-265",), "the meshes are host, v5e-16, v5e-256"),
    (
      "v5e:2x2",
      ("--mesh=host", "--config.mesh.fsdp=4"),
      "sets every size of the mesh; give it, or --config.mesh.fsdp=4",
    ),
    (
      "v5e:2x2",
      ("--mesh=h100-8",),
      "mesh {'data': 1, 'fsdp': 8, 'sequence': 1, 'tensor': 1} has 8 places for 4 devices",
    ),
    ("v5e:2x2", ("--sweep=rl.step=1,2",), "the config has no rl.step; did you mean rl.steps?"),
    ("v5e:2x2", ("--json=none/plan.json",), "there is no folder none"),
    ("v5e:2x2", ("--workdir=x",), "compile.py has no flag --workdir"),
  ],
)
def test_a_mistake_is_one_line(name, flags, message):
  ended = compile_for(name, *flags)
  assert ended.returncode == 1
  assert len(ended.stderr.splitlines()) == 1
  assert message in ended.stderr


def test_what_trains_nothing_is_not_compiled():
  ended = compile_for("v5e:2x2", config="configs/retrieval.py")
  assert "it trains nothing, so there is nothing to compile" in ended.stderr


def test_a_compiler_that_is_missing_is_named_with_what_installs_it(monkeypatch):
  monkeypatch.setattr(chips, "_is_installed", lambda module: False)
  with pytest.raises(ImportError, match=r"libtpu, the compiler for v5e, .*pip install 'jax\[tpu\]'"):
    topology("v5e:2x2")
  with pytest.raises(ImportError, match=r"pip install 'jax\[cuda12\]'"):
    topology("h100:8")


def program_of(arguments=0, temporary=0, results=0, text=""):
  return Program("rl update", arguments, temporary, results, 1.0, text, Counter())


def test_what_does_not_fit_says_what_to_change():
  chip = CHIPS["v5e"]
  assert not advice(program_of(7 * 2**30, 7 * 2**30), chip)
  assert "mesh.fsdp" in advice(program_of(15 * 2**30, 1), chip)
  assert "model.remat" in advice(program_of(2 * 2**30, 13 * 2**30), chip)
  empty = "HloModule f\n\nENTRY %main () -> () {\n}\n"
  assert not as_json([program_of(2**34, text=empty)], {"data": 1}, chip)[0]["fits"]


def test_the_arguments_of_an_update_are_the_shards_of_its_state_and_of_its_batch():
  config = get_config("hybrid")
  config.mesh.fsdp, config.rag.batch_size, config.rag.accumulate = 4, 8, 1
  config.pretrain.steps = config.choose.steps = 0
  experiment = build(config.to_dict())
  with jax.set_mesh(experiment.mesh):
    phase = planned(experiment)["rag"]
    (program,) = compile_phases({"rag": phase})
    state, batch = phase.abstract_state(), phase.batch(0)
  size = lambda leaf: int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
  keys = jax.tree.map(lambda leaf: leaf, state.replace(key=None))
  expected = sum(map(size, jax.tree.leaves(keys))) + sum(leaf.nbytes // 8 for leaf in jax.tree.leaves(batch))
  assert 0 <= program.arguments - expected < 1024  # the random key, and alignment
  rows = traffic(program, dict(experiment.mesh.shape))
  assert {axes for row in rows for axes in row.axes} == {"data", "fsdp"}
