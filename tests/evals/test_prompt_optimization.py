"""Optimizing a prompt from the command line: it learns, goes on where it was stopped, and says what it did."""

import http.server
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import selfrag_jax.textgrad as tg
from configs.gradient_rag import get_config
from selfrag_jax.evals import prompt_optimization
from selfrag_jax.evals.prompt_page import diff
from selfrag_jax.tasks.programs import run_test
from selfrag_jax.tasks.prompt_tasks import is_same_answer, make_task
from selfrag_jax.tasks.rulebook import ROLE, TOPIC_ROLE, Rulebook
from selfrag_jax.textgrad.endpoint import OpenAIEngine
from selfrag_jax.textgrad.limits import BudgetError, Completion, EngineError

ROOT = Path(__file__).resolve().parents[2]


SIZES = {"train": 60, "valid": 30, "test": 60}
SMALL = {
  "rulebook": {"n_topics": 6, "capacity": 6, "noise": 0.2, "sizes": SIZES},
  "pipeline": {"n_topics": 4, "capacity": 24, "noise": 0.2, "sizes": SIZES},
  "program": {"sizes": {"train": 24, "valid": 8, "test": 8}},
}


def config(steps=12, variant="rulebook", **changes):
  made = get_config(variant).to_dict()
  made["task"] |= SMALL[variant]
  made["optimizer"]["steps"] = steps
  return {**made, **changes}


def optimize(workdir, *arguments, **changes):
  workdir.mkdir(parents=True, exist_ok=True)
  return prompt_optimization.run(prompt_optimization.build(config(*arguments, **changes)), workdir)


def test_the_prompt_learns_and_the_page_shows_it(tmp_path, capsys):
  report = optimize(tmp_path / "run", 25)
  assert report["test.initial"] == 0
  assert report["test.final"] > 0.9
  assert report["test.difference_interval"][0] > 0.8
  assert (tmp_path / "run" / "prompt.txt").read_text() == report["texts"][0]["final"] + "\n"
  assert "0.000 ->" in capsys.readouterr().out
  page = (tmp_path / "run" / "report.html").read_text()
  assert "<ins>" in page
  assert "past critiques that were shown: " in page
  assert "&lt;PAST_FEEDBACK similarity=" in page
  assert "data:image/png;base64," in page
  lines = (tmp_path / "run" / "prompt_optimization.csv").read_text().splitlines()
  assert lines[0] == "step,right,cases,valid,accepted,delta,tokens"
  assert len(lines) == 1 + 1 + 25


def test_two_prompts_of_a_pipeline_are_learned_together(tmp_path):
  report = optimize(tmp_path / "run", 40, "pipeline")
  assert report["test.initial"] == 0
  assert report["test.final"] > 0.7
  assert [text["file"] for text in report["texts"]] == ["topics.txt", "prompt.txt"]
  for text in report["texts"]:
    assert "For " in (tmp_path / "run" / text["file"]).read_text()
  page = (tmp_path / "run" / "report.html").read_text()
  assert page.count(f"<h4>{TOPIC_ROLE}</h4>") == page.count(f"<h4>{ROLE}</h4>") > 5


def test_a_program_learns_to_pass_its_unit_tests(tmp_path):
  report = optimize(tmp_path / "run", 12, "program")
  assert report["test.initial"] < 0.5
  assert report["test.final"] == 1
  program = (tmp_path / "run" / "program.py").read_text()
  assert run_test(program, "to_roman(3999)") == "'MMMCMXCIX'"
  with tg.GradientStore(str(tmp_path / "run" / "gradients"), read_only=True) as store:
    (critique, *_) = store.recent(1, role="program that has to pass its unit tests")
    assert "to_roman(" in critique.read().sample
    assert "def to_roman" not in critique.read().sample


@pytest.mark.parametrize("memory", ["none", "window", "retrieval"])
def test_a_run_that_was_stopped_goes_on_the_same(tmp_path, memory):
  whole = optimize(tmp_path / "whole", 12, memory=memory)
  optimize(tmp_path / "parts", 5, memory=memory)
  parts = optimize(tmp_path / "parts", 12, memory=memory)
  assert [parts[name] for name in ("texts", "valid", "test.right")] == [
    whole[name] for name in ("texts", "valid", "test.right")
  ]


