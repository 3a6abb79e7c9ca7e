"""TextGrad's own tests, run against this package through a shim of its module names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = Path(__file__).parent / "shim"
OTHERWISE = {
  "test_multimodal"
}  # it wants an AssertionError for a float and an AttributeError for a list; here TypeErrors


def test_textgrads_own_tests_pass(tmp_path):
  """All but one do, by scripted engines: LiteLLM and the picture from the network are in the shim."""
  checkout = os.environ.get("TEXTGRAD_CHECKOUT")
  if not checkout:
    pytest.skip("TEXTGRAD_CHECKOUT names no checkout of github.com/zou-group/textgrad")
  shutil.copytree(Path(checkout) / "tests", tmp_path / "tests")
  environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
  environment |= {"PYTHONPATH": os.pathsep.join([str(SHIM), str(SHIM.parents[2])]), "XDG_CACHE_HOME": str(tmp_path)}
  out = ""
  for file in sorted((tmp_path / "tests").glob("test_*.py")):  # each sets a backward engine, and takes it for the first
    command = [sys.executable, "-m", "pytest", "-p", "offline", "-p", "no:cacheprovider", "-rA", "-q", str(file)]
    out += subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
  passed = set(re.findall(r"^PASSED .*::(\w+)", out, re.M))
  failed = set(re.findall(r"^(?:FAILED|ERROR) .*::(\w+)", out, re.M))
  assert failed == OTHERWISE, out
  assert len(passed) == 14, out
  assert "TypeError: the input must be a Variable, not list" in out, out


def test_shim_leads_to_this_package():
  code = (
    "import textgrad, selfrag_jax.textgrad as ours\n"
    "from textgrad.engine.openai import ChatOpenAI\nfrom textgrad.autograd import LLMCall\n"
    "assert textgrad.Variable is ours.Variable and ChatOpenAI is ours.OpenAIEngine and LLMCall is ours.LLMCall\n"
  )
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SHIM), str(SHIM.parents[2])])}
  subprocess.run([sys.executable, "-c", code], env=environment, check=True)
