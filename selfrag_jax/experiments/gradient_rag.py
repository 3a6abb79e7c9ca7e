"""The experiment that optimizes prompts by textual gradients, with or without a memory of all critiques."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from tqdm import tqdm

import selfrag_jax.textgrad as tg
from selfrag_jax.experiments.base import write_report
from selfrag_jax.experiments.prompt_settings import SECTIONS
from selfrag_jax.experiments.prompt_state import NEW_FOLDER, begin, check_state, read_json, without_limits
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.reports import prompt_page
from selfrag_jax.settings import read_config, settings
from selfrag_jax.storage.atomic import is_local, write_bytes_atomic, write_json
from selfrag_jax.tasks.prompt_tasks import PromptTask, Sample, in_utf8, make_task
from selfrag_jax.tasks.rulebook import NOTES
from selfrag_jax.textgrad.engine import EngineLM, at_once

PROCESSES = 4  # unit tests that run at once
LOCAL = "local:"  # the prefix of an engine's name; the rest is a source of `load_model`
FIELDS = ("case", "notes")


@dataclasses.dataclass
class Experiment:
  """A task, the engines of its three roles (model, critic, optimizer), and the account that they share."""

  config: dict[str, Any]
  task: PromptTask
  engines: dict[str, EngineLM]
  account: tg.Account

  def texts(self, values: Sequence[str]) -> list[tg.Variable]:
    """Return the task's texts as variables with these values."""
    return [tg.Variable(v, role_description=t.role) for t, v in zip(self.task.texts, values, strict=True)]

  def respond(self, texts: Sequence[tg.Variable], samples: Sequence[Sample]) -> list[tg.Variable]:
    """Answer cases, several at once; the graph of each answer leads back to the texts."""
    calls = [functools.partial(self._respond, texts, sample) for sample in samples]
    return list(at_once(calls, PROCESSES if self.task.run_program else self.engines["model"].concurrency))

  def _respond(self, texts: Sequence[tg.Variable], sample: Sample) -> tg.Variable:
    case = tg.Variable(sample.text, requires_grad=False, role_description="case")
    if (run_program := self.task.run_program) is not None:
      test = tg.StringBasedFunction(lambda program, case: run_program(program.value, case.value), "runs a unit test")
      return test({"program": texts[0], "case": case}, "what the program returned")
    first, *others = texts
    answer = tg.LLMCall(self.engines["model"], first)(case, "notes" if others else "answer")
    for text in others:
      call = tg.FormattedLLMCall(self.engines["model"], "{case}" + NOTES + "{notes}", dict.fromkeys(FIELDS), text)
      answer = call({"case": case, "notes": answer}, "answer")
    return answer

  def scores(self, values: Sequence[str], part: str) -> np.ndarray:
    """Answer all cases of a part with texts of these values; return 1 for each right answer and 0 else, f64 [N]."""
    samples = self.task.parts[part]
    answers = self.respond(self.texts(values), samples)
    return np.array([self.task.is_right(a.value, s.target) for a, s in zip(answers, samples, strict=True)], np.float64)


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config and make its task and engines. Raises ValueError with the fix."""
  config = read_config(config, SECTIONS)
  for name in ("engines", "rag", "optimizer", "budget"):  # fill in the keys that the config leaves out
    config[name] = dataclasses.asdict(settings(SECTIONS[name], config[name], name))
  budget = config["budget"]
  if budget["cost"] and not (budget["prompt_price"] or budget["completion_price"]):
    raise ValueError("config.budget.cost needs config.budget.prompt_price or completion_price, of a million tokens")
  try:
    task = in_utf8(make_task(config["task"], config["seed"]))
  except RecursionError:
    raise ValueError(f"{config['task'].get('path')} is nested too deeply to be a file of cases") from None
  prices = {name: budget[name] for name in ("prompt_price", "completion_price")}
  account = tg.Account(budget["tokens"] or None, budget["cost"] or None, **prices)
  engines = {}
  for part, section in config["engines"].items():
    try:
      engines[part] = _engine(part, section, task, account)
    except TypeError as error:
      raise ValueError(f"config.engines.{part}: {error}") from None
  experiment = Experiment(config, task, engines, account)
  try:  # wrong settings are an error before anything is paid for
    _optimizer(experiment, experiment.texts([text.initial for text in task.texts]), tg.GradientStore())
  except TypeError as error:
    raise ValueError(f"config.optimizer or config.rag: {error}") from None
  return experiment


def _engine(part: str, section: Mapping[str, Any], task: PromptTask, account: tg.Account) -> EngineLM:
  options = {name: x for name, x in section.items() if name not in ("name", "base_url") and x not in (None, "")}
  name, base_url = section.get("name"), section.get("base_url")
  if not name:
    raise ValueError(f"config.engines.{part}.name is empty; name a model")
  if name == "scripted":
    if part == "model" and task.run_program is not None:
      return tg.CallableEngine([], "no model")  # programs run without a model
    if task.scripted is None:
      raise ValueError(f"config.engines.{part}.name is 'scripted', but this task has no script; name a model")
    return tg.CallableEngine(task.scripted[part], f"scripted {part}", account=account, concurrency=1)
  if name.startswith(LOCAL):
    options.pop("api_key_env", None)
    from selfrag_jax.experiments.chat_model import LocalEngine  # loads JAX

    return LocalEngine(name.removeprefix(LOCAL), account=account, **options)
  if base_url:
    return tg.OpenAIEngine(name, base_url, account=account, **options)
  return tg.get_engine(name, account=account, **options)


def dry_run(experiment: Experiment) -> None:
  """Print the number of cases in each part, the engines, the texts that are learned, and the first case."""
  task = experiment.task
  print(", ".join(f"{part} {len(samples):,} cases" for part, samples in task.parts.items()))
  print(", ".join(f"{part} {engine.model_string}" for part, engine in experiment.engines.items()))
  for text in task.texts:
    print(f"{text.role}: {text.initial!r}")
  print(f"first case: {task.parts['train'][0].text!r}")


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Optimize from the saved state, if any; write `prompt_optimization.json`, `.csv`, `report.html` and the texts.

  Raises BudgetError if the budget ended the run; the files are written then too, without the scores on test cases.
  """
  workdir = epath.Path(workdir)
  _open_account(experiment, workdir)
  try:
    return _run(experiment, workdir)
  finally:
    _save_account(experiment, workdir)