@pytest.mark.parametrize("memory", ["window", "retrieval"])
def test_a_step_that_was_stopped_in_its_middle_goes_on_the_same(tmp_path, memory, monkeypatch):
  changes = {"memory": memory, "optimizer": {**config(12)["optimizer"], "gradient_memory": 2, "momentum_window": 2}}
  whole = optimize(tmp_path / "run", 12, **changes)
  optimizer, asked = Rulebook.optimize, []

  def fail_at_times(self, content, system_prompt):
    asked.append(content)
    if len(asked) in (2, 3, 5):
      raise EngineError("gone")
    return optimizer(self, content, system_prompt)

  monkeypatch.setattr(Rulebook, "optimize", fail_at_times)
  for _ in range(3):
    with pytest.raises(EngineError, match="gone"):
      optimize(tmp_path / "again" / "run", 12, **changes)
  parts = optimize(tmp_path / "again" / "run", 12, **changes)
  histories = [json.loads((tmp_path / of / "state.json").read_text())["history"] for of in ("run", "again/run")]
  same = ("texts", "past", "valid", "critiques")
  assert [[row.get(name) for name in same] for row in histories[0]] == [
    [row.get(name) for name in same] for row in histories[1]
  ]
  assert parts["test.right"] == whole["test.right"]
  with tg.GradientStore(str(tmp_path / "run" / "gradients"), read_only=True) as store:
    (last, *_) = store.recent(1, role=ROLE)
    assert (last.run, last.read().epoch) == ("run", last.step * 3 // 60)
    assert last.read().tokens > 5


def test_another_config_needs_another_folder(tmp_path):
  optimize(tmp_path / "run", 2)
  with pytest.raises(ValueError, match="another --workdir"):
    optimize(tmp_path / "run", 2, seed=1)


def test_worse_candidates_are_rejected_unless_told_otherwise(tmp_path):
  def curve(name, reject_worse):
    made = config(25)
    made["task"] |= {"noise": 0.7, "n_topics": 12}
    made["optimizer"]["reject_worse"] = reject_worse
    (tmp_path / name).mkdir()
    return prompt_optimization.run(prompt_optimization.build(made), tmp_path / name)["valid"]

  assert all(b >= a for a, b in itertools.pairwise(curve("strict", True)))
  assert any(b < a for a, b in itertools.pairwise(curve("loose", False)))


def test_the_budget_stops_the_run_and_a_larger_one_goes_on(tmp_path, monkeypatch):
  spent = []

  def complete(self, *arguments, **options):
    answer = ask(self, *arguments, **options)
    spent.append(answer.prompt_tokens + answer.completion_tokens)
    return answer

  ask = tg.CallableEngine.complete
  monkeypatch.setattr(tg.CallableEngine, "complete", complete)
  budget = {**config()["budget"], "tokens": 15_000}
  with pytest.raises(BudgetError, match="15,000"):
    optimize(tmp_path / "run", 25, budget=budget)
  assert 0 < json.loads((tmp_path / "run" / "state.json").read_text())["step"] < 25
  for _ in range(3):
    with pytest.raises(BudgetError, match="15,000"):
      optimize(tmp_path / "run", 25, budget=budget)
  assert 14_000 < sum(spent) <= 15_000
  assert optimize(tmp_path / "run", 25)["test.final"] > 0.9


@pytest.mark.parametrize("tokens", [500, 9_000, 24_000])
def test_a_run_that_its_budget_ends_writes_report_and_texts(tmp_path, tokens):
  budget = {**config()["budget"], "tokens": tokens}
  run = tmp_path / "run"
  with pytest.raises(BudgetError, match=r"budgeted are .*; the budget ended the run after \d+ of 25 steps; .*report"):
    optimize(run, 25, budget=budget)  # before the first step, in a step, in the test
  report = json.loads((run / "prompt_optimization.json").read_text())
  assert f"{tokens:,}" in report["ended"]
  assert (run / "prompt.txt").read_text() == report["texts"][0]["final"] + "\n"
  assert tokens / 2 < report["account"]["prompt_tokens"] + report["account"]["completion_tokens"] < tokens + 20
  assert "ended early, without test scores" in (run / "report.html").read_text()
  assert len((run / "prompt_optimization.csv").read_text().splitlines()) == 1 + len(report["valid"])
  again = optimize(run, 25)
  assert again["ended"] is None
  assert again["test.final"] > 0.9


DAMAGES = [
  "",
  "[" * 100_000,
  "null",
  '{"step": NaN}',
  b"\xff\xfe",
  lambda state: state.pop("history"),
  lambda state: state.update(step="2"),
  lambda state: state.update(step=7),
  lambda state: state.update(texts=[5]),
  lambda state: state.update(texts=[]),
  lambda state: state.update(config=None),
  lambda state: state["config"].update(engines={"model": 1}),
  lambda state: state.update(optimizer={}),
  lambda state: state["optimizer"].update(memory=["ab"]),
  lambda state: state["history"][1].pop("valid"),
  lambda state: state["history"][1].update(cases=0),
  lambda state: state["history"][0].update(texts="a"),
]


def test_a_damaged_state_is_an_error_in_words(tmp_path):
  optimize(tmp_path / "run", 3)
  file = tmp_path / "run" / "state.json"
  whole = file.read_text()
  for damage in DAMAGES:
    if callable(damage):
      state = json.loads(whole)
      damage(state)
      file.write_text(json.dumps(state))
    else:
      file.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with pytest.raises(ValueError, match=r"state\.json was damaged: .*another --workdir"):
      optimize(tmp_path / "run", 3)
  file.write_text(whole)
  assert optimize(tmp_path / "run", 4)["test.final"] >= 0


def test_a_workdir_of_the_version_before_goes_on_with_its_account(tmp_path):
  optimize(tmp_path / "run", 3)
  account = json.loads((tmp_path / "run" / "account.json").read_text())
  for file in (tmp_path / "run").glob("answers.sqlite*"):  # it had none without models behind endpoints
    file.unlink()
  state = json.loads((tmp_path / "run" / "state.json").read_text())
  for engine in state["config"]["engines"].values():
    engine.pop("api_key_env", None)
  (tmp_path / "run" / "state.json").write_text(json.dumps(state))
  later = optimize(tmp_path / "run", 5)["account"]
  assert later["calls"] > account["calls"] > 0
  (tmp_path / "run" / "account.json").write_text("[")
  assert optimize(tmp_path / "run", 5)["account"]["calls"] > later["calls"]  # the book has it
  for file in (tmp_path / "run").glob("answers.sqlite*"):
    file.unlink()
  (tmp_path / "run" / "account.json").write_text("[")
  with pytest.raises(ValueError, match=r"account\.json was damaged"):
    optimize(tmp_path / "run", 5)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"budget": {"tokens": -5}}, r"config\.budget\.tokens is -5"),
    ({"budget": {"cost": float("nan")}}, r"config\.budget\.cost is nan"),
    ({"budget": {"cost": float("inf")}}, r"config\.budget\.cost is inf"),
    ({"budget": {"prompt_price": -1.0}}, r"config\.budget\.prompt_price is -1"),
    ({"budget": {"cost": 1.0}}, r"config\.budget\.cost needs"),
    ({"optimizer": {"batch_size": 0}}, r"config\.optimizer\.batch_size is 0"),
    ({"optimizer": {"steps": -1}}, r"config\.optimizer\.steps is -1"),
    ({"optimizer": {"lerning_rate": 1}}, "lerning_rate"),
    ({"rag": {"tokns": 1}}, "tokns"),
    ({"task": {"sizes": {"train": 3, "valid": 0, "test": 3}}}, r"config\.task\.sizes\.valid is 0"),
    ({"engines": {"critic": {"name": "m", "base_url": "http://127.0.0.1:9", "temprature": 1}}}, "temperature"),
    ({"engines": {"critic": {"name": "m", "base_url": "http://127.0.0.1:9", "api_key": "k"}}}, "api_key_env"),
    ({"engines": {"critic": {"name": "local:x", "top_p": 1}}}, "has no 'top_p'"),
    ({"engines": {"critic": {"name": ""}}}, r"config\.engines\.critic\.name"),
  ],
)
def test_settings_are_checked_before_anything_is_paid(change, message):
  made = config()
  for section, values in change.items():
    if section == "engines":
      values = {"critic": {**made[section]["critic"], **values["critic"]}}
    made[section] = {**made[section], **values}
  with pytest.raises(ValueError, match=message):
    prompt_optimization.build(made)


