"""TextGrad's tasks, read from local files: nothing is downloaded.

A task's files lie in `root=FOLDER`, or in the folder that the environment variable TEXTGRAD_DATA names. If a file is
missing, the error names it and its source.
"""

import csv
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from selfrag_jax.textgrad.autograd import StringBasedFunction
from selfrag_jax.textgrad.checks import check_text, closest, did_you_mean
from selfrag_jax.textgrad.engine import EngineLM
from selfrag_jax.textgrad.loss import MultiChoiceTestTime, MultiFieldTokenParsedEvaluation
from selfrag_jax.textgrad.variable import Variable

FOLDER = "TEXTGRAD_DATA"
SPLITS = ("train", "val", "test")
NUMBER_TASK = "Reason about the question step by step, then end with a line 'Answer: $VALUE' whose VALUE is a number."
IS_SAME = "Compares the number that a prediction ends with to the right one: 1 if they are equal, else 0."
JUDGE = """\
You see a question, its right answer, and the reasoning and final prediction of a model. Does the final prediction say \
the same as the right answer? Answer <ACCURACY> 1 </ACCURACY> for yes and <ACCURACY> 0 </ACCURACY> for no."""
CHOICE_JUDGE = """\
You see a multiple-choice question and an answer to it. Go through the reasoning as an expert of the field would, and \
name what is wrong or missing."""
CHOICES = """\
Choose the right one of four answers. Reason step by step, then end with a line 'Answer: $LETTER' whose LETTER is one \
of A, B, C and D.

{question}

A) {A}
B) {B}
C) {C}
D) {D}"""
MULTIPLE_CHOICE = "You choose the right one of several answers; reason step by step before you do."


class Dataset:
  """Samples by index, with an instruction for the model."""

  task_description = ""

  def __init__(self, samples: Sequence[Any]):
    """Keep samples."""
    self.samples = list(samples)

  def __getitem__(self, index: int) -> Any:
    """Return a sample, which is a tuple of texts."""
    return self.samples[index]

  def __len__(self) -> int:
    return len(self.samples)

  def get_task_description(self) -> str:
    """Return the instruction that a system prompt begins with."""
    return self.task_description


class DataLoader:
  """Batches of a dataset, each a tuple of columns; the last may be smaller."""

  def __init__(self, data: Any, batch_size: int = 32, shuffle: bool = True):
    """Take a dataset. Raises ValueError for a batch size below 1."""
    if batch_size < 1:
      raise ValueError(f"batch_size = {batch_size} must be at least 1")
    self.data, self.batch_size, self.shuffle = data, batch_size, shuffle

  def __iter__(self) -> Iterator[Any]:
    """Go once through the data; `shuffle` uses numpy's global generator, which TextGrad's scripts seed."""
    order = np.arange(len(self.data))
    if self.shuffle:
      np.random.shuffle(order)  # noqa: NPY002
    for start in range(0, len(order), self.batch_size):
      batch = [self.data[int(i)] for i in order[start : start + self.batch_size]]
      yield tuple(zip(*batch, strict=True)) if isinstance(batch[0], tuple) else np.array(batch)


class BigBenchHard(Dataset):
  """A task of BIG-Bench Hard: of its 250 examples 50 to train, 100 to validate, the rest to test."""

  task_description = NUMBER_TASK

  def __init__(self, task_name: str, root: str | None = None, split: str = "train"):
    """Read `TASK.json`."""
    path = _file(f"{task_name}.json", root, f"github.com/suzgunmirac/BIG-Bench-Hard, bbh/{task_name}.json")
    rows = _read(path, lambda file: [self._row(row) for row in json.load(file)["examples"]])
    super().__init__(rows[_slice(split, {"train": slice(50), "val": slice(50, 150), "test": slice(150, None)})])

  @staticmethod
  def _row(row: dict[str, str]) -> tuple[str, str]:
    return check_text(row["input"], "input"), check_text(row["target"], "target")