run = evaluate  # optimization and report are one: the report covers the whole run


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have, without the numbers of its config."""
  account = {f"account.{name}" for name in experiment.account.state()}
  return account | {"test.initial", "test.final", "test.difference", "seconds"}


def _open_account(experiment: Experiment, workdir: epath.Path) -> None:
  """Restore the account and the cache of paid answers, both from `answers.sqlite`; scripted engines cost nothing."""
  account, asked = experiment.account, [e for e in experiment.engines.values() if isinstance(e, tg.MeteredEngine)]
  paid = [engine for engine in asked if not isinstance(engine, tg.CallableEngine)]
  if is_local(workdir):
    book = tg.EngineCache(str(workdir / "answers.sqlite"), survives_power_loss=bool(paid))
    account.keep(book)
    if experiment.config["cache"]:
      for engine in paid:
        engine.cache = book
  summary = workdir / "account.json"
  if summary.exists() and not account.calls + account.cached_calls:  # of a folder without answers.sqlite
    try:
      account.restore(read_json(summary))
    except ValueError as error:
      raise ValueError(f"{summary} was damaged: {error}; what was spent before is in no other file") from None


def _save_account(experiment: Experiment, workdir: epath.Path) -> None:
  experiment.account.save()
  write_json(workdir / "account.json", experiment.account.state())


def _run(experiment: Experiment, workdir: epath.Path) -> dict[str, Any]:
  steps, ended, report = experiment.config["optimizer"]["steps"], None, None
  state = begin(experiment.config, experiment.task.texts)
  try:
    state |= _read_state(workdir, experiment)
    _improve(experiment, workdir, state)
    report = _report(experiment, state)
  except tg.BudgetError as error:
    ended = f"{error}; the budget ended the run after {state['step']} of {steps} steps"
  report = report or _report_without_test(experiment, state, str(ended))
  write_report(workdir, "prompt_optimization", report, _rows(state["history"]))
  for text in report["texts"]:
    write_bytes_atomic(workdir / text["file"], (text["final"] + "\n").encode())
  prompt_page.write(workdir, report, state["history"])
  if ended:
    raise tg.BudgetError(
      f"{ended}; {workdir / 'report.html'} and the texts have its results so far; run again with a larger budget"
    )
  low, high = report["test.difference_interval"]
  print(
    f"test {report['test.initial']:.3f} -> {report['test.final']:.3f}, {report['test.difference']:+.3f} "
    f"[{low:+.3f}, {high:+.3f}]; {report['account']['calls']:,} calls, {experiment.account.tokens:,} tokens, "
    f"{experiment.account.cost:.4f} spent; {workdir / 'report.html'}"
  )
  return report


def _improve(experiment: Experiment, workdir: epath.Path, state: dict[str, Any]) -> None:
  """Make the remaining steps; update `state` and its file after each."""
  texts, steps = experiment.texts(state["texts"]), experiment.config["optimizer"]["steps"]
  began, before = time.time(), state["seconds"]
  remember = experiment.config["memory"] != "none"
  store = tg.GradientStore(str(workdir / "gradients")) if remember else None
  try:
    optimizer = _optimizer(experiment, texts, store)
    optimizer.run = workdir.name
    optimizer.restore(state["optimizer"])
    if store is not None:
      store.forget(optimizer.run, state["step"])
    with tqdm(total=steps, initial=state["step"], unit="step", desc="optimizing") as bar:
      while state["step"] < steps:
        row = _step(experiment, optimizer, texts, state)
        done = {"step": state["step"] + 1, "texts": row["texts"], "optimizer": optimizer.state()}
        done |= {"history": [*state["history"], row], "seconds": before + time.time() - began}
        write_json(workdir / "state.json", {**state, **done})
        state |= done
        _save_account(experiment, workdir)
        bar.set_postfix(valid=row["valid"], tokens=f"{experiment.account.tokens:,}")
        bar.update()
  finally:
    if store is not None:
      store.close()


def compare(configs: Mapping[str, Mapping[str, Any]], workdir: epath.PathLike) -> dict[str, Any]:
  """Run each config in its own folder, and compare the test scores of the first with the others', paired by case.

  A run that its budget ends does not stop the others. It has no test scores, only its reason in `compare.json`; a
  BudgetError at the end names all such runs.
  """
  reports, ended = {}, {}
  for name, config in configs.items():
    (folder := epath.Path(workdir) / name).mkdir(parents=True, exist_ok=True)
    try:
      reports[name] = run(build(config), folder)
    except tg.BudgetError as error:
      ended[name] = str(error)
      print(f"{name}: ended early, {error}", flush=True)
  found: dict[str, Any] = {f"{name}.test": report["test.final"] for name, report in reports.items()}
  found |= {f"{name}.ended": reason for name, reason in ended.items()}
  (first, of_first), *others = reports.items() if reports else [("", {})]
  for name, report in others:
    a, b = np.array(of_first["test.right"]), np.array(report["test.right"])
    found[f"{first}-{name}"] = float((a - b).mean())
    found[f"{first}-{name}.interval"] = list(bootstrap_difference(a, b))
    low, high = found[f"{first}-{name}.interval"]
    print(f"{first} - {name}: {(a - b).mean():+.3f} [{low:+.3f}, {high:+.3f}] on {len(a)} test cases")
  write_json(target := epath.Path(workdir) / "compare.json", found)
  if ended:
    rest = f"{target} compares the others" if reports else f"{target} says why"
    raise tg.BudgetError(f"the budget ended {', '.join(ended)} early, {rest}; run again with a larger one to go on")
  return found


def _read_state(workdir: epath.Path, experiment: Experiment) -> dict[str, Any]:
  """Read the state of a run, or begin one. Raises ValueError for a damaged state or one of another config."""
  path = workdir / "state.json"
  begun = begin(experiment.config, experiment.task.texts)
  if not path.exists():
    begun["history"][0]["valid"] = float(experiment.scores(begun["texts"], "valid").mean())
    write_json(path, begun)
    return begun
  try:
    state = check_state(read_json(path), len(begun["texts"]))
  except ValueError as error:
    raise ValueError(f"{path} was damaged: {error}; {NEW_FOLDER}") from None
  if without_limits(state["config"]) != without_limits(begun["config"]):
    raise ValueError(f"{path} is of a run with another config; give another --workdir, or delete it")
  return {**state, "config": begun["config"]}


def _optimizer(experiment: Experiment, texts: Sequence[tg.Variable], store: tg.GradientStore | None) -> tg.TGD:
  own = ("steps", "batch_size", "reject_worse")
  section = {name: x for name, x in experiment.config["optimizer"].items() if name not in own}
  remembering: dict[str, Any] = {}
  if store is not None and experiment.config["memory"] != "none":
    rag = dict(experiment.config["rag"])
    rag = {**rag, "k": 0, "window": rag["k"]} if experiment.config["memory"] == "window" else rag
    remembering = {"use_gradient_rag": True, "gradient_store": store, "rag": tg.RagConfig(**rag)}
  tolerance = 0.0 if experiment.config["optimizer"]["reject_worse"] else float("inf")
  accept = tg.HeldOut(lambda: float(experiment.scores([text.value for text in texts], "valid").mean()), tolerance)
  return tg.TGD(texts, engine=experiment.engines["optimizer"], accept=accept, **section, **remembering)


def _step(
  experiment: Experiment, optimizer: tg.TGD, texts: Sequence[tg.Variable], state: Mapping[str, Any]
) -> dict[str, Any]:
  """Answer a batch, criticise the wrong answers and improve the texts together; return the row of the history."""
  batch = _batch(experiment, state["step"])
  optimizer.step_count = state["step"]
  optimizer.epoch = state["step"] * len(batch) // len(experiment.task.parts["train"])
  answers = experiment.respond(texts, batch)
  wrong = [(s, a) for s, a in zip(batch, answers, strict=True) if not experiment.task.is_right(a.value, s.target)]
  row: dict[str, Any] = {"step": state["step"], "right": len(batch) - len(wrong), "cases": len(batch)}
  optimizer.zero_grad()
  if wrong:
    tg.sum([_loss(sample, answer) for sample, answer in wrong]).backward(experiment.engines["critic"])
  if not all(text.gradients for text in texts):
    return {**row, "texts": state["texts"], "valid": state["history"][-1]["valid"], "accepted": None}
  critiques = [[gradient.get_value() for gradient in text.gradients] for text in texts]
  updates = optimizer.step()
  verdict = updates[0].verdict
  valid = verdict.after if verdict.accepted else verdict.before
  return {
    **row,
    "texts": [text.value for text in texts],
    "candidates": [update.candidate for update in updates],
    "valid": state["history"][-1]["valid"] if valid is None else valid,  # None: no candidate was tried
    "accepted": verdict.accepted,
    "delta": verdict.delta,
    "critiques": critiques,
    "past": [update.past.lines for update in updates],
    "tokens": experiment.account.tokens,
  }


def _loss(sample: Sample, answer: tg.Variable) -> tg.Variable:
  """Return the textual loss of a wrong answer."""
  verdict = f"{sample.text}\nThe right answer is {sample.target}, this was {answer.value!r}."
  loss = tg.StringBasedFunction(lambda answer: verdict, "compares an answer with the right one")({"answer": answer})
  loss.loss_context = {"target": sample.target, "score": 0.0}
  return loss


def _batch(experiment: Experiment, step: int) -> list[Sample]:
  """Return the cases of a step, a function of seed and step, so that a resumed run sees the same cases."""
  samples, n = experiment.task.parts["train"], experiment.config["optimizer"]["batch_size"]
  places = np.arange(step * n, (step + 1) * n)
  seed, size = experiment.config["seed"], len(samples)
  orders = {epoch: np.random.default_rng([seed, 3, epoch]).permutation(size).tolist() for epoch in places // size}
  return [samples[orders[place // size][place % size]] for place in places.tolist()]


def _report(experiment: Experiment, state: Mapping[str, Any]) -> dict[str, Any]:
  initial = [text.initial for text in experiment.task.texts]
  first, last = (experiment.scores(values, "test") for values in (initial, state["texts"]))
  return {
    **_report_without_test(experiment, state, None),
    "test.initial": float(first.mean()),
    "test.final": float(last.mean()),
    "test.final_interval": list(bootstrap_interval(last)),
    "test.difference": float((last - first).mean()),
    "test.difference_interval": list(bootstrap_difference(last, first)),
    "test.right": last.tolist(),
  }


def _report_without_test(experiment: Experiment, state: Mapping[str, Any], ended: str | None) -> dict[str, Any]:
  """Return the part of the report that takes no call of an engine; `ended`: why the run ended early, or None."""
  return {
    "config": state["config"],
    "ended": ended,
    "texts": [
      {**text._asdict(), "final": final} for text, final in zip(experiment.task.texts, state["texts"], strict=True)
    ],
    "valid": [row["valid"] for row in state["history"]],
    "account": experiment.account.state(),
    "seconds": round(state["seconds"], 1),
  }


def _rows(history: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
  yield (names := ["step", "right", "cases", "valid", "accepted", "delta", "tokens"])
  for row in history:
    yield [row.get(name) for name in names]