def test_cases_with_half_surrogate_pairs_are_asked_and_written(tmp_path, monkeypatch, behind_endpoints):
  file = tmp_path / "odd.json"
  file.write_text(json.dumps({"examples": [{"input": f"{i} \ud800", "target": f"{i}"} for i in range(30)]}))
  behind_endpoints["task"] |= {"path": str(file), "sizes": {"train": 10, "valid": 10, "test": 10}}
  behind_endpoints["optimizer"]["steps"] = 2
  asked = []
  complete = lambda self, content, system, **sampling: asked.append(content) or Completion("\udfff 7", 1, 1)
  monkeypatch.setattr(OpenAIEngine, "complete", complete)
  (tmp_path / "run").mkdir()
  prompt_optimization.run(prompt_optimization.build(behind_endpoints), tmp_path / "run")
  assert "".join(asked).encode()
  assert (tmp_path / "run" / "report.html").exists()
  file.write_text(json.dumps({"examples": [{"input": 5, "target": "x"}] * 30}))
  with pytest.raises(ValueError, match="int where text was expected"):
    prompt_optimization.build(behind_endpoints)


def test_what_cannot_be_written_is_said(tmp_path, behind_endpoints, monkeypatch):
  behind_endpoints["optimizer"]["steps"] = 1
  monkeypatch.setattr(OpenAIEngine, "complete", lambda *arguments, **options: Completion("x" * 10_000, 5, 5))
  opened = tg.EngineCache._open

  def open_full(self):
    opened(self)
    pages = self._file.execute("PRAGMA page_count").fetchone()[0]
    self._file.execute(f"PRAGMA max_page_count = {pages}")  # as a full disk

  monkeypatch.setattr(tg.EngineCache, "_open", open_full)
  (tmp_path / "run").mkdir()
  with pytest.raises(EngineError, match=r"full; not booked: \d+ answered calls, \d+ tokens"):
    prompt_optimization.run(prompt_optimization.build(behind_endpoints), tmp_path / "run")


