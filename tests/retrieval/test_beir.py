"""Judged collections: they are read unchanged and split by title, and the example collection keeps its promises."""

import json

import pytest

from selfrag_jax.retrieval.base import create
from selfrag_jax.retrieval.beir import EXAMPLE, read_beir, split_by_title

CORPUS = [{"_id": f"d{i}", "title": f"t{i // 3}", "text": f"text {i}"} for i in range(12)]
QUERIES = [{"_id": f"q{i}", "text": f"query {i}"} for i in range(6)]


def write(folder, corpus=CORPUS, queries=QUERIES, qrels=("q0\td0\t1", "q1\td4\t2", "q1\td5\t0"), name="qrels.tsv"):
  dump = lambda records: "".join(json.dumps(record) + "\n" for record in records)
  (folder / "corpus.jsonl").write_text(dump(corpus))
  (folder / "queries.jsonl").write_text(dump(queries))
  (folder / name).parent.mkdir(exist_ok=True)
  (folder / name).write_text("\n".join(["query-id\tcorpus-id\tscore", *qrels, ""]))
  return folder


def test_only_judged_queries_and_positive_grades_count(tmp_path):
  data = read_beir(write(tmp_path))
  assert [document.id for document in data.documents] == [record["_id"] for record in CORPUS]
  assert data.queries == {"q0": "query 0", "q1": "query 1"}
  assert data.qrels == {"q0": {"d0": 1.0}, "q1": {"d4": 2.0}}


def test_splits_are_files(tmp_path):
  write(tmp_path, name="qrels/dev.tsv")
  assert read_beir(tmp_path, "dev").queries.keys() == {"q0", "q1"}
  with pytest.raises(FileNotFoundError, match=r"qrels/test\.tsv does not exist"):
    read_beir(tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"corpus": [{"title": "no id", "text": "x"}]}, r"corpus\.jsonl, line 1: _id, title and text"),
    ({"queries": [{"_id": "q0"}]}, r"queries\.jsonl, line 1: _id and text must be strings"),
    ({"queries": [QUERIES[0], QUERIES[0]]}, r"queries\.jsonl, line 2: the query id 'q0' occurs twice"),
    ({"qrels": ["q0\td0\t0"]}, "names no relevant document"),
    ({"qrels": ["q0\td99\t1"]}, r"qrels\.tsv, line 2: there is no document 'd99'"),
  ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    read_beir(write(tmp_path, **change))


def test_no_title_is_in_two_parts(tmp_path):
  qrels = ["q0\td0\t1", "q1\td4\t1", "q2\td7\t1", "q3\td11\t1", "q4\td0\t1", "q4\td11\t1"]
  data = read_beir(write(tmp_path, qrels=qrels))
  parts = split_by_title(data, {"train": 0.5, "valid": 0.25, "test": 0.25}, seed=1)
  titles = [{document.title for document in part.documents} for part in parts.values()]
  assert [len(part) for part in titles] == [2, 1, 1]
  assert set.union(*titles) == {"t0", "t1", "t2", "t3"}
  assert sum(map(len, titles)) == 4
  assert sum(len(part.documents) for part in parts.values()) == 12
  for part in parts.values():
    ids = {document.id for document in part.documents}
    assert part.queries.keys() == part.qrels.keys()
    assert all(grades.keys() <= ids for grades in part.qrels.values())
  both = any({"t0", "t3"} <= part for part in titles)
  assert sum(len(part.queries) for part in parts.values()) == 5 if both else 4
  assert split_by_title(data, {"test": 0.25, "valid": 0.25, "train": 0.5}, seed=1) == parts
  with pytest.raises(ValueError, match="4 titles or names cannot be dealt to 5 parts"):
    split_by_title(data, dict.fromkeys("abcde", 1.0))


def test_the_example_is_large_and_consistent():
  data = read_beir(EXAMPLE)
  records = [json.loads(line) for line in (EXAMPLE / "queries.jsonl").read_text().splitlines()]
  hops = {record["_id"]: record["hops"] for record in records}
  assert len(data.documents) >= 200
  assert len(data.queries) == len(records) >= 100
  assert sum(n == 2 for n in hops.values()) >= 40
  assert all(len(data.qrels[id]) == n for id, n in hops.items())
  texts = {document.id: document.content for document in data.documents}
  for record in records:
    gold = list(data.qrels[record["_id"]])
    answer = record["answers"][0]
    assert any(answer in texts[id] for id in gold)
    if record["hops"] == 2:  # the second document shares no name with the question: the first one names it
      capital, country = sorted(gold)
      title = next(document.title for document in data.documents if document.id == country)
      assert title in texts[capital]
      assert title not in record["text"]


@pytest.mark.parametrize(("name", "settings"), [("simple", {}), ("bm25", {}), ("dense", {"model_name": "token-bag"})])
def test_one_hop_questions_of_the_example_are_found(name, settings):
  data = read_beir(EXAMPLE)
  retriever = create(name, **settings)
  retriever.add_documents(data.documents)
  one_hop = [id for id, grades in data.qrels.items() if len(grades) == 1]
  found = retriever.retrieve_batch([data.queries[id] for id in one_hop], 5)
  hits = [any(document.id in data.qrels[id] for document in row) for id, row in zip(one_hop, found, strict=True)]
  assert sum(hits) / len(hits) >= 0.8
