"""`load_model`: it loads the saved model, in another process too, and refuses one that does not fit."""

import json
import os
import shutil
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.text.tokenizer import ByteTokenizer, WordTokenizer
from selfrag_jax.train.checkpoint import Checkpointer
from selfrag_jax.train.load import load_model
from selfrag_jax.train.loop import checkpoints

CONFIG = ModelConfig(
  vocab_size=302, d_model=32, n_layers=2, n_heads=2, block_pattern="TM", ssm_head_dim=16, ssm_chunk=8
)
TOKENS = np.arange(12).reshape(2, 6)

SHOW = """
import jax, json, sys, numpy as np
from selfrag_jax.model.lm import LM
from selfrag_jax.train.load import load_model
loaded = load_model(sys.argv[1])
apply = jax.jit(LM(loaded.config).apply, static_argnames="method")
hidden = apply(loaded.params, np.arange(12).reshape(2, 6))
print(json.dumps(np.asarray(apply(loaded.params, hidden, method="logits")).tolist()))
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  tokenizer = ByteTokenizer()
  said = {"model": CONFIG.to_dict(), "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}}
  for seed, (phase, begun) in enumerate((("rl", {"origin": {"phase": "sft"}}), ("sft", {}), ("gold", {}))):
    params, metadata = nn.unbox(init_params(CONFIG, jax.random.key(seed))), {**said, "phase": phase, **begun}
    with Checkpointer(checkpoints(folder, phase)) as saver:
      saver.save(1, {"params": params, "opt_state": params}, metadata=metadata)
  return folder


def test_another_process_gets_the_same_logits(workdir):
  loaded = load_model(workdir)
  assert loaded.config == CONFIG
  apply = jax.jit(LM(CONFIG).apply, static_argnames="method")
  ours = apply(loaded.params, apply(loaded.params, TOKENS), method="logits")
  run = subprocess.run([sys.executable, "-c", SHOW, str(workdir)], capture_output=True, text=True, check=True)
  np.testing.assert_array_equal(np.asarray(ours), np.asarray(json.loads(run.stdout.splitlines()[-1]), np.float32))


def test_the_phase_chooses_and_the_last_is_the_default(workdir, capsys):
  embed = lambda phase: np.asarray(load_model(workdir, phase).params["params"]["embed"])
  np.testing.assert_array_equal(embed(None), embed("rl"))
  assert capsys.readouterr().err == f"{workdir}: phase rl, of gold, rl, sft\n"
  assert (embed("rl") != embed("sft")).any()


def test_the_last_phase_is_that_of_the_longest_line_whatever_was_written_last(workdir, tmp_path):
  shutil.copytree(workdir, tmp_path / "run")
  phases = tmp_path / "run" / "checkpoints"
  for last in ("rl", "sft", "gold"):
    os.utime(phases / last, (2e9, 2e9))
    assert load_model(tmp_path / "run").metadata["phase"] == "rl"
  shutil.rmtree(phases / "rl")
  with pytest.raises(ValueError, match=r"has the phases .*, of which gold and sft may be meant: name one"):
    load_model(tmp_path / "run")
  (phases / "rl").mkdir()  # it was begun
  with pytest.raises(FileNotFoundError, match=r"rl has no intact checkpoint; the phases of .* are gold, rl, sft"):
    load_model(tmp_path / "run")


def test_a_folder_that_is_no_run_or_holds_nothing_intact_is_named(workdir, tmp_path):
  (phases := tmp_path / "run" / "checkpoints").mkdir(parents=True)
  with pytest.raises(FileNotFoundError, match=r"no intact checkpoint; the phases of .* are none"):
    load_model(tmp_path / "run")
  (phases / "notes.txt").write_text("mine")  # newer than any phase
  with pytest.raises(FileNotFoundError, match=r"no intact checkpoint; the phases of .* are none"):
    load_model(tmp_path / "run")
  shutil.copytree(workdir / "checkpoints" / "sft", phases / "sft")
  (phases / "notes.txt").touch()
  assert load_model(tmp_path / "run").config == CONFIG
  (phases / "sft" / "1" / "manifest.json").write_text("5")
  for phase in (None, "sft", "notes.txt", "../checkpoints/sft"):
    with pytest.raises(FileNotFoundError, match=r"no intact checkpoint; the phases of .* are sft"):
      load_model(tmp_path / "run", phase)
  with pytest.raises(ValueError, match=r"is no workdir of launch/train.py, so it has no phase 'sft'"):
    load_model(tmp_path, "sft")


@pytest.mark.parametrize(
  ("metadata", "message"),
  [
    ({"config": {}}, "holds no language model"),
    ({"model": 5, "tokenizer": {}}, "holds no language model"),
    ({"model": {"vocab_size": 8, "gears": 5}, "tokenizer": {}}, "a model that this version does not know: .*gears"),
    ({"model": {"vocab_size": 0}, "tokenizer": {}}, "a model that this version does not know: vocab_size is 0"),
  ],
)
def test_a_checkpoint_of_something_else_is_named(tmp_path, metadata, message):
  with Checkpointer(checkpoints(tmp_path, "encoder")) as saver:
    saver.save(1, {"x": np.zeros(2)}, metadata=metadata)
  with pytest.raises(ValueError, match=message):
    load_model(tmp_path)


def test_what_does_not_fit_is_refused(workdir, tmp_path):
  assert load_model(workdir, tokenizer=ByteTokenizer()).config == CONFIG
  with pytest.raises(ValueError, match="trained with the tokenizer"):
    load_model(workdir, tokenizer=WordTokenizer(["a"]))
  with pytest.raises(FileNotFoundError, match=r"phases of .* are gold, rl, sft"):
    load_model(workdir, "rll")
  with pytest.raises(FileNotFoundError):
    load_model(tmp_path / "nothing")
