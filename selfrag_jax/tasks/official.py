"""Readers of the official files of question answering, mathematics, multiple choice and chat, strict about formats.

A file is a stream of records with the place of each, and a record is parsed into an example. Documents of examples are
`{"title", "content"}`, as a message of retrieved documents holds them.
"""

import csv
import functools
import importlib
import io
import re
import reprlib
import string
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Generic, NamedTuple, TypeVar

from etils import epath

from selfrag_jax.retrieval.document import Document
from selfrag_jax.storage.binary import open_binary
from selfrag_jax.storage.json_lines import (
  get_field,
  parse_json,
  read_json,
  read_json_object,
  read_jsonl,
  refuse_pointer,
)
from selfrag_jax.tasks.datasets import accepted_answers, question_id, supporting_passages

NUMBER = re.compile(r"(?<!\w)-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
Records = Iterator[tuple[str, Any]]  # a place, such as "line 3", and what stands there


class Example(NamedTuple):
  """A question with what its file says about it.

  `answers` are all accepted ones, the official one first: a letter where there are choices, none if the question has no
  answer. `gold` are the documents from which it can be answered; one without content is named by its title alone.
  """

  id: str
  question: str
  answers: tuple[str, ...]
  choices: tuple[str, ...] = ()
  solution: str = ""
  context: tuple[Mapping[str, str], ...] = ()
  gold: tuple[Mapping[str, str], ...] = ()


class Chat(NamedTuple):
  """A conversation that has no right answer."""

  id: str
  messages: tuple[Mapping[str, str], ...]


E = TypeVar("E", Example, Chat)


class Format(NamedTuple, Generic[E]):
  """How a file is read: its records, the parser of one, and in words what a record has."""

  records: Callable[[epath.Path], Records]
  parse: Callable[[Any], E]
  expected: str


def corpus_of(examples: Iterable[Mapping[str, Any]]) -> list[Document]:
  """Return all passages that examples hold, each once: first those beside the questions, then the gold ones."""
  examples = list(examples)
  passages = (passage for field in ("context", "gold") for example in examples for passage in example.get(field, ()))
  texts = dict.fromkeys((passage["title"], passage.get("content", "")) for passage in passages)
  whole = [text for text in texts if text[1]]  # a gold passage may be named by its title alone
  return [Document(str(number), *text) for number, text in enumerate(whole)]


def read_official(path: epath.PathLike, layout: Format[E]) -> Iterator[E]:
  """Yield the examples of a file. One without an id of its own gets the name of the file and its place.

  Raises ValueError, with the file, the place and the field, for a record of another format.
  """
  path = epath.Path(path)
  for place, record in layout.records(path):
    try:
      example = layout.parse(record)
    except ValueError as error:
      raise ValueError(f"{path}, {place}: {layout.expected}; here {error}") from None
    yield example if example.id else example._replace(id=f"{path.stem} {place}")


def final_number(text: str) -> Decimal | None:
  """Return the number after the last `####`, or the last number of a text without it; None if there is none."""
  _, mark, result = text.rpartition("####")
  found = NUMBER.findall(result)
  return Decimal(found[0 if mark else -1].replace(",", "")) if found else None


def _json_records(path: epath.Path) -> Records:
  if path.suffix != ".json":
    return ((f"line {number}", record) for number, record in read_jsonl(path))
  records = read_json(path, "a list of records")
  if not isinstance(records, list):
    raise ValueError(f"{path}: a list of records was expected, not {type(records).__name__}")
  return ((f"record {number}", record) for number, record in enumerate(records))


def _csv_rows(path: epath.Path, delimiter: str = ",") -> Iterator[tuple[str, list[str]]]:
  refuse_pointer(path)
  try:
    rows = csv.reader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""), delimiter=delimiter)
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: {error}; save the file as UTF-8") from None
  try:
    yield from ((f"line {rows.line_num}", row) for row in rows if row)
  except csv.Error as error:
    raise ValueError(f"{path}, line {rows.line_num}: {error}") from None


def _tsv_records(path: epath.Path) -> Records:
  rows = _csv_rows(path, "\t")
  _, headings = next(rows, ("", []))
  for place, row in rows:
    if len(row) != len(headings):
      raise ValueError(f"{path}, {place}: {len(row)} columns stand below {len(headings)} headings")
    yield place, dict(zip(headings, row, strict=True))


def _list(source: Any, key: str, where: str) -> list[Any]:
  try:
    return get_field(source, key, list)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None


def _texts(source: Any, key: str) -> tuple[str, ...]:
  """Return a list of texts without those that come twice."""
  texts = get_field(source, key, list)
  if not all(isinstance(text, str) for text in texts):
    raise ValueError(f"{key} is {reprlib.repr(texts)}, it must be a list of texts")
  return tuple(dict.fromkeys(texts))


