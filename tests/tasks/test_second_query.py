"""Questions beside a passage that was read: what is still to be found is relevant, and nothing else."""

from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.tasks.second_query import with_read_passages

DOCUMENTS = [Document(id, id.upper(), f"about {id}") for id in "abcde"]
DATA = Judged(DOCUMENTS, {"1": "which one?", "2": "who?"}, {"1": {"a": 1.0, "b": 2.0, "c": 1.0}, "2": {"d": 1.0}})


def test_each_passage_is_read_once_and_the_others_remain():
  made = with_read_passages(DATA)
  assert made.documents == DOCUMENTS
  assert made.queries == {
    "1": "which one?",
    "1\ta": "which one? A about a",
    "1\tb": "which one? B about b",
    "1\tc": "which one? C about c",
    "2": "who?",
  }
  assert made.qrels == {
    **DATA.qrels,
    "1\ta": {"b": 2.0, "c": 1.0},
    "1\tb": {"a": 1.0, "c": 1.0},
    "1\tc": {"a": 1.0, "b": 2.0},
  }


def test_the_passage_that_was_read_is_a_hard_negative():
  task = RankingTask(with_read_passages(DATA), 1)
  examples = task.examples(range(len(task.pairs) * 20))
  mined = {}
  for query, (_, negative) in zip(examples.queries, examples.documents, strict=True):
    mined.setdefault(task.queries[query], set()).add("abcde"[negative])
  assert "a" in mined["which one? A about a"]
  assert not mined["which one? A about a"] & {"b", "c"}
