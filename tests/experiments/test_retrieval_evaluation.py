"""Retrievers on judged queries: the report agrees with the metrics, and the launcher has the right exit codes."""

import csv
import json

import jsonschema
import numpy as np
import pytest
import pytrec_eval

from selfrag_jax.encoders.base import FunctionEncoder
from selfrag_jax.experiments import retrieval
from selfrag_jax.metrics.retrieval import ndcg
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.retrieval import dense
from selfrag_jax.retrieval.base import create
from selfrag_jax.retrieval.beir import EXAMPLE, Judged, read_beir
from selfrag_jax.retrieval.document import Document
from tests import launching


def launch(*arguments):
  return launching.launch("launch/eval.py", "--config=configs/retrieval.py:words", *arguments)


def test_scores_are_those_of_the_rankings():
  data, retriever = read_beir(EXAMPLE), create("bm25")
  retriever.add_documents(data.documents)
  scores = retrieval.score(retriever, data, batch_size=7)
  found = retriever.retrieve_batch(list(data.queries.values()), 10)
  wanted = [ndcg([d.id for d in row], grades, 10) for row, grades in zip(found, data.qrels.values(), strict=True)]
  np.testing.assert_array_equal(scores["ndcg@10"], wanted)
  assert scores.ms_per_query > 0
  two_hop = np.array([len(grades) == 2 for grades in data.qrels.values()])
  assert scores["all_gold@10"][two_hop].mean() < scores["all_gold@10"][~two_hop].mean()
  assert (scores["recall@1"] <= scores["recall@5"]).all()


def count_words(texts):
  return np.array([[text.count(word) for word in ("red", "blue", "gold")] for text in texts], np.float32)


@pytest.mark.parametrize("name", ["simple", "bm25", "dense"])
def test_of_equal_scores_the_document_that_was_added_first_is_ranked_first(name):
  """trec_eval goes by ids instead, the last one first: where these were added so, all is what it computes."""
  texts = ("red", "red blue", "red blue blue", "red gold gold gold")
  documents = [Document(f"d{i:02}", content=texts[i % 4]) for i in range(24)]
  queries = {"q0": "red", "q1": "blue", "q2": "gold red"}
  grades = {"q0": {"d05": 2, "d08": 1, "d12": 1}, "q1": {"d06": 1, "d10": 3}, "q2": {"d03": 1, "d15": 1, "d00": 1}}
  measures, ours = {"recall.5,10", "ndcg_cut.10", "recip_rank"}, ("recall@5", "recall@10", "ndcg@10", "mrr@10")
  scores = {}
  for order, step in (("first", 1), ("last", -1)):
    retriever = create(name, **({"encoder": count_words, "backend": "numpy"} if name == "dense" else {}))
    retriever.add_documents(documents[::step])
    found, every = (retriever.retrieve_batch(list(queries.values()), k) for k in (10, 24))
    for row, whole in zip(found, every, strict=True):
      assert len({document.score for document in row}) < len(row) == 10
      for ranking in (row, whole):
        assert ranking == sorted(ranking, key=lambda document: (-document.score, step * int(document.id[1:])))
      assert row == whole[:10]
    run = {query: {d.id: d.score for d in row} for query, row in zip(queries, found, strict=True)}
    theirs = pytrec_eval.RelevanceEvaluator(grades, measures).evaluate(run)
    judged = Judged(documents, queries, grades)
    scores[order] = (
      np.transpose([retrieval.score(retriever, judged)[metric] for metric in ours]),
      [[theirs[q][metric] for metric in ("recall_5", "recall_10", "ndcg_cut_10", "recip_rank")] for q in queries],
    )
  np.testing.assert_allclose(*scores["last"], rtol=1e-6)
  assert not np.allclose(*scores["first"], rtol=1e-6)


def test_a_corpus_is_embedded_once_for_all_retrievers(tmp_path, monkeypatch):
  asked = []

  def encoder(texts):
    asked.extend(texts)
    return np.stack([np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256) for text in texts])

  monkeypatch.setattr(dense, "load_encoder", lambda name: FunctionEncoder(encoder))
  make = lambda: {"dense": create("dense", backend="numpy"), "hybrid": create("hybrid"), "second": create("dense")}
  data, alone = read_beir(EXAMPLE), make()
  for retriever in alone.values():
    retriever.add_documents(data.documents)
  wanted = {name: retrieval.score(retriever, data)["ndcg@10"].mean() for name, retriever in alone.items()}
  asked.clear()
  config = {"ks": (1, 5, 10), "batch_size": 32, "baseline": ""}
  report = retrieval.evaluate(retrieval.Experiment(config, data, make()), tmp_path)
  corpus = {document.text for document in data.documents}
  assert sorted(text for text in asked if text in corpus) == sorted(corpus)
  assert {name: report[f"{name}.ndcg@10"] for name in wanted} == pytest.approx(wanted)


