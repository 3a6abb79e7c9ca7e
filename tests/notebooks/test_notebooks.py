"""The notebooks, run from top to bottom on a CPU with fewer and smaller steps, and what they share."""

import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {path.stem: path for path in (ROOT / "notebooks").glob("*.ipynb")}
SMALL = """
USE_DRIVE, WORKDIR = False, {workdir!r}
small = {{"d_model": 16, "n_layers": 1, "n_heads": 2, "block_pattern": "T", "mlp_dim": 16}}
few = {{"steps": 2, "batch_size": 2}}
"""
POSITION_RECALL = """
VARIANT = "kv"
CHANGES = {{
  "model": small, "pretrain": {{**few, "valid_rows": 2, "needed_loss": 0.0}}, "memory": {{**few, "needed_loss": 0.0}},
  "position_recall": few,
  "full_context": {{**few, "valid_rows": 2, "text": ({{"n_facts": 16}},), "models": {{"hybrid": small}}}},
  "evaluation": {{"n_facts": (64,), "questions": (2,), "full_questions": (2,), "depths": 4}},
}}
"""
REFRAG = """
VARIANT = "hybrid"
CHANGES = {{
  "model": small, "sft": few, "sft_gold": few,
  "rl": {{"steps": 1, "questions_per_step": 2, "rollouts_per_question": 2}},
  "evaluation": {{"periodic": 2, "final": 2, "batch_size": 2}},
}}
MODEL, QUESTION = {model!r}, "What is the currency of the country whose capital is Tripoli?"
"""


def read(name):
  notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
  nbformat.validate(notebook)
  return notebook


def tagged(notebook, tag):
  return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


@pytest.fixture
def execute(tmp_path, monkeypatch):
  """Return a function that runs a notebook with other parameters. It returns what was printed, by cell, and shown."""
  monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # one device, as at home
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")

  def run(name, parameters, **values):
    notebook = read(name)
    [cell] = tagged(notebook, "parameters")
    cell.source = (SMALL + parameters).format(workdir=str(tmp_path / "run"), **values)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [cell.get("outputs", ()) for cell in notebook.cells]
    printed = ["".join(output["text"] for output in of if output.get("name") == "stdout") for of in outputs]
    return list(filter(None, printed)), [kind for of in outputs for output in of for kind in output.get("data", ())]

  return run


def test_the_position_recall_notebook_runs(execute, tmp_path):
  printed, shown = execute("colab_position_recall", POSITION_RECALL)
  assert (tmp_path / "run" / "position_recall.json").exists()
  assert "image/png" in shown
  assert "(right: " in printed[-1]
  assert printed[-1].count("place") == 5


def write_chat_model(folder):
  """Write a model that says `dinar` whatever it is asked."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  special, alphabet = ["<|im_start|>", "<|im_end|>", "dinar"], pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(special_tokens=special[:2], initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator(["dinar"] * 9, trainer)
  tokenizer.save(str(folder / "tokenizer.json"))
  sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
  torch.manual_seed(0)
  model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.get_vocab_size(), num_key_value_heads=1, **sizes))
  model.model.embed_tokens.weight.data[:, 0] += 1
  model.lm_head.weight.data[tokenizer.token_to_id("dinar"), 0] += 4
  model.save_pretrained(folder)


def test_the_refrag_notebook_runs(execute, tmp_path):
  model = tmp_path / "model"
  model.mkdir()
  write_chat_model(model)
  (*_, rollout, answers), shown = execute("colab_refrag", REFRAG, model=str(model))
  assert (tmp_path / "run" / "report.json").exists()
  assert "image/png" in shown
  assert "<|user|>" in rollout
  assert "right: " in rollout
  _, alone, once, twice = answers.split("\n\n")
  assert alone.startswith("no document: dinardinar")
  assert once.startswith("one search: dinardinar")
  assert "[1] Tripoli: Tripoli is the capital of Libya." in once
  assert "Libyan dinar" not in once
  assert twice.startswith("two searches: dinardinar")
  assert "[2] Libya: " in twice
  assert "Libyan dinar" in twice


def test_notebooks_hold_no_outputs_and_share_their_set_up():
  notebooks = [read(name) for name in NOTEBOOKS]
  assert not any(cell.get("outputs") for notebook in notebooks for cell in notebook.cells)
  [shared] = {tuple(cell.source for cell in tagged(notebook, "shared")) for notebook in notebooks}
  assert len(shared) == 2


def first_cell_on_colab(monkeypatch, installed, devices):
  """Run the shared first cell as if on Colab; returns the commands that it gives, in their order."""
  given, variables = [], {}
  magic = lambda name, line: given.append(f"{name} {line}".format_map(variables))
  restart = SimpleNamespace(do_shutdown=lambda restart: given.append("restart" if restart else "end"))
  shell = SimpleNamespace(run_line_magic=magic, system=lambda line: magic("!", line), kernel=restart)
  variables["get_ipython"] = lambda: shell
  monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
  monkeypatch.setattr("importlib.metadata.distributions", lambda: [SimpleNamespace(name=name) for name in installed])
  monkeypatch.setattr("glob.glob", lambda pattern: [path for path in devices if fnmatch(path, pattern)])
  monkeypatch.setattr("shutil.which", lambda name: name if name in devices else None)
  source = tagged(read("colab_refrag"), "shared")[0].source
  exec(TransformerManager().transform_cell(source), variables)
  return given


@pytest.mark.parametrize(
  ("devices", "extras"), [(["/dev/vfio/0"], "weights,tpu"), (["nvidia-smi"], "weights,cuda"), ([], "weights")]
)
def test_on_colab_the_first_run_installs_and_restarts(monkeypatch, capsys, devices, extras):
  enter, clone, install, restart = first_cell_on_colab(monkeypatch, ["jax"], devices)
  assert enter == "cd -q /content"
  assert clone.startswith("! git clone -q https://")
  assert install == f"pip install -q -e ./selfrag_jax[{extras}]"
  assert restart == "restart"
  assert "run all cells again" in capsys.readouterr().out


def test_on_colab_the_second_run_goes_on(monkeypatch):
  assert first_cell_on_colab(monkeypatch, ["jax", "selfrag_jax"], []) == ["cd -q /content", "cd -q selfrag_jax"]