class GSM8K_DSPy(Dataset):  # TextGrad's name
  """Grade-school mathematics in DSPy's splits: 200 to train, 300 to validate, the official test."""

  task_description = NUMBER_TASK

  def __init__(self, root: str | None = None, split: str = "train"):
    """Read `train.jsonl` or `test.jsonl`."""
    part = _slice(split, {"train": slice(200), "val": slice(200, 500), "test": slice(None)})
    name = "test.jsonl" if split == "test" else "train.jsonl"
    source = f"github.com/openai/grade-school-math, grade_school_math/data/{name}"
    rows = _read(_file(name, root, source), lambda file: [self._row(json.loads(line)) for line in file if line.strip()])
    random.Random(0).shuffle(rows)  # DSPy's order
    super().__init__(rows[part])

  @staticmethod
  def _row(row: dict[str, str]) -> tuple[str, str]:
    _, answer = row["answer"].split("####")
    return check_text(row["question"], "question"), str(int(answer.replace(",", "")))


class _MultipleChoice(Dataset):
  """Questions with four choices; a sample has a test-time loss and a scorer of its own, too."""

  task_description = MULTIPLE_CHOICE

  def __init__(self, evaluation_api: EngineLM | str | None, rows: Sequence[tuple[str, Sequence[str], str]]):
    """Keep questions with their choices and the letters of the right ones."""
    super().__init__([(CHOICES.format(question=q, **dict(zip("ABCD", cs, strict=True))), a) for q, cs, a in rows])
    self.evaluation_api = evaluation_api

  def __getitem__(self, index: int) -> tuple[str, str, Callable[[Variable], Variable], Callable[[Variable], float]]:
    """Return question, letter, and two functions of an answer: its test-time loss, and whether it is right."""
    question, letter = self.samples[index]
    judge = MultiChoiceTestTime(CHOICE_JUDGE, engine=self.evaluation_api)
    return question, letter, lambda answer: judge(question, answer), lambda answer: _chosen(answer.value) == letter


class MMLUInstanceDataset(_MultipleChoice):
  """A subject of MMLU."""

  def __init__(self, evaluation_api: EngineLM | str | None, subset: str, root: str | None = None, split: str = "test"):
    """Read `SUBJECT_test.csv`, `SUBJECT_val.csv`, or `SUBJECT_dev.csv` for split="train"."""
    name = f"{subset}_{_slice(split, {'train': 'dev', 'validation': 'val', 'val': 'val', 'test': 'test'})}.csv"
    path = _file(name, root, "github.com/hendrycks/test, data.tar")
    super().__init__(evaluation_api, _read(path, lambda file: [self._row(row) for row in csv.reader(file)]))

  @staticmethod
  def _row(row: list[str]) -> tuple[str, list[str], str]:
    question, *choices, letter = row
    if len(choices) != 4 or letter not in ("A", "B", "C", "D"):
      raise ValueError(f"a question, four choices and a letter were expected, not {str(row)[:100]}")
    return question, choices, letter


class GPQAInstanceDataset(_MultipleChoice):
  """GPQA; the choices of a question are shuffled, always in the same way."""

  def __init__(self, evaluation_api: EngineLM | str | None, subset: str, root: str | None = None):
    """Read `gpqa_diamond.csv`, or another subset's file."""
    path = _file(f"{subset}.csv", root, "github.com/idavidrein/gpqa, dataset.zip")
    super().__init__(evaluation_api, _read(path, lambda file: [self._row(row) for row in csv.DictReader(file)]))

  @staticmethod
  def _row(row: dict[str, str]) -> tuple[str, list[str], str]:
    right = row["Correct Answer"].strip()
    choices = [*(row[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3)), right]
    random.Random(42).shuffle(choices)
    return row["Question"], choices, "ABCD"[choices.index(right)]


class LeetCodeHardEval(Dataset):
  """Hard problems of LeetCode; samples are id, prompt and tests."""

  task_description = "You will solve a hard problem of LeetCode: write a function that passes all tests."

  def __init__(self, root: str | None = None):
    """Read `leetcode-hard.jsonl`."""
    path = _file("leetcode-hard.jsonl", root, "github.com/vinid/data, leetcode_with_tests.jsonl")
    super().__init__(_read(path, lambda file: [self._row(json.loads(line)) for line in file if line.strip()]))

  @staticmethod
  def _row(row: dict[str, Any]) -> tuple[str, str, Any]:
    return check_text(row["task_id"], "task_id"), check_text(row["prompt"], "prompt"), row["test"]