def test_retrievers_of_one_function_share_its_vectors():
  asked = []

  def encoder(texts):
    asked.extend(texts)
    return np.ones((len(texts), 3), np.float32)

  data = read_beir(EXAMPLE)
  retrievers = [create("dense", encoder=encoder, backend="numpy") for _ in range(2)]
  retrieval.share_encoders(retrievers, data)
  for retriever in retrievers:
    retriever.add_documents(data.documents)
  assert sorted(asked) == sorted({document.text for document in data.documents})


def test_differences_are_to_the_baseline(tmp_path):
  baseline = ("--config.baseline=simple", "--config.queries=30")
  ended = launch(f"--data={EXAMPLE}", f"--workdir={tmp_path}", *baseline)
  assert ended.returncode == 0, ended.stderr
  report = json.loads((tmp_path / "retrieval.json").read_text())
  difference = report["bm25.ndcg@10"] - report["simple.ndcg@10"]
  assert report["bm25.ndcg@10_difference"] == pytest.approx(difference)
  assert "simple.ndcg@10_difference" not in report
  assert "nDCG@10 against simple" in ended.stdout


def test_the_command_writes_report_table_and_figure(tmp_path):
  ended = launch(f"--data={EXAMPLE}", f"--workdir={tmp_path}", "--min=bm25.recall@10=0.5", "--max=bm25.recall@10=1")
  assert ended.returncode == 0, ended.stderr
  report = json.loads((tmp_path / "retrieval.json").read_text())
  assert (report["documents"], report["queries"]) == (254, 130)
  schema = read_schema("retrieval")
  jsonschema.validate(report, schema)
  for key in ("documents", "queries", "config"):
    with pytest.raises(jsonschema.ValidationError):
      jsonschema.validate({name: value for name, value in report.items() if name != key}, schema)
  for extra in ("bm25.ndcg", "bm25.config", "extra"):
    with pytest.raises(jsonschema.ValidationError):
      jsonschema.validate({**report, extra: 0.5}, schema)
  for name in ("bm25", "bm25_twice", "simple", "token_bag"):
    for metric in ("ndcg@10", "recall@1", "recall@5", "recall@10", "mrr@10", "all_gold@10", "ms_per_query"):
      assert isinstance(report[f"{name}.{metric}"], float)
    low, high = report[f"{name}.ndcg@10_interval"]
    assert low <= report[f"{name}.ndcg@10"] <= high
  rows = list(csv.DictReader((tmp_path / "retrieval.csv").open()))
  assert [row["retriever"] for row in rows] == ["bm25", "bm25_twice", "simple", "token_bag"]
  assert float(rows[0]["ndcg@10"]) == pytest.approx(report["bm25.ndcg@10"], abs=1e-6)
  assert (tmp_path / "retrieval.png").read_bytes().startswith(b"\x89PNG")
  assert "bm25" in ended.stdout


def test_a_dry_run_writes_nothing(tmp_path):
  ended = launch(f"--data={EXAMPLE}", f"--workdir={tmp_path / 'run'}", "--dry_run")
  assert ended.returncode == 0, ended.stderr
  assert ended.stdout.startswith("254 documents, 130 queries\nbm25: ")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("arguments", "code", "message"),
  [
    ([f"--data={EXAMPLE}", "--config.queries=5", "--min=bm25.ndcg@10=1.01"], 1, "missed: bm25.ndcg@10 is"),
    ([f"--data={EXAMPLE}", "--config.queries=5", "--min=bm26.ndcg@10=1"], 2, "error: --min: the report has no bm26"),
    (["--min=x"], 2, "error: --min=x: write NAME=VALUE"),
    ([f"--data={EXAMPLE}", "--config.queries=5", "--max=bm25.ndcg@10=0.01"], 1, "missed: bm25.ndcg@10 is"),
    ([f"--data={EXAMPLE}", "--config.queries=5", "--max=bm26.ndcg@10=1"], 2, "error: --max: the report has no bm26"),
    (["--max=x"], 2, "error: --max=x: write NAME=VALUE"),
    ([f"--data={EXAMPLE}", "--config.baseline=bm26"], 2, "config.baseline is 'bm26'; one of bm25, bm25_twice, simple"),
    ([], 2, "config.data.path is empty; give a BEIR folder"),
    (["--data=nowhere"], 2, "corpus.jsonl does not exist; a BEIR folder has"),
    ([f"--data={EXAMPLE}", "--config.retrievers.bm25.k2=1"], 2, "unknown key"),
    ([f"--data={EXAMPLE}", "--config.retrievers.bm25.k1=-1"], 2, "k1 = -1"),
    ([f"--data={EXAMPLE}", "--config.plugins=('no_such_module',)"], 2, "the plugin no_such_module was not found"),
  ],
)
def test_gates_and_mistakes_have_exit_codes(tmp_path, arguments, code, message):
  ended = launch(f"--workdir={tmp_path}", *arguments)
  assert ended.returncode == code, ended.stderr
  assert message in ended.stderr