def test_ways_to_remember_are_compared(tmp_path, capsys):
  found = prompt_optimization.compare({name: config(6, memory=name) for name in ("retrieval", "none")}, tmp_path)
  low, high = found["retrieval-none.interval"]
  assert low <= found["retrieval-none"] <= high
  assert found["retrieval-none"] == pytest.approx(found["retrieval.test"] - found["none.test"])
  assert "retrieval - none" in capsys.readouterr().out
  assert json.loads((tmp_path / "compare.json").read_text()) == found


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"memory": "all"}, "none, window, retrieval"),
    ({"task": {"name": "sudoku"}}, "rulebook, program, bbh, gsm8k"),
    ({"task": {"name": "rulebook", "calls": 3}}, r"config\.task\.calls is 3; one of 1, 2"),
    ({"task": {"name": "rulebook"}}, r"config\.task\.sizes is missing"),
    ({"task": get_config("bbh").to_dict()["task"]}, "--config.task.path=FILE"),
    ({"optimizer": {"batch_size": 0}}, r"config\.optimizer\.batch_size is 0; it must be a whole number, at least 1"),
    ({"budget": {"cost": -1.0}}, r"config\.budget\.cost is -1\.0; it must be a finite number, at least 0"),
  ],
)
def test_settings_are_checked(change, message):
  with pytest.raises(ValueError, match=message):
    prompt_optimization.build(config(**change))


@pytest.fixture
def behind_endpoints(tmp_path):
  made = get_config("bbh").to_dict()
  file = tmp_path / "task.json"
  file.write_text(json.dumps({"examples": [{"input": f"{i} + 1?", "target": str(i + 1)} for i in range(300)]}))
  made["task"]["path"] = str(file)
  for part in made["engines"].values():
    part |= {"name": "m", "base_url": "http://127.0.0.1:9/v1"}
  return made


def test_nothing_is_asked_again_that_was_paid_for(tmp_path, behind_endpoints, monkeypatch):
  asked, failures = [], iter([True, False, True])

  def complete(self, content, system_prompt, **sampling):
    is_optimizer = "<IMPROVED_VARIABLE>" in (system_prompt or "")
    if is_optimizer and next(failures, False):
      raise EngineError("gone")
    asked.append((content, system_prompt))
    text = f"<IMPROVED_VARIABLE>Version {len(asked)}.</IMPROVED_VARIABLE>" if is_optimizer else "Answer: 7"
    return Completion(text, 1, 1)

  monkeypatch.setattr(OpenAIEngine, "complete", complete)
  behind_endpoints["optimizer"]["steps"] = 3
  (tmp_path / "run").mkdir()
  run = lambda: prompt_optimization.run(prompt_optimization.build(behind_endpoints), tmp_path / "run")
  for _ in range(2):
    with pytest.raises(EngineError, match="gone"):
      run()
  report = run()
  assert len(asked) == len(set(asked)) == report["account"]["calls"]
  assert report["account"]["cached_calls"] > 0


