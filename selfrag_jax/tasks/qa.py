"""Tasks of official data sets by their names: questions scored by their accepted answers, and chat.

`evaluate` is the exact match of a data set, `reward` the softer score where there is one: the F1 of the words.
"""

import re
import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from selfrag_jax.checked import suggestion
from selfrag_jax.metrics.answers import exact_match, hotpot_f1, squad_f1
from selfrag_jax.storage.hub import locate_data
from selfrag_jax.tasks import official
from selfrag_jax.tasks.official import Chat, Example, final_number, read_official
from selfrag_jax.tasks.task import Conversation, Score, Task


class Kind(NamedTuple):
  """How examples are asked, and how completions are scored; without scores there is no right answer."""

  to_conversation: Callable[[Any], Conversation]
  evaluate: Score | None = None
  reward: Score | None = None


def _asked(example: Example, prompt: str, reply: str) -> Conversation:
  messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
  return {"messages": messages, **example._asdict()}


def _ask_briefly(example: Example) -> Conversation:
  """Ask for a short answer. The reply to a question that has no answer is empty, as SQuAD 2.0 scores it."""
  return _asked(example, f"{example.question}\n\nAnswer in a few words.", example.answers[0] if example.answers else "")


def _ask_letter(example: Example) -> Conversation:
  lettered = zip(string.ascii_uppercase, example.choices, strict=False)
  listed = "\n".join(f"{letter}. {choice}" for letter, choice in lettered)
  prompt = f"{example.question}\n\n{listed}\n\nAnswer with the letter of the right choice."
  return _asked(example, prompt, example.answers[0])


def _ask_number(example: Example) -> Conversation:
  return _asked(example, f"{example.question}\n\nEnd with #### and the number.", example.solution)


def _chat(example: Chat) -> Conversation:
  return {"messages": [dict(message) for message in example.messages], "id": example.id}


def chosen_letter(completion: str, choices: int) -> str | None:
  """Return the letter after the last "answer is", or else the one that a completion begins with, such as `(B)`.

  A letter that begins a sentence ("A dog") chooses nothing. None if there is no such letter among the choices.
  """
  letter = f"([A-{string.ascii_uppercase[choices - 1]}])"
  if stated := re.findall(rf"(?i:answer)(?: is)?[:\s(*]+{letter}\b", completion):
    return stated[-1]
  begins = re.match(rf"[\s(*]*{letter}(?:[).:*]|\s*$)", completion)
  return begins[1] if begins else None


def _is_chosen(conversation: Conversation, completion: str) -> float:
  return float(chosen_letter(completion, len(conversation["choices"])) == conversation["answers"][0])


def _is_number(conversation: Conversation, completion: str) -> float:
  return float(final_number(completion) == final_number(conversation["answers"][0]))


def _is_answer(conversation: Conversation, completion: str) -> float:
  return exact_match(completion, conversation["answers"])


# the two F1 rules differ for yes, no and empty answers; MuSiQue's evaluation takes SQuAD's
BRIEF = Kind(_ask_briefly, _is_answer, lambda conversation, text: squad_f1(text, conversation["answers"]))
BRIEF_HOTPOT = Kind(_ask_briefly, _is_answer, lambda conversation, text: hotpot_f1(text, conversation["answers"]))
LETTER, NUMBER, CHAT = Kind(_ask_letter, _is_chosen), Kind(_ask_number, _is_number), Kind(_chat)


class DataSet(NamedTuple):
  """The format of a data set, the kind of its questions, and for each split the patterns of its official files.

  The first pattern with a file counts, and all its files belong to the split.
  """

  layout: official.Format
  kind: Kind
  splits: Mapping[str, list[str]]


def _files_of(**patterns: str) -> Mapping[str, list[str]]:
  return {split: names.split() for split, names in patterns.items()}


