"""Training of an encoder and a reranker by the launcher: the models can be loaded and resumed, and are better."""

import json
import os
import re

import jax
import jsonschema
import numpy as np
import pytest
import torch
import transformers

from configs import encoder as encoder_config
from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.collectives import collectives
from selfrag_jax.encoders.bert import BertEncoder
from selfrag_jax.encoders.load import load_text_encoder
from selfrag_jax.experiments import base, encoder
from selfrag_jax.metrics.retrieval import all_found
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.beir import read_beir
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.multi_hop import MultiHopRetriever
from selfrag_jax.retrieval.rerank import RerankRetriever
from selfrag_jax.text.wordpiece import SPECIAL
from tests import launching

ONE_DEVICE = "--xla_backend_optimization_level=0"
NAMES = [f"{a}{b}" for a in ("ba", "co", "du", "fe", "gi", "lo") for b in ("mar", "nel", "rit", "sun", "tol")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_collection(tmp_path_factory.mktemp("ranking"))


def write_collection(path):
  """Write ten titles with three documents each, and a small BERT that has not been trained."""
  rows = [(f"d{i}", f"title{i % 10}", f"the code of {name} is in town {i}") for i, name in enumerate(NAMES)]
  dump = lambda records: "".join(json.dumps(record) + "\n" for record in records)
  (path / "corpus.jsonl").write_text(dump({"_id": d, "title": t, "text": x} for d, t, x in rows))
  (path / "queries.jsonl").write_text(dump({"_id": f"q{i}", "text": f"where is {n}"} for i, n in enumerate(NAMES)))
  (path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td{i}\t1\n" for i in range(30)))
  words = sorted({word for _, title, text in rows for word in [title, *text.split()]} | {"where"})
  torch.manual_seed(0)
  config = transformers.BertConfig(
    vocab_size=len(SPECIAL) + len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=32,
  )  # fmt: skip
  transformers.BertModel(config, add_pooling_layer=False).save_pretrained(path / "bert")
  (path / "bert" / "vocab.txt").write_text("\n".join([*SPECIAL, *words]))
  return path


def launch(config, folder, workdir, *overrides, code=0, launcher="train"):
  data = f"--config.data.path={folder}", f"--config.init={folder / 'bert'}"
  ended = launching.launch(
    f"launch/{launcher}.py", f"--config=configs/{config}.py", f"--workdir={workdir}", *data, *overrides,
    env={**os.environ, "XLA_FLAGS": ONE_DEVICE}, imported=("tensorflow_text",),
  )  # fmt: skip
  assert ended.returncode == code, ended.stderr
  return ended


@pytest.mark.parametrize(("config", "kind"), [("encoder", "encoder"), ("rerank", "reranker")])
def test_a_model_of_somebody_else_is_found_before_the_training(folder, tmp_path, config, kind):
  (tmp_path / kind).mkdir()
  (tmp_path / kind / "pytorch_model.bin").write_text("mine")
  ended = launch(config, folder, tmp_path, code=1)
  assert (
    f"{kind} holds pytorch_model.bin, which was not exported from here; give a new" in ended.stderr.splitlines()[-1]
  )
  assert not (tmp_path / "checkpoints").exists()
  assert (tmp_path / kind / "pytorch_model.bin").read_text() == "mine"


def test_that_no_model_can_be_written_to_object_storage_is_said_before_the_training(folder):
  config = encoder_config.get_config()
  config.data.path, config.init = str(folder), str(folder / "bert")
  with pytest.raises(ValueError, match="gs://bucket/run is object storage, to which no encoder can be written"):
    encoder.run(encoder.build(config.to_dict()), "gs://bucket/run")


def test_a_plan_has_the_training_and_the_embedding_of_a_knowledge_base(folder):
  config = encoder_config.get_config()
  config.data.path, config.init, config.encoder.batch_size = str(folder), str(folder / "bert"), 4
  update, embedding = base.plan(config.to_dict(), topology("v5e:2x2")[1])[1]
  assert (update.name, embedding.name) == ("encoder update", "knowledge base embedding")
  assert embedding.module.n_devices == 4
  assert update.useful is embedding.useful is None
  assert collectives(update.text)
  assert not collectives(embedding.text)  # each device has all weights and rows of its own
  assert embedding.arguments < 2**19


@pytest.mark.parametrize("config", ["encoder", "rerank"])
def test_rows_longer_than_the_model_reads_are_cut(folder, tmp_path, config):
  flags = [f"--config.{config}.steps=1", f"--config.{config}.batch_size=4"]  # its 32 positions are fewer than the rows
  launch(config, folder, tmp_path, *flags)
  assert (tmp_path / f"{config}.json").exists()


def test_an_encoder_is_trained_and_can_be_used(folder, tmp_path):
  small = [f"--config.encoder.{name}={value}" for name, value in (
    ("steps", 12), ("batch_size", 8), ("query_tokens", 8), ("document_tokens", 16), ("accumulate", 2),
    ("optimizer.learning_rate", 3e-3),
  )]  # fmt: skip
  shown = launch("encoder", folder, tmp_path, *small, "--dry_run")
  assert "first query: where is" in shown.stdout
  assert not (tmp_path / "encoder.json").exists()
  launch("encoder", folder, tmp_path, *small, "--config.loop.eval_every=6")
  report = json.loads((tmp_path / "encoder.json").read_text())
  jsonschema.validate(report, read_schema("encoder"))
  assert (tmp_path / "encoder.png").read_bytes().startswith(b"\x89PNG")
  assert report["trained.ndcg@10"] > report["before.ndcg@10"]
  assert report["train.queries"] + report["valid.queries"] + report["test.queries"] == 30
  assert report["test.queries"] == 12
  retriever = DenseRetriever(str(tmp_path / "encoder"))
  retriever.add_documents([Document(name, content=f"the code of {name} is in town 3") for name in NAMES])
  assert len(retriever.retrieve(f"where is {NAMES[3]}", 3)) == 3
  rows = (tmp_path / "metrics.jsonl").read_text()
  again = launch("encoder", folder, tmp_path, *small)  # nothing is left to train
  assert "encoder 1/12" not in again.stderr
  assert json.loads((tmp_path / "encoder.json").read_text())["trained.ndcg@10"] == report["trained.ndcg@10"]
  (tmp_path / "encoder.json").unlink()
  gates = [f"--min=trained.ndcg@10={report['trained.ndcg@10']}", "--max=valid.queries=0"]
  ended = launch("encoder", folder, tmp_path, *small, *gates, code=1, launcher="eval")
  assert re.fullmatch(r"missed: valid\.queries is \d+, not 0 or less", ended.stderr.splitlines()[-1])
  now = json.loads((tmp_path / "encoder.json").read_text())
  measured = lambda report: {key: x for key, x in report.items() if key != "config" and "ms_per_query" not in key}
  assert measured(now) == measured(report)
  assert (tmp_path / "metrics.jsonl").read_text() == rows
  of = lambda path: jax.tree.leaves(load_text_encoder(path).params)
  start, trained = of(folder / "bert"), of(tmp_path / "encoder")
  launch("encoder", folder, tmp_path, *small, "--config.encoder.kept=0.25", launcher="eval")
  for before, after, averaged in zip(start, trained, of(tmp_path / "encoder"), strict=True):
    np.testing.assert_allclose(averaged, 0.25 * before + 0.75 * after, rtol=1e-5, atol=1e-7)
  assert any(np.abs(after - before).max() > 1e-3 for before, after in zip(start, trained, strict=True))
  ended = launch("encoder", folder, tmp_path / "empty", *small, code=2, launcher="eval")
  assert f"error: {tmp_path / 'empty' / 'checkpoints'} does not exist: train first" in ended.stderr
  assert not (tmp_path / "empty").exists()


def passages(path, places, *others):
  """Write passages of two sentences about some of the names, each with an id that other folders have, too."""
  texts = [f"The town of {name} has many gates. Its {name} mill stands at the river {name}." for name in NAMES]
  rows = [{"_id": f"d{i}", "title": NAMES[i], "text": texts[i]} for i in places]
  path.mkdir()
  (path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *others]))
  return texts