def test_engines_behind_endpoints(behind_endpoints):
  made = behind_endpoints
  experiment = prompt_optimization.build(made)
  assert all(isinstance(engine, OpenAIEngine) for engine in experiment.engines.values())
  assert experiment.engines["critic"].context_tokens == 32_768
  assert {part: len(samples) for part, samples in experiment.task.parts.items()} == {
    "train": 100,
    "valid": 50,
    "test": 100,
  }
  texts = [sample.text for samples in experiment.task.parts.values() for sample in samples]
  assert len(set(texts)) == 250
  made["engines"]["model"]["name"], made["engines"]["model"]["base_url"] = "scripted", ""
  with pytest.raises(ValueError, match="no script"):
    prompt_optimization.build(made)


@pytest.mark.parametrize(
  ("answer", "target", "right"),
  [
    ("I count 3 and 5. Answer: 8", "8", True),
    ("Answer: 9\nNo. Answer: 8.", "8", True),
    ("the answer is (B)", "(B)", True),
    ("(A) or (B)? Answer: (A)", "(B)", False),
    ("It is 1,200.00 in all", "1200", True),
    ("8 of 9", "8", False),
    ("", "8", False),
    ("Answer: yes", "Yes", True),
  ],
)
def test_what_counts_as_right(answer, target, right):
  assert is_same_answer(answer, target) is right


def test_files_of_tasks(tmp_path, shared_data):
  section = {
    "name": "bbh",
    "path": str(shared_data / "textgrad_bbh" / "date_understanding.json"),
    "sizes": {"train": 3},
    "calls": 1,
  }
  (sample, *_) = make_task(section, 0).parts["train"]
  assert sample.target.startswith("(")
  section = {
    "name": "gsm8k",
    "path": str(next((shared_data / "textgrad_gsm8k").glob("*.jsonl"))),
    "sizes": {"test": 1000},
    "calls": 2,
  }
  task = make_task(section, 0)
  assert all(float(sample.target) is not None for sample in task.parts["test"])
  assert [text.file for text in task.texts] == ["notes.txt", "prompt.txt"]
  with pytest.raises(ValueError, match=r"1001.*more than the 1000"):
    make_task({**section, "sizes": {"test": 1001}}, 0)
  (tmp_path / "bad.jsonl").write_text('{"question": "x"}\n')
  with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
    make_task({**section, "path": str(tmp_path / "bad.jsonl")}, 0)
  (tmp_path / "bad.json").write_text("[]")
  with pytest.raises(ValueError, match=r"bad\.json is no file of BIG-Bench-Hard"):
    make_task({"name": "bbh", "path": str(tmp_path / "bad.json"), "sizes": {}, "calls": 1}, 0)
  with pytest.raises(FileNotFoundError, match="nowhere"):
    make_task({"name": "bbh", "path": "nowhere", "sizes": {}, "calls": 1}, 0)


def test_diff_marks_words_and_escapes_them():
  assert diff("be <b> brief", "be very <b> clear") == ("be<ins> very</ins> &lt;b&gt;<del> brief</del><ins> clear</ins>")


def launch(workdir, *flags, variant="", **options):
  config = f"--config={ROOT / 'configs' / 'gradient_rag.py'}{variant}"
  command = [sys.executable, ROOT / "launch" / "optimize_prompt.py", config]
  return subprocess.Popen(
    [*command, f"--workdir={workdir}", *flags], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
  )


class Answers(http.server.BaseHTTPRequestHandler):
  """A server that answers at once; `server.answered` counts."""

  def do_POST(self):
    self.rfile.read(int(self.headers["Content-Length"]))
    message = {"role": "assistant", "content": f"<IMPROVED_VARIABLE>{self.server.answered}</IMPROVED_VARIABLE>"}
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": usage}
    data = json.dumps(answer).encode()
    self.send_response(200)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    with self.server.lock:
      self.server.answered += 1
    self.wfile.write(data)

  def log_message(self, *arguments):
    pass


