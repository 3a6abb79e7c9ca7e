"""The notebooks, run from top to bottom on a CPU with fewer and smaller steps."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
TINY = """
USE_DRIVE, VARIANT, WORKDIR = False, "kv", {workdir!r}
small = {{"d_model": 16, "n_layers": 1, "n_heads": 2, "block_pattern": "T", "mlp_dim": 16}}
few = {{"steps": 2, "batch_size": 2}}
CHANGES = {{
  "model": small, "pretrain": {{**few, "valid_rows": 2, "needed_loss": 0.0}}, "memory": {{**few, "needed_loss": 0.0}},
  "position_recall": few,
  "full_context": {{**few, "valid_rows": 2, "text": ({{"n_facts": 16}},), "models": {{"hybrid": small}}}},
  "evaluation": {{"n_facts": (64,), "questions": (2,), "full_questions": (2,), "depths": 4}},
}}
"""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # one device, as at home
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  notebook = nbformat.read(ROOT / "notebooks" / "colab_position_recall.ipynb", as_version=4)
  nbformat.validate(notebook)
  assert not any(cell.get("outputs") for cell in notebook.cells)
  [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
  parameters.source = TINY.format(workdir=str(tmp_path / "run"))
  return notebook


def test_the_position_recall_notebook_runs(notebook, tmp_path):
  NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
  assert (tmp_path / "run" / "position_recall.json").exists()
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
  assert any("image/png" in output.get("data", {}) for output in outputs)
  said = outputs[-1]["text"]
  assert "(right: " in said
  assert said.count("place") == 5