def test_passages_of_other_collections_are_asked_for_by_their_sentences(folder, tmp_path, monkeypatch):
  config = encoder_config.get_config()
  config.data.path, config.init, config.seed = str(folder), str(folder / "bert"), 1
  plain = encoder.build(config.to_dict())
  held_out = plain.data["test"].documents[0].title
  short = {"_id": "short", "title": "", "text": "It fell."}
  texts = passages(tmp_path / "a", range(4), {"_id": "test", "title": held_out, "text": "Of a title that is held out."})
  passages(tmp_path / "b", range(3, 6), short)  # the first is there already
  config.data.unlabelled = f"{tmp_path / 'a'}, {tmp_path / 'b'},"
  fitted = {}
  monkeypatch.setattr(BertEncoder, "fit", lambda self, texts: fitted.update(texts=texts))
  monkeypatch.setattr(BertEncoder, "fit_queries", lambda self, rows: fitted.update(rows=rows))
  built = encoder.build(config.to_dict())
  assert built.counts == {**plain.counts, "unlabelled.queries": 6}
  judged, read = plain.data["train"], built.phase().task
  asked, shown = len(judged.queries), len(judged.documents)
  assert (read.queries[:asked], read.documents[:shown]) == (
    list(judged.queries.values()),
    [document.text for document in judged.documents],
  )
  assert (len(read.queries), len(read.documents)) == (asked + 6, shown + 7)
  assert "It fell." in read.documents
  for query, gold, place in zip(read.queries[asked:], read.relevant[asked:], range(6), strict=True):
    [rest] = [read.documents[document].removeprefix(f"{NAMES[place]} ") for document in gold]
    sentence = query.removeprefix(f"{NAMES[place]} ")
    assert texts[place] in (f"{sentence} {rest}", f"{rest} {sentence}")
  assert fitted == {"texts": read.documents[:shown], "rows": built.encoder.tokens(read.queries[:asked])}
  config.seed = 0
  assert encoder.build(config.to_dict()).train.queries != built.train.queries