def load_task(
  task_name: str, evaluation_api: EngineLM | str | None, root: str | None = None
) -> tuple[Dataset, Dataset, Dataset, Any]:
  """Return the train, val and test set of `BBH_TASK` or `GSM8K_DSPy`, and a scorer of predictions.

  The scorer is a function of `inputs=dict(prediction=..., ground_truth_answer=...)`; for tasks of BIG-Bench Hard other
  than counting, it is a judge of [question, answer, prediction] that asks `evaluation_api`. Raises ValueError for an
  unknown name, FileNotFoundError with the name and the source of a missing file.
  """
  if task_name == "GSM8K_DSPy":
    train, val, test = (GSM8K_DSPy(root, split) for split in SPLITS)
  elif task_name.startswith("BBH_"):
    train, val, test = (BigBenchHard(task_name.removeprefix("BBH_"), root, split) for split in SPLITS)
  else:
    guess = did_you_mean(closest(task_name, ["GSM8K_DSPy", "BBH_object_counting", "BBH_word_sorting"]))
    raise ValueError(f"unknown task {task_name!r}{guess}; there are GSM8K_DSPy and BBH_ with a task of BIG-Bench Hard")
  if task_name in ("GSM8K_DSPy", "BBH_object_counting"):
    return train, val, test, StringBasedFunction(string_based_equality_fn, IS_SAME)
  instruction = Variable(JUDGE, requires_grad=False, role_description="evaluation instruction for the task")
  roles = ["question of the task", "right answer", "reasoning and prediction of the model"]
  tags = ["<ACCURACY>", "</ACCURACY>"]
  return train, val, test, MultiFieldTokenParsedEvaluation(instruction, roles, evaluation_api, parse_tags=tags)


def load_instance_task(task_name: str, evaluation_api: EngineLM | str | None, root: str | None = None) -> Dataset:
  """Return `MMLU_SUBJECT`, `GPQA_SUBSET` or `LeetCodeHardEval`. Raises as `load_task`."""
  if task_name.startswith("MMLU_"):
    return MMLUInstanceDataset(evaluation_api, task_name.removeprefix("MMLU_"), root)
  if task_name.startswith("GPQA_"):
    return GPQAInstanceDataset(evaluation_api, task_name.lower(), root)
  if task_name == "LeetCodeHardEval":
    return LeetCodeHardEval(root)
  known = ["MMLU_machine_learning", "MMLU_college_physics", "GPQA_diamond", "LeetCodeHardEval"]
  guess = did_you_mean(closest(task_name, known))
  raise ValueError(f"unknown instance task {task_name!r}{guess}; there are MMLU_, GPQA_ and LeetCodeHardEval")


def parse_integer_answer(answer: str, only_first_line: bool = False) -> int:
  """Return the digits, up to a point, of the last word that has digits; 0 if no word has any. (DSPy's metric.)"""
  text = answer.strip().split("\n")[0] if only_first_line else answer
  words = [word for word in text.split() if re.search(r"\d", word)]
  return int("0" + "".join(re.findall("[0-9]", words[-1].split(".")[0]))) if words else 0


def string_based_equality_fn(prediction: Variable, ground_truth_answer: Variable) -> int:
  """Return 1 if two texts end with the same integer, else 0."""
  return int(parse_integer_answer(prediction.value) == parse_integer_answer(ground_truth_answer.value))


def _chosen(answer: str) -> str | None:
  found = re.search(r"(?i)answer\s*:\s*([A-D])", answer)
  return found[1] if found else None


def _slice(split: str, parts: dict[str, Any]) -> Any:
  if split not in parts:
    raise ValueError(f"unknown split {split!r}; use one of {', '.join(parts)}")
  return parts[split]


def _file(name: str, root: str | None, source: str) -> str:
  folder = os.environ.get(FOLDER) if root is None else root
  if not folder:
    raise FileNotFoundError(f"{name} is needed, from {source}: give its folder by root=, or set {FOLDER}")
  path = os.path.join(folder, name)
  if not os.path.isfile(path):
    raise FileNotFoundError(f"{path} is not there; it is a file of {source}")
  return path


def _read(path: str, parse: Callable[[Any], list[Any]]) -> list[Any]:
  try:
    with open(path, encoding="utf-8", newline="") as file:
      return parse(file)
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
    raise ValueError(f"{path} does not have the expected format: {type(error).__name__}: {error}") from None
