"""Tasks for prompt optimizers: cases with targets, split into three parts, and the test of a right answer."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.tasks.official import GSM8K, read_official
from selfrag_jax.tasks.programs import RomanNumerals, is_same_value, read_program, run_test
from selfrag_jax.tasks.router import ROUTER_ROLE, Router, read_questions, split_by_passage
from selfrag_jax.tasks.rulebook import EMPTY, ROLE, TOPIC_ROLE, Rulebook, RulebookPipeline

ENDING = "End with `Answer: ` and nothing but"
TAKE_NOTES = "Write down, in a few lines, what in this problem matters for its solution. Do not solve it."
Answer = Callable[[Any, str | None], str]  # a scripted model: content, system prompt -> text


class Sample(NamedTuple):
  """A case and its right answer."""

  text: str
  target: str


class Text(NamedTuple):
  """A text to improve: the file that it is written to, its role, and its initial version."""

  file: str
  role: str
  initial: str


@dataclasses.dataclass(frozen=True)
class PromptTask:
  """Texts to improve together, on cases in three parts.

  The texts are system prompts, one for each call of a model; a call sees the case and the answer of the call before it.
  If there is `run_program`, (program, case) -> result, the only text is a program. `scripted` has the models `model`,
  `critic` and `optimizer` of a task that needs no network.
  """

  texts: tuple[Text, ...]
  parts: Mapping[str, Sequence[Sample]]  # train, valid, test
  is_right: Callable[[str, str], bool]
  scripted: Mapping[str, Answer] | None = None
  run_program: Callable[[str, str], str] | None = None


def make_task(section: Mapping[str, Any], seed: int) -> PromptTask:
  """Make the task of a config: rulebook, router, program, bbh or gsm8k. Raises ValueError with the fix."""
  makers = {"rulebook": _rulebook, "router": _router, "program": _program, "bbh": _bbh, "gsm8k": _gsm8k}
  if section["name"] not in makers:
    raise ValueError(f"config.task.name = {section['name']!r}; one of {', '.join(makers)}")
  if section.get("calls", 1) not in (1, 2):
    raise ValueError(f"config.task.calls = {section['calls']}; a case is answered in 1 call or 2")
  return makers[section["name"]](section, seed)


def in_utf8(task: PromptTask) -> PromptTask:
  """Return a task with texts for files and requests in UTF-8: lone surrogates, which JSON allows, become `?`."""

  def plain(text: str) -> str:
    if not isinstance(text, str):
      raise ValueError(f"a case of the task holds {type(text).__name__} where text was expected")
    return text.encode("utf-8", "replace").decode()

  texts = tuple(text._replace(initial=plain(text.initial)) for text in task.texts)
  parts = {part: [Sample(plain(s.text), plain(s.target)) for s in found] for part, found in task.parts.items()}
  return dataclasses.replace(task, texts=texts, parts=parts)


def _rulebook(section: Mapping[str, Any], seed: int) -> PromptTask:
  options = {name: section[name] for name in ("n_topics", "n_actions", "noise", "capacity")}
  kind = Rulebook if section["calls"] == 1 else RulebookPipeline
  book, rng = kind(**options, seed=seed), np.random.default_rng([seed, 2])
  parts = {
    part: [Sample(case.text, case.action) for case in book.cases(rng, range(section["n_topics"]), n)]
    for part, n in section["sizes"].items()
  }
  scripted = {"model": book.answer, "critic": book.criticise, "optimizer": book.optimize}
  texts = (Text("topics.txt", TOPIC_ROLE, EMPTY), Text("prompt.txt", ROLE, EMPTY))[-section["calls"] :]
  return PromptTask(texts, parts, lambda answer, target: answer == target, scripted)


def _router(section: Mapping[str, Any], seed: int) -> PromptTask:
  """Make the task of keyword rules, from a folder in the layout of BEIR; no step shows a passage of the test."""
  router = Router(section["capacity"])
  found = read_questions(_path(section, "folder"))
  shown, held_out = ([Sample(q.text, q.label) for q in part] for part in split_by_passage(found, seed))
  parts = _split(shown, section, seed, "train", "valid") | _split(held_out, section, seed, "test")
  scripted = {"model": router.answer, "critic": router.criticise, "optimizer": router.optimize}
  texts = (Text("prompt.txt", ROUTER_ROLE, EMPTY),)
  return PromptTask(texts, parts, lambda answer, target: answer == target, scripted)


def _program(section: Mapping[str, Any], seed: int) -> PromptTask:
  """Make the task of a program with unit tests: Roman numerals with a scripted critic, or a file of `read_program`."""
  scripted: Mapping[str, Answer] | None = None
  if section["path"]:
    initial, tests = read_program(_file(section))
    parts = _split([Sample(*test) for test in tests], section, seed)
  else:
    task, rng = RomanNumerals(section["noise"], seed), np.random.default_rng([seed, 2])
    parts = {part: [Sample(*test) for test in task.tests(rng, n)] for part, n in section["sizes"].items()}
    initial = task.PROGRAM
    scripted = {"critic": task.criticise, "optimizer": task.optimize}
  texts = (Text("program.py", "program that has to pass its unit tests", initial),)
  return PromptTask(texts, parts, is_same_value, scripted, run_test)


def _bbh(section: Mapping[str, Any], seed: int) -> PromptTask:
  """BIG-Bench-Hard (Suzgun et al. 2022, arXiv 2210.09261): a JSON file of `examples` with `input` and `target`."""
  path = _file(section)
  try:
    found = [Sample(x["input"], x["target"]) for x in json.loads(path.read_text("utf-8"))["examples"]]
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(f"{path} is no file of BIG-Bench-Hard: {error!r}") from None
  return _stated_answers(found, "answers", f"Answer the question. {ENDING} the answer.", section, seed)


def _gsm8k(section: Mapping[str, Any], seed: int) -> PromptTask:
  """GSM8K (Cobbe et al. 2021, arXiv 2110.14168): lines of `question` and `answer`, whose result follows `####`."""
  found = [Sample(example.question, example.answers[0]) for example in read_official(_file(section), GSM8K)]
  return _stated_answers(found, "calculates", f"Solve the problem. {ENDING} the number.", section, seed)


def _stated_answers(
  found: Sequence[Sample], does: str, prompt: str, section: Mapping[str, Any], seed: int
) -> PromptTask:
  """Make a task of questions whose answer is stated at the end, after notes if the config has two calls."""
  first = Text("notes.txt", "system prompt of the model that takes notes before the answer", TAKE_NOTES)
  last = Text("prompt.txt", f"system prompt of the model that {does}", prompt)
  return PromptTask((first, last)[-section["calls"] :], _split(found, section, seed), is_same_answer)


def is_same_answer(answer: str, target: str) -> bool:
  """Tell whether an answer ends with the target: the last number or choice, or the text, after its last `Answer:`.

  Without `Answer:` the whole answer is searched.
  """
  stated = re.findall(r"answer(?: is)?[:\s]+([^\n]+)", answer, re.IGNORECASE)
  where = stated[-1] if stated else answer
  found = re.findall(r"\([A-Z]\)|-?\d[\d,]*\.?\d*", where)
  said = found[-1] if found else where
  return _plain(said) == _plain(target)


def _plain(text: str) -> str:
  text = text.strip().strip(".`*").replace(",", "").casefold()
  return re.sub(r"\.0+$", "", text)


def _file(section: Mapping[str, Any]) -> Path:
  path = _path(section, "file")
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist; give the file of {section['name']} by --config.task.path=FILE")
  return path


def _path(section: Mapping[str, Any], kind: str) -> Path:
  if not section["path"]:
    name = section["name"]
    raise ValueError(f"config.task.path is empty; give the {kind} of {name}: --config.task.path={kind.upper()}")
  return Path(section["path"])


def _split(found: Sequence[Sample], section: Mapping[str, Any], seed: int, *names: str) -> dict[str, list[Sample]]:
  """Deal shuffled cases to parts of the config's sizes, all parts or those named. Raises ValueError if too few."""
  sizes = {part: section["sizes"][part] for part in names or section["sizes"]}
  if sum(sizes.values()) > len(found):
    raise ValueError(f"config.task.sizes = {sizes} are more than the {len(found)} cases of {section['path']}")
  order = iter(np.random.default_rng(seed).permutation(len(found)))
  return {part: [found[i] for i in itertools.islice(order, n)] for part, n in sizes.items()}
