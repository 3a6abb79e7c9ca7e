"""A reader of questions with supporting passages: HotpotQA and MuSiQue beside a corpus in the layout of BEIR.

Files are read strictly: content without the official fields raises an error with the file and the line or record.
"""

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from selfrag_jax.retrieval.beir import read_corpus, read_qrels
from selfrag_jax.storage.hub import locate_data
from selfrag_jax.storage.json_lines import read_json

FILES = {
  "corpus.jsonl": "lines of {_id, title, text}",
  "qrels.tsv": "query-id, corpus-id, score",
  "questions.json": "a list of records with the official fields of HotpotQA or MuSiQue",
}


class Passage(NamedTuple):
  """A passage of the corpus."""

  id: str
  title: str
  text: str


class Question(NamedTuple):
  """A question, the accepted answers (the first is the official one) and its gold passages in the order of the hops."""

  id: str
  text: str
  answers: tuple[str, ...]
  gold: tuple[int, ...]


class QAFolder(NamedTuple):
  """A corpus and the questions over it; `unanswered` questions had no answer and were left out."""

  passages: list[Passage]
  questions: list[Question]
  unanswered: int


def read_qa_folder(path: epath.PathLike) -> QAFolder:
  """Read the corpus and the questions of a folder, or of a name on the hub, with the files of `FILES`.

  A question's gold passages are those of qrels.tsv with a positive score, in the order of the hops. MuSiQue's
  decomposition has this order; HotpotQA's files do not, so passages that the question names come first, then the others
  in the order of the supporting facts. Questions without an answer, or marked as not answerable, are left out and
  counted.

  Raises FileNotFoundError for a missing folder or file. Raises ValueError for an empty corpus, ids that occur twice,
  missing fields, a qrel to an unknown question or passage, a qrel that the question's own fields contradict, a question
  without a passage, and if no question has an answer.
  """
  folder = locate_data(path, [*FILES])
  if missing := [name for name in FILES if not (folder / name).exists()]:
    contents = "; ".join(f"{name} ({what})" for name, what in FILES.items())
    raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; the folder should contain {contents}")
  passages = [Passage(d.id, d.title, d.content) for d in read_corpus(folder / "corpus.jsonl")]
  slots = {passage.id: slot for slot, passage in enumerate(passages)}
  records = _read_questions(folder / "questions.json")
  gold = read_qrels(folder / "qrels.tsv", records, slots)
  questions = []
  for id, record in records.items():
    if not (answers := accepted_answers(record)):
      continue
    where = f"{folder / 'questions.json'}, question {id}"
    try:
      hops = {slot: _hop(record, passages[slot]) for slot in map(slots.__getitem__, gold.get(id, ()))}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise ValueError(f"{where}: {error!r}; expected the official fields of HotpotQA or MuSiQue") from None
    if not hops or -1 in hops.values():
      raise ValueError(
        f"{where} is supported by {[passages[slot].id for slot in hops]} in qrels.tsv, "
        "which must be passages that the record itself names: make the two files agree"
      )
    questions.append(Question(id, record["question"], answers, tuple(sorted(hops, key=hops.__getitem__))))
  if not questions:
    raise ValueError(f"none of the {len(records)} questions of {folder} has an answer; use a split with answers")
  return QAFolder(passages, questions, len(records) - len(questions))


def joined(folders: Sequence[QAFolder]) -> QAFolder:
  """Put the passages and questions of several folders together; passages of the same title and text become one.

  Raises ValueError for a question that stands in two folders: one could be trained on, and the other held out.
  """
  texts = [{question.text for question in folder.questions} for folder in folders]
  if twice := [text for i, found in enumerate(texts) for text in found & set().union(*texts[:i])]:
    raise ValueError(f"{len(twice)} questions stand in two folders, such as {min(twice)!r}: give each question once")
  slots: dict[tuple[str, str], int] = {}
  passages, questions = [], []
  for folder in folders:
    places = []
    for passage in folder.passages:
      if (passage.title, passage.text) not in slots:
        slots[passage.title, passage.text] = len(passages)
        passages.append(passage)
      places.append(slots[passage.title, passage.text])
    questions += [question._replace(gold=tuple(places[i] for i in question.gold)) for question in folder.questions]
  return QAFolder(passages, questions, sum(folder.unanswered for folder in folders))


def _read_questions(path: epath.Path) -> dict[str, dict[str, Any]]:
  records = read_json(path, FILES["questions.json"])
  if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
    raise ValueError(f"{path}: not a list of objects; expected {FILES['questions.json']}")
  questions = {}
  for number, record in enumerate(records):
    try:
      id = question_id(record)
      accepted_answers(record)
    except ValueError as error:
      raise ValueError(f"{path}, record {number}: {error}") from None
    if id in questions:
      raise ValueError(f"{path}: the question id {id!r} occurs twice; ids must be unique")
    questions[id] = record
  return questions


def question_id(record: dict[str, Any]) -> str:
  """Return the id of a record of HotpotQA or MuSiQue. Raises ValueError if it or the question is no text."""
  id = record.get("_id", record.get("id"))
  if not isinstance(id, str) or not isinstance(record.get("question"), str):
    raise ValueError("the id and the question must be strings")
  return id


def accepted_answers(record: dict[str, Any]) -> tuple[str, ...]:
  """Return the answers that a record of HotpotQA or MuSiQue accepts: none if it says that it has none.

  Raises ValueError for fields of other types.
  """
  if not isinstance(answerable := record.get("answerable", True), bool):
    raise ValueError(f"answerable is {reprlib.repr(answerable)}, not true or false")
  aliases = record.get("answer_aliases") or []
  texts = [record.get("answer"), *aliases] if isinstance(aliases, list) else [aliases]
  if not all(isinstance(text, str | None) for text in texts) or isinstance(aliases, str):
    raise ValueError("answer must be a string, and answer_aliases a list of strings")
  return tuple(dict.fromkeys(text for text in texts if text)) if answerable else ()


def supporting_passages(record: dict[str, Any]) -> list[tuple[str, str | None]]:
  """Return the title and the text of each passage that a record of HotpotQA or MuSiQue names, by hops.

  HotpotQA names titles alone, the text is None. Raises KeyError, TypeError, ValueError or AttributeError for a record
  without the official fields.
  """
  if "question_decomposition" in record:
    paragraphs = {paragraph["idx"]: paragraph for paragraph in record["paragraphs"]}
    steps = [paragraphs[step["paragraph_support_idx"]] for step in record["question_decomposition"]]
    return [(paragraph["title"], paragraph["paragraph_text"]) for paragraph in steps]
  question, titles = record["question"].lower(), [title for title, _ in record["supporting_facts"]]
  return [(title, None) for title in sorted(titles, key=lambda title: title.lower() not in question)]


def _hop(record: dict[str, Any], passage: Passage) -> int:
  """Return the index of a passage among the supporting passages of a record, -1 if it is not among them."""
  # several passages of MuSiQue share the title of their article; a title of HotpotQA is unique, and the corpus need not
  # keep the sentences' white space
  support = [(title, passage.text if text is None else text) for title, text in supporting_passages(record)]
  wanted = (passage.title, passage.text)
  return support.index(wanted) if wanted in support else -1