DATA_SETS = {
  "squad": DataSet(official.SQUAD, BRIEF, _files_of(train="train-v1.1.json", validation="dev-v1.1.json")),
  "squad_v2": DataSet(official.SQUAD_V2, BRIEF, _files_of(train="train-v2.0.json", validation="dev-v2.0.json")),
  "hotpotqa": DataSet(
    official.HOTPOTQA,
    BRIEF_HOTPOT,
    _files_of(train="hotpot_train_v1.1.json", validation="hotpot_dev_distractor_v1.json"),
  ),
  "hotpotqa_fullwiki": DataSet(
    official.HOTPOTQA, BRIEF_HOTPOT, _files_of(train="hotpot_train_v1.1.json", validation="hotpot_dev_fullwiki_v1.json")
  ),
  "2wikimultihopqa": DataSet(official.HOTPOTQA, BRIEF_HOTPOT, _files_of(train="train.json", validation="dev.json")),
  "musique": DataSet(
    official.MUSIQUE, BRIEF, _files_of(train="musique_ans_v1.0_train.jsonl", validation="musique_ans_v1.0_dev.jsonl")
  ),
  "musique_full": DataSet(
    official.MUSIQUE, BRIEF, _files_of(train="musique_full_v1.0_train.jsonl", validation="musique_full_v1.0_dev.jsonl")
  ),
  "nq_open": DataSet(official.NQ_OPEN, BRIEF, _files_of(train="NQ-open.train.jsonl", validation="NQ-open.dev.jsonl")),
  "triviaqa": DataSet(
    official.TRIVIAQA, BRIEF, _files_of(train="unfiltered-web-train.json", validation="unfiltered-web-dev.json")
  ),
  "triviaqa_rc": DataSet(
    official.TRIVIAQA, BRIEF, _files_of(train="wikipedia-train.json", validation="wikipedia-dev.json")
  ),
  "popqa": DataSet(official.POPQA, BRIEF, _files_of(test="popQA.tsv test.tsv")),
  "gsm8k": DataSet(official.GSM8K, NUMBER, _files_of(train="train.jsonl", test="test.jsonl")),
  "mmlu": DataSet(
    official.MMLU,
    LETTER,
    _files_of(train="auxiliary_train/*.csv", dev="dev/*_dev.csv", validation="val/*_val.csv", test="test/*_test.csv"),
  ),
  "arc_easy": DataSet(
    official.ARC,
    LETTER,
    _files_of(train="ARC-Easy-Train.jsonl", validation="ARC-Easy-Dev.jsonl", test="ARC-Easy-Test.jsonl"),
  ),
  "arc_challenge": DataSet(
    official.ARC,
    LETTER,
    _files_of(train="ARC-Challenge-Train.jsonl", validation="ARC-Challenge-Dev.jsonl", test="ARC-Challenge-Test.jsonl"),
  ),
  "smoltalk": DataSet(
    official.SMOLTALK, CHAT, _files_of(train="train.jsonl train-*.parquet", test="test.jsonl test-*.parquet")
  ),
}


def load_task(name: str, path: epath.PathLike, *, split: str) -> Task:
  """Load a split of a data set of `DATA_SETS` from a file, or from a folder in which files have their official names.

  The folder may be the name of a repository on the Hugging Face hub, as `storage.hub.locate_data` reads it.

  Conversations have the fields of an `Example`, those of chat an id alone. No split is ever taken for another: a folder
  without the files of a split is an error, and so is a file with the official name of another split.

  Raises ValueError for an unknown name or split, a file of another format and one without examples; FileNotFoundError,
  with the names that were looked for, if there are no files.
  """
  if name not in DATA_SETS:
    raise ValueError(f"there is no data set {name!r}: {suggestion(name, DATA_SETS)}; known are {', '.join(DATA_SETS)}")
  layout, kind, splits = DATA_SETS[name]
  if split not in splits:
    raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")
  files = _files(locate_data(path, splits[split]), name, split)
  examples = [example for file in files for example in read_official(file, layout)]
  if not examples:
    raise ValueError(f"{path} holds no examples of {name}")
  return Task(f"{name} ({split})", examples, *kind)


def _files(path: epath.Path, name: str, split: str) -> list[epath.Path]:
  splits = DATA_SETS[name].splits
  if not path.is_dir():
    others = [other for other in splits if any(path.match(pattern) for pattern in splits[other])]
    if others and split not in others:
      raise ValueError(f"{path} has the name of the {others[0]} split of {name}, but split is {split!r}")
    if not path.exists():
      raise FileNotFoundError(f"{path} does not exist; give a file of {name}, or a folder with {splits[split][0]}")
    return [path]
  for pattern in splits[split]:
    if found := sorted(path.glob(pattern)):
      return found
  raise FileNotFoundError(
    f"{path} has no {split} split of {name}: there is no {' and no '.join(splits[split])}; "
    "no other split is taken in its place"
  )