def test_after_kill_9_of_the_launcher_what_was_paid_is_booked(tmp_path, behind_endpoints):
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
    server.answered, server.lock = 0, threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = [f"--config.task.path={behind_endpoints['task']['path']}", "--config.task.sizes.valid=150"]
    for part in ("model", "critic", "optimizer"):
      flags += [f"--config.engines.{part}.name=m"]
      flags += [f"--config.engines.{part}.base_url=http://127.0.0.1:{server.server_port}/v1"]
    flags += ["--config.task.sizes.train=50", "--config.task.sizes.test=50"]
    process = launch(tmp_path / "run", *flags, variant=":bbh")
    while server.answered < 60 and process.poll() is None:  # before the first step has ended
      time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(0.2)  # for requests that were on their way
    server.shutdown()
  account = tg.Account()
  account.keep(tg.EngineCache(str(tmp_path / "run" / "answers.sqlite")))
  assert server.answered >= 60
  assert server.answered - 8 <= account.calls <= server.answered  # 8 at once: each may have been on its way
  assert account.tokens == 14 * account.calls


def test_the_launcher_says_that_the_budget_ended_the_run(tmp_path):
  flags = ["--config.budget.tokens=30000", "--config.task.n_topics=8", "--config.optimizer.steps=1000"]
  process = launch(tmp_path / "run", *flags)
  _, err = process.communicate(timeout=240)
  assert process.returncode == 1
  assert "the budget ended the run after" in err.splitlines()[-1]
  assert "Traceback" not in err
  assert {"report.html", "prompt.txt", "prompt_optimization.csv", "prompt_optimization.json"} <= {
    file.name for file in (tmp_path / "run").iterdir()
  }


def test_the_launcher_says_what_programs_can_reach(tmp_path):
  command = [
    sys.executable,
    ROOT / "launch" / "optimize_prompt.py",
    f"--config={ROOT / 'configs/gradient_rag.py'}:program",
  ]
  flags = ["--config.optimizer.steps=0", "--config.task.sizes.valid=1", "--config.task.sizes.test=1"]
  done = subprocess.run([*command, f"--workdir={tmp_path}", *flags], capture_output=True, text=True, timeout=240)
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("programs have limits of time and memory; they ") == 1


def test_the_launcher_goes_on_after_kill_9(tmp_path):
  flags = ["--config.optimizer.steps=30", "--config.task.n_topics=8"]
  process = launch(tmp_path / "run", *flags)
  state = tmp_path / "run" / "state.json"
  while not state.exists() and process.poll() is None:
    time.sleep(0.05)
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert json.loads(state.read_text())["step"] < 30
  process = launch(tmp_path / "run", *flags)
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  assert "report.html" in out
  assert len(json.loads((tmp_path / "run" / "prompt_optimization.json").read_text())["valid"]) == 31


def test_ctrl_c_at_the_launcher_keeps_what_was_done(tmp_path):
  flags = ["--config.optimizer.steps=4000", "--config.task.n_topics=8"]
  heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the background, shells have it ignored
  process = launch(tmp_path / "run", *flags, preexec_fn=heard)
  state = tmp_path / "run" / "state.json"
  while not (state.exists() and json.loads(state.read_text())["step"] > 3) and process.poll() is None:
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert "Traceback" not in err
  done = json.loads(state.read_text())["step"]
  assert 3 < done < 4000
  process = launch(tmp_path / "run", f"--config.optimizer.steps={done + 2}", *flags[1:])
  _, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  report = json.loads((tmp_path / "run" / "prompt_optimization.json").read_text())
  assert len(report["valid"]) == done + 3


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--compare=retrieval,al"], "error: config.memory is 'al'; one of none, window, retrieval"),
    (["--config.budget.tokens=9000"], "error: the call may bring the run to 9,"),
    (
      ["--config.engines.critic.name=m", "--config.engines.critic.base_url=http://127.0.0.1:9/v1"],
      "error: m at http://127.0.0.1:9/v1 could not be asked",
    ),
    (["--config.engines.critic.name=m"], "error: unknown engine 'm': give a model such as"),
  ],
)
def test_mistakes_at_the_launcher_are_one_line(tmp_path, flags, message):
  process = launch(tmp_path / "run", *flags)
  _, err = process.communicate(timeout=240)
  assert process.returncode == 1
  assert err.splitlines()[-1].startswith(message)
  assert "Traceback" not in err