def _at_least_one(answers: Sequence[str], key: str) -> tuple[str, ...]:
  if not (found := tuple(answer for answer in answers if answer.strip())):
    raise ValueError(f"{key} is empty; a question that can be answered has an answer")
  return found


def _squad_records(version: str, path: epath.Path) -> Records:
  file = read_json_object(path, f"version and data of SQuAD {version}")
  if file.get("version") != version:
    raise ValueError(f"{path}: version is {file.get('version')!r}, this data set has {version!r}")
  for a, article in enumerate(_list(file, "data", str(path))):
    for p, paragraph in enumerate(_list(article, "paragraphs", f"{path}, article {a}")):
      for q, question in enumerate(_list(paragraph, "qas", f"{path}, article {a}, paragraph {p}")):
        yield f"article {a}, paragraph {p}, question {q}", (article, paragraph, question)


def _squad(record: tuple[Any, Any, Any]) -> Example:
  article, paragraph, question = record
  id, text = get_field(question, "id", str), get_field(question, "question", str)
  is_impossible = "is_impossible" in question and get_field(question, "is_impossible", bool)  # not in SQuAD 1.1
  answers = tuple(dict.fromkeys(get_field(answer, "text", str) for answer in get_field(question, "answers", list)))
  if is_impossible and answers:
    raise ValueError(f"answers is {reprlib.repr(answers)}, but is_impossible is true")
  answers = answers if is_impossible else _at_least_one(answers, "answers")
  title = urllib.parse.unquote(get_field(article, "title", str)).replace("_", " ")  # it is the end of an address
  document = {"title": title, "content": get_field(paragraph, "context", str)}
  return Example(id, text, answers, context=(document,), gold=(document,))


def _hotpotqa(record: Any) -> Example:
  get_field(record, "answer", str)
  for fact in get_field(record, "supporting_facts", list):
    if not isinstance(fact, list) or [type(part) for part in fact] != [str, int]:
      raise ValueError(f"supporting_facts has {reprlib.repr(fact)}, not a title and the number of a sentence")
  context = tuple(map(_sentences, get_field(record, "context", list)))
  found = {document["title"]: document for document in context}
  id, answers = question_id(record), _at_least_one(accepted_answers(record), "answer")
  titles = dict.fromkeys(title for title, _ in supporting_passages(record))
  # in the fullwiki setting, the context is what a retriever found, and may lack gold passages
  gold = tuple(found.get(title, {"title": title}) for title in titles)
  return Example(id, record["question"], answers, context=context, gold=gold)


def _sentences(passage: Any) -> dict[str, str]:
  if (
    not isinstance(passage, list)
    or [type(part) for part in passage] != [str, list]
    or not all(isinstance(sentence, str) for sentence in passage[1])
  ):
    raise ValueError(f"context has {reprlib.repr(passage)}, not a title and a list of sentences")
  # HotpotQA's sentences begin with the space between them, those of 2WikiMultihopQA do not
  return {"title": passage[0], "content": " ".join(" ".join(passage[1]).split())}


def _musique(record: Any) -> Example:
  get_field(record, "answer", str)
  _texts(record, "answer_aliases")
  id, answers, gold = question_id(record), accepted_answers(record), ()
  paragraphs = {get_field(each, "idx", int): _paragraph(each) for each in get_field(record, "paragraphs", list)}
  steps = get_field(record, "question_decomposition", list)
  if get_field(record, "answerable", bool):  # else the paragraph of a step has been taken away
    answers = _at_least_one(answers, "answer")
    for step in steps:
      if (idx := get_field(step, "paragraph_support_idx", int)) not in paragraphs:
        raise ValueError(f"paragraph_support_idx is {idx}, it must be the idx of one of the paragraphs")
    gold = tuple({"title": title, "content": text} for title, text in dict.fromkeys(supporting_passages(record)))
  return Example(id, record["question"], answers, context=tuple(paragraphs.values()), gold=gold)


def _paragraph(paragraph: Any) -> dict[str, str]:
  return {"title": get_field(paragraph, "title", str), "content": get_field(paragraph, "paragraph_text", str)}


def _nq_open(record: Any) -> Example:
  return Example("", get_field(record, "question", str), _at_least_one(_texts(record, "answer"), "answer"))


def _triviaqa_records(path: epath.Path) -> Records:
  records = _list(read_json_object(path, "the Data of TriviaQA"), "Data", str(path))
  return ((f"record {number}", record) for number, record in enumerate(records))


def _triviaqa(record: Any) -> Example:
  answer = get_field(record, "Answer", dict)
  answers = dict.fromkeys([get_field(answer, "Value", str), *_texts(answer, "Aliases")])
  id, question = get_field(record, "QuestionId", str), get_field(record, "Question", str)
  return Example(id, question, _at_least_one(list(answers), "Value"))


