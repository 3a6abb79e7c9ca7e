"""`launch/generate.py` as a user meets it: it remembers a text, answers and explains; mistakes are one line."""

import json
import os
import sys

import pexpect
import pytest

from configs import memory
from selfrag_jax.experiments import self_rag
from tests.launching import ROOT, launch

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  config = memory.get_config()
  config.model.update(d_model=16, n_layers=1, n_heads=2, block_pattern="T", mlp_dim=16)
  config.self_rag.top_k = 4
  config.data.update(n_facts=16, n_questions=2, text=({"n_facts": 4},))
  config.pretrain.update(steps=2, batch_size=8, valid_rows=8, needed_loss=0.0)
  config.memory.update(steps=2, batch_size=8, needed_loss=0.0)
  self_rag.run(self_rag.build(config.to_dict()), folder)
  (folder / "checkpoints" / "full_hybrid").mkdir()  # of the experiment: not a model with memory
  return folder


def generate(*flags, text=""):
  return launch("launch/generate.py", *flags, text=text)


def test_a_run_remembers_answers_and_explains(workdir, tmp_path):
  facts, kept, told = tmp_path / "facts.txt", tmp_path / "memory", tmp_path / "answers.jsonl"
  facts.write_text("Ada Baker: amber\nOtto Cross: quartz\n")
  flags = (f"--model={workdir}", f"--memory={kept}", "--max_new_tokens=1")
  run = generate(*flags, f"--remember={facts}", "--prompt=Ada Baker:", "--explain")
  assert run.returncode == 0, run.stderr
  assert f"remembered {facts}: 2 chunks" in run.stderr
  answer, *chunks = run.stdout.splitlines()
  assert answer.startswith("Ada Baker: ")
  assert sorted(line.split("  ")[-1] for line in chunks) == ["Ada Baker: amber", "Otto Cross: quartz"]
  # the memory is there in the next process, prompts come from the standard input
  run = generate(*flags, f"--output={told}", text="Ada Baker:\n\nOtto Cross:\n")
  assert run.returncode == 0, run.stderr
  first, second = (json.loads(line) for line in told.read_text().splitlines())
  assert f"{first['question']} {first['answer']}" == answer == run.stdout.splitlines()[0]
  assert {chunk["place"] for chunk in second["chunks"]} == {f"{facts}:1", f"{facts}:2"}


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_terminal_gets_a_chat_whose_answers_can_be_kept(workdir, tmp_path):
  facts, told = tmp_path / "facts.txt", tmp_path / "answers.jsonl"
  facts.write_text("Ada Baker: amber\nOtto Cross: quartz\n")
  flags = [f"--model={workdir}", f"--remember={facts}", f"--output={told}", "--max_new_tokens=2", "--explain"]
  env = {**os.environ, "TERM": "dumb"}
  chat = pexpect.spawn(
    sys.executable,
    ["launch/generate.py", *flags],
    encoding="utf-8",
    timeout=300,
    env=env,
    cwd=ROOT,
    dimensions=(24, 500),
  )
  chat.expect(f"remembered {facts}: 2 chunks")
  chat.expect("The memory holds 2 texts")
  chat.expect("> ")
  chat.sendline("Ada Baker:")
  chat.expect(rf"\[1\]  [+-]0\.\d+  #\d  {facts}:\d  (Ada|Otto)")
  chat.expect("> ")
  chat.sendline("/load nowhere")
  chat.expect("error: this model reads its memory alone: /remember the texts of nowhere")
  chat.expect("> ")
  chat.sendline("/quit")
  chat.expect(pexpect.EOF)
  chat.close()
  assert chat.exitstatus == 0
  [record] = [json.loads(line) for line in told.read_text().splitlines()]
  run = generate(*flags[:2], "--max_new_tokens=2", "--prompt=Ada Baker:")
  assert run.stdout == f"Ada Baker: {record['answer']}\n"  # a chat and a prompt get the same


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "error: which model? --model=WORKDIR or a name"),
    (
      ["--model=FOLDER", "--output=answers.txt"],
      "error: answers.txt: answers are written to a .jsonl",
    ),
    (["--model=FOLDER", "--phase=rl"], "rl has no intact checkpoint; the phases of FOLDER are"),
    (["--model=nowhere"], "error: nowhere does not exist"),
    (["--modle=x"], "error: Unknown command line flag 'modle'. Did you mean: model ?"),
    (["--model=nowhere", "--remember=notes.pdf"], "error: notes.pdf holds no text"),
    (["--model=nowhere", "--output=missing/a.html"], "error: missing/a.html: there is no folder missing; make it"),
    (["--model=FOLDER", "--memory=configs"], "manifest.json is missing: the folder holds no store"),
    (["--model=FOLDER", "--memory=README.md"], "README.md is a file or lies below one; a store is a folder"),
    (["--model=FOLDER", "--encoder=hashing-512"], "error: --encoder=hashing-512: this model finds chunks by its own"),
    (
      ["--model=FOLDER", "--knowledge_base=kb"],
      "error: --knowledge_base=kb: this model finds chunks by its own states",
    ),
    (["--model=FOLDER", "--top_k=0"], "error: flag --top_k=0: 0 is not a positive integer"),
    (["--model=FOLDER", "--top_p=nan"], "error: need temperature 0 or >= 1e-06, top_k >= 0 and 1e-06 <= top_p"),
    (["--model=FOLDER", "--temperature=nan"], "error: need temperature 0 or >= 1e-06, top_k >= 0 and 1e-06 <= top_p"),
    (["--model=FOLDER", "--prompt=\udcff"], r"'\udcff' is no text in UTF-8"),
    (
      ["--model=FOLDER", "--max_new_tokens=1000000000"],
      "error: max_new_tokens = 1000000000 must be a whole number from 1",
    ),
    (["--model=FOLDER", f"--max_new_tokens={10**30}"], "0 must be a whole number from 1 to 1,048,576"),
    (
      ["--model=FOLDER", "--temperature=1e300"],
      "error: flag --temperature=1e300: 1e+300 is not a number in the range",
    ),
    (["--model=FOLDER", f"--seed={2**63}"], "error: flag --seed=9223372036854775808: 922337203685477580"),
  ],
)
def test_a_mistake_is_one_line(workdir, flags, message):
  run = generate(*(flag.replace("FOLDER", str(workdir)) for flag in flags))
  assert run.returncode == 1
  assert message.replace("FOLDER", str(workdir)) in run.stderr
  assert run.stdout == ""
  assert len(run.stderr.splitlines()) == 1
