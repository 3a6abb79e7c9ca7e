"""Prompt optimization from the command line: it learns, resumes after a stop, and reports its steps."""

import itertools
import json

import jsonschema
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.experiments import gradient_rag
from selfrag_jax.reports.prompt_page import diff
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.tasks.programs import run_test
from selfrag_jax.tasks.rulebook import ROLE, TOPIC_ROLE, Rulebook
from selfrag_jax.textgrad.limits import BudgetError, EngineError


def test_the_prompt_learns_and_the_page_shows_it(tmp_path, capsys, optimize):
  report = optimize(tmp_path / "run", 25)
  jsonschema.validate(report, read_schema("gradient_rag"))
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


def test_keyword_rules_are_learned_from_real_questions(tmp_path, optimize, prompt_config, shared_data):
  task = {**prompt_config(variant="router")["task"], "path": str(shared_data / "ir_squad_dev_half")}
  report = optimize(tmp_path / "run", 15, "router", task=task)
  assert report["test.initial"] == 0
  assert report["test.final"] > 0.02
  assert '" -> ' in (tmp_path / "run" / "prompt.txt").read_text()


def test_two_prompts_of_a_pipeline_are_learned_together(tmp_path, optimize):
  report = optimize(tmp_path / "run", 40, "pipeline")
  assert report["test.initial"] == 0
  assert report["test.final"] > 0.7
  assert [text["file"] for text in report["texts"]] == ["topics.txt", "prompt.txt"]
  for text in report["texts"]:
    assert "For " in (tmp_path / "run" / text["file"]).read_text()
  page = (tmp_path / "run" / "report.html").read_text()
  assert page.count(f"<h4>{TOPIC_ROLE}</h4>") == page.count(f"<h4>{ROLE}</h4>") > 5


def test_a_program_learns_to_pass_its_unit_tests(tmp_path, optimize):
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
def test_a_run_that_was_stopped_goes_on_the_same(tmp_path, memory, optimize):
  whole = optimize(tmp_path / "whole", 12, memory=memory)
  optimize(tmp_path / "parts", 5, memory=memory)
  parts = optimize(tmp_path / "parts", 12, memory=memory)
  assert [parts[name] for name in ("texts", "valid", "test.right")] == [
    whole[name] for name in ("texts", "valid", "test.right")
  ]


@pytest.mark.parametrize("memory", ["window", "retrieval"])
def test_a_step_that_was_stopped_in_its_middle_goes_on_the_same(tmp_path, memory, monkeypatch, optimize, prompt_config):
  changes = {
    "memory": memory,
    "optimizer": {**prompt_config(12)["optimizer"], "gradient_memory": 2, "momentum_window": 2},
  }
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


def test_another_config_needs_another_folder(tmp_path, optimize):
  optimize(tmp_path / "run", 2)
  with pytest.raises(ValueError, match="another --workdir"):
    optimize(tmp_path / "run", 2, seed=1)


def test_worse_candidates_are_rejected_unless_told_otherwise(tmp_path, prompt_config):
  def curve(name, reject_worse):
    made = prompt_config(25)
    made["task"] |= {"noise": 0.7, "n_topics": 12}
    made["optimizer"]["reject_worse"] = reject_worse
    (tmp_path / name).mkdir()
    return gradient_rag.run(gradient_rag.build(made), tmp_path / name)["valid"]

  assert all(b >= a for a, b in itertools.pairwise(curve("strict", True)))
  assert any(b < a for a, b in itertools.pairwise(curve("loose", False)))


def test_the_budget_stops_the_run_and_a_larger_one_goes_on(tmp_path, monkeypatch, optimize, prompt_config):
  spent = []

  def complete(self, *arguments, **options):
    answer = ask(self, *arguments, **options)
    spent.append(answer.prompt_tokens + answer.completion_tokens)
    return answer

  ask = tg.CallableEngine.complete
  monkeypatch.setattr(tg.CallableEngine, "complete", complete)
  budget = {**prompt_config()["budget"], "tokens": 15_000}
  with pytest.raises(BudgetError, match="15,000"):
    optimize(tmp_path / "run", 25, budget=budget)
  assert 0 < json.loads((tmp_path / "run" / "state.json").read_text())["step"] < 25
  for _ in range(3):
    with pytest.raises(BudgetError, match="15,000"):
      optimize(tmp_path / "run", 25, budget=budget)
  assert 14_000 < sum(spent) <= 15_000
  assert optimize(tmp_path / "run", 25)["test.final"] > 0.9


@pytest.mark.parametrize("tokens", [500, 9_000, 24_000])
def test_a_run_that_its_budget_ends_writes_report_and_texts(tmp_path, tokens, optimize, prompt_config):
  budget = {**prompt_config()["budget"], "tokens": tokens}
  run = tmp_path / "run"
  with pytest.raises(BudgetError, match=r"budgeted are .*; the budget ended the run after \d+ of 25 steps; .*report"):
    optimize(run, 25, budget=budget)  # before the first step, in a step, in the test
  report = json.loads((run / "prompt_optimization.json").read_text())
  jsonschema.validate(report, read_schema("gradient_rag"))
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


def test_a_damaged_state_is_an_error_in_words(tmp_path, optimize):
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


def test_a_workdir_of_the_version_before_goes_on_with_its_account(tmp_path, optimize):
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


def test_ways_to_remember_are_compared(tmp_path, capsys, prompt_config):
  found = gradient_rag.compare({name: prompt_config(6, memory=name) for name in ("retrieval", "none")}, tmp_path)
  low, high = found["retrieval-none.interval"]
  assert low <= found["retrieval-none"] <= high
  assert found["retrieval-none"] == pytest.approx(found["retrieval.test"] - found["none.test"])
  assert "retrieval - none" in capsys.readouterr().out
  assert json.loads((tmp_path / "compare.json").read_text()) == found


def test_ways_whose_budget_ends_early_stop_no_others_and_are_named(tmp_path, capsys, prompt_config):
  budget = {**prompt_config()["budget"], "tokens": 9_000}
  configs = {name: prompt_config(6, memory=name) for name in ("retrieval", "window", "none")}
  configs["retrieval"]["budget"] = budget
  with pytest.raises(
    BudgetError, match=r"the budget ended retrieval early, .*compare\.json compares the others; run again"
  ):
    gradient_rag.compare(configs, tmp_path)
  found = json.loads((tmp_path / "compare.json").read_text())
  assert found.keys() == {"window.test", "none.test", "retrieval.ended", "window-none", "window-none.interval"}
  assert "9,000" in found["retrieval.ended"]
  out = capsys.readouterr().out
  assert "retrieval: ended early, " in out
  assert "window - none: " in out
  configs["window"]["budget"] = configs["none"]["budget"] = {**budget, "tokens": 500}
  with pytest.raises(BudgetError, match=r"the budget ended retrieval, window, none early, .*compare\.json says why"):
    gradient_rag.compare(configs, tmp_path / "all")
  assert json.loads((tmp_path / "all" / "compare.json").read_text()).keys() == {f"{name}.ended" for name in configs}
  configs = {name: prompt_config(6, memory=name) for name in configs}
  assert gradient_rag.compare(configs, tmp_path).keys() > {"retrieval-window", "retrieval-none"}


def test_diff_marks_words_and_escapes_them():
  assert diff("be <b> brief", "be very <b> clear") == ("be<ins> very</ins> &lt;b&gt;<del> brief</del><ins> clear</ins>")