def _popqa(record: Any) -> Example:
  id, question = get_field(record, "id", str), get_field(record, "question", str)
  written = get_field(record, "possible_answers", str)
  try:
    answers = _texts({"possible_answers": parse_json(written)}, "possible_answers")
  except ValueError:
    raise ValueError(f"possible_answers is {reprlib.repr(written)}, it must be a list of texts in JSON") from None
  return Example(id, question, _at_least_one(answers, "possible_answers"))


def _gsm8k(record: Any) -> Example:
  question, solution = get_field(record, "question", str), get_field(record, "answer", str)
  if "####" not in solution or (number := final_number(solution)) is None:
    raise ValueError(f"answer ends with {solution[-40:]!r}, without a number after ####")
  return Example("", question, (f"{number:f}",), solution=solution)


def _mmlu(row: list[str]) -> Example:
  if len(row) != 6:
    raise ValueError(f"{reprlib.repr(row)} has {len(row)} columns")
  question, *choices, letter = row
  if letter not in tuple("ABCD"):
    raise ValueError(f"the last column is {reprlib.repr(letter)}, it must be A, B, C or D")
  return Example("", question, (letter,), tuple(choices))


def _arc(record: Any) -> Example:
  asked = get_field(record, "question", dict)
  choices = get_field(asked, "choices", list)
  labels, key = [get_field(choice, "label", str) for choice in choices], get_field(record, "answerKey", str)
  if labels.count(key) != 1 or len(labels) > len(string.ascii_uppercase):
    raise ValueError(f"answerKey is {reprlib.repr(key)}, it must be one of the labels {reprlib.repr(labels)}")
  letter = string.ascii_uppercase[labels.index(key)]  # some exams number their choices
  texts = tuple(get_field(choice, "text", str) for choice in choices)
  return Example(get_field(record, "id", str), get_field(asked, "stem", str), (letter,), texts)


def _chat_records(path: epath.Path) -> Records:
  if path.suffix != ".parquet":
    yield from _json_records(path)
    return
  try:
    parquet = importlib.import_module("pyarrow.parquet")
  except ImportError:
    raise ImportError(f"{path} needs the package pyarrow: pip install 'selfrag_jax[parquet]'") from None
  refuse_pointer(path)
  number = 0
  with open_binary(path) as file:
    try:
      for batch in parquet.ParquetFile(file).iter_batches(1024):
        for record in batch.to_pylist():
          yield f"record {number}", record
          number += 1
    except ValueError as error:  # Arrow's error for other content is one
      raise ValueError(f"{path}: {error}") from None


def _chat(record: Any) -> Chat:
  messages = tuple(
    {"role": get_field(message, "role", str), "content": get_field(message, "content", str)}
    for message in get_field(record, "messages", list)
  )
  roles = [message["role"] for message in messages]
  turns = roles[1:] if roles[:1] == ["system"] else roles
  if len(turns) < 2 or any(role != ("user", "assistant")[turn % 2] for turn, role in enumerate(turns)):
    raise ValueError(f"messages has the roles {reprlib.repr(roles)}, it must be user and assistant in turn")
  return Chat("", messages)


_SQUAD_QUESTION = "SQuAD has articles with title, paragraphs with context, and questions with id, question and answers"

SQUAD = Format(functools.partial(_squad_records, "1.1"), _squad, _SQUAD_QUESTION)
SQUAD_V2 = Format(functools.partial(_squad_records, "v2.0"), _squad, _SQUAD_QUESTION)
HOTPOTQA = Format(
  _json_records, _hotpotqa, "a record of HotpotQA has _id, question, answer, supporting_facts and context"
)
MUSIQUE = Format(
  _json_records,
  _musique,
  "a record of MuSiQue has id, question, answer, answer_aliases, answerable, paragraphs and question_decomposition",
)
NQ_OPEN = Format(_json_records, _nq_open, "a line of NQ-open has a question and a list of texts as answer")
TRIVIAQA = Format(_triviaqa_records, _triviaqa, "a record of TriviaQA has QuestionId, Question and Answer")
POPQA = Format(_tsv_records, _popqa, "PopQA has the columns id, question and possible_answers")
GSM8K = Format(_json_records, _gsm8k, "a line of GSM8K has a question, and an answer with a number after ####")
MMLU = Format(_csv_rows, _mmlu, "a row of MMLU has a question, four choices and a letter, and there are no headings")
ARC = Format(_json_records, _arc, "a line of ARC has id, question with stem and choices, and answerKey")
SMOLTALK = Format(_chat_records, _chat, "a conversation of SmolTalk has messages with role and content")
