"""A corpus of five passages and questions about it, for the tests of `PassageSearch`."""

from selfrag_jax.tasks.datasets import Passage, QAFolder, Question
from selfrag_jax.tasks.passages import PassageSearch
from selfrag_jax.text.chat import COMPACT
from selfrag_jax.text.tokenizer import ByteTokenizer

PASSAGES = [
  Passage("p0", "Medici (board game)", "Medici is a game by Reiner Knizia."),
  Passage("p1", "Reiner Knizia", "A designer who was born in Illertissen."),
  Passage(
    "p2", "Illertissen", "A town by the river Iller, with a very long history that nobody will ever read to its end."
  ),
  Passage("p3", "Go", "The old game of the stones."),
  Passage("p4", "River", "Water that flows."),
]
QUESTION = Question("q", "Where was the designer of MEDICI born?", ("Illertissen", "Illertissen, Germany"), (0, 1, 2))
TOKENIZER = ByteTokenizer()
SIZES = {"document_tokens": 80, "prompt_tokens": 240, "max_query_tokens": 40}


def folder(questions, passages=PASSAGES):
  return QAFolder(list(passages), list(questions), 0)


def numbered(n):
  return [Question(f"q{i}", f"Question {i}?", ("no" if i % 3 else f"answer {i}",), (i % 5,)) for i in range(n)]


def make(questions, **options):
  return PassageSearch(folder(questions), TOKENIZER, COMPACT, **(SIZES | options))


def text_of(row, length):
  return TOKENIZER.decode(row[:length])


def ids(task, split, indices):
  return [text_of(*pair) for pair in zip(*task.batch(split, indices)[1:3], strict=True)]


def exchange(demonstration):
  """Return the searches, what they found and the answer of a demonstration."""
  *searched, answer = demonstration["messages"][-1]["content"]
  assert [part["type"] for part in searched] == ["search", "retrieval"] * (len(searched) // 2)
  assert answer["type"] == "answer"
  found = [part["documents"][0]["title"] if "documents" in part else part["text"] for part in searched[1::2]]
  return [part["text"] for part in searched[::2]], found, answer["text"]


def gold_exchange(question, max_hops=None, **options):
  """Demonstrate `question`, the first that is drawn for training among copies of it."""
  task = make([question._replace(id=f"q{i}") for i in range(10)], **options)
  return exchange(task.demonstration("sft", 0, "gold", max_hops or len(question.gold)))


def text_named(title):
  [passage] = [passage for passage in PASSAGES if passage.title == title]
  return f"{passage.title} {passage.text}"