def test_folders_that_give_no_queries_are_named(folder, tmp_path):
  config = encoder_config.get_config()
  config.data.path, config.init = str(folder), str(folder / "bert")
  config.data.unlabelled = str(folder)  # what is judged is there already, and the rest is held out
  with pytest.raises(ValueError, match=r"of 0 passages of .*, none has two sentences of 6 to 30 words; give other"):
    encoder.build(config.to_dict())
  config.data.unlabelled = str(tmp_path / "none")
  with pytest.raises(FileNotFoundError, match=r"config\.data\.unlabelled: .*none has no corpus\.jsonl; give folders"):
    encoder.build(config.to_dict())


def test_a_reranker_is_trained_and_can_be_used(folder, tmp_path):
  small = [f"--config.rerank.{name}={value}" for name, value in (
    ("steps", 4), ("batch_size", 4), ("negatives", 2), ("depth", 5), ("tokens", 32),
  )]  # fmt: skip
  launch("rerank", folder, tmp_path, *small, "--config.evaluation.periodic=2")
  report = json.loads((tmp_path / "rerank.json").read_text())
  assert 0 < report["weight"] <= 1
  jsonschema.validate(report, read_schema("rerank"))
  for name in ("bm25", "reranked", "blended"):
    assert 0 <= report[f"{name}.ndcg@10"] <= 1
  retriever = RerankRetriever(
    BM25Retriever(), "cross-encoder", depth=5, reranker_settings={"model_name": str(tmp_path / "reranker")}
  )
  retriever.add_documents([Document(str(i), content=f"the code of {name}") for i, name in enumerate(NAMES)])
  found = retriever.retrieve(f"code of {NAMES[3]}", 5)
  assert len(found) == 5
  assert np.isfinite([document.score for document in found]).all()


@pytest.fixture(scope="module")
def two_passages(folder, tmp_path_factory):
  """The same documents; a question needs two of them."""
  path = tmp_path_factory.mktemp("two_passages")
  for name in ("corpus.jsonl", "queries.jsonl"):
    (path / name).write_bytes((folder / name).read_bytes())
  rows = [f"q{i}\td{j}\t1\n" for i in range(30) for j in (i, (i + 3) % 30)]
  (path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
  return path


def test_an_encoder_of_queries_is_trained_and_can_be_used(folder, two_passages, tmp_path):
  small = ["--config.second_query.steps=4", "--config.second_query.batch_size=4", f"--config.init={folder / 'bert'}"]
  flags = [*small, f"--config.data.test_path={two_passages}"]
  launch("second_query", two_passages, tmp_path, *small, code=1)  # nothing to test on
  launch("second_query", two_passages, tmp_path, *flags, "--config.second_query.trained=all", code=1)
  assert "first query: where is" in launch("second_query", two_passages, tmp_path, *flags, "--dry_run").stdout
  launch("second_query", two_passages, tmp_path, *flags)
  report = json.loads((tmp_path / "second_query.json").read_text())
  jsonschema.validate(report, read_schema("second_query"))
  assert (report["train.queries"], report["valid.queries"], report["test.queries"]) == (24, 6, 30)
  data = read_beir(two_passages)
  retriever = MultiHopRetriever(
    DenseRetriever(str(folder / "bert"), query_model=str(tmp_path / "encoder")), "add_passage", hops=2
  )
  retriever.add_documents(data.documents)
  retriever.save(tmp_path / "kb")
  found = load(tmp_path / "kb").retrieve_batch(list(data.queries.values()), 10)
  pairs = zip(found, data.qrels.values(), strict=True)
  hits = [all_found([document.id for document in documents], gold, 10) for documents, gold in pairs]
  assert np.mean(hits) == pytest.approx(report["trained.all_gold@10"])
  assert report["trained.ndcg@10"] != report["untrained.ndcg@10"]
  assert report["names.all_gold@10_difference"] == pytest.approx(
    report["names.all_gold@10"] - report["one_search.all_gold@10"]
  )
  again = launch("second_query", two_passages, tmp_path, *flags, "--min=trained.all_gold@10=2", code=1, launcher="eval")
  assert "missed: trained.all_gold@10" in again.stderr


def test_an_encoder_of_queries_that_is_missing_is_said_before_the_documents_are_embedded(folder, tmp_path):
  retriever = DenseRetriever(encoder=lambda texts: pytest.fail("embedded"), query_model=str(tmp_path / "none"))
  with pytest.raises(FileNotFoundError, match="none"):
    retriever.add_documents([Document("1", content="the code")])


def test_an_encoder_of_queries_is_saved_by_name_alone(folder, tmp_path):
  retriever = DenseRetriever(str(folder / "bert"))
  retriever.add_documents([Document("1", content="the code")])
  retriever.query_encoder = retriever.encoder
  with pytest.raises(ValueError, match="save the encoder, and name it as query_model"):
    retriever.save(tmp_path / "kb")
