"""TextGrad's own tests, run against this package through a shim of its module names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = Path(__file__).parent / "shim"
NEED_NETWORK = {"test_api", "test_bugged", "test_multimodal", "test_multimodal_from_url"}


def test_textgrads_own_tests_pass(tmp_path):
  checkout = os.environ.get("TEXTGRAD_CHECKOUT")
  if not checkout:
    pytest.skip("TEXTGRAD_CHECKOUT names no checkout of github.com/zou-group/textgrad")
  shutil.copytree(Path(checkout) / "tests", tmp_path / "tests")
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SHIM), str(SHIM.parents[2])])}
  command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", "tests"]
  out = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
  passed = set(re.findall(r"^PASSED .*::(\w+)", out, re.M))
  failed = set(re.findall(r"^(?:FAILED|ERROR) .*::(\w+)", out, re.M))
  assert failed <= NEED_NETWORK, out
  assert len(passed) >= 11, out


def test_shim_leads_to_this_package():
  code = (
    "import textgrad, selfrag_jax.textgrad as ours\n"
    "from textgrad.engine.openai import ChatOpenAI\nfrom textgrad.autograd import LLMCall\n"
    "assert textgrad.Variable is ours.Variable and ChatOpenAI is ours.OpenAIEngine and LLMCall is ours.LLMCall\n"
  )
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SHIM), str(SHIM.parents[2])])}
  subprocess.run([sys.executable, "-c", code], env=environment, check=True)
