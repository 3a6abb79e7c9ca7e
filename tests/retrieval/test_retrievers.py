"""The promises of every retriever: equal results after a round trip, filters inside the search, results as copies."""

import numpy as np
import pytest

from selfrag_jax.retrieval.base import BaseRetriever, Hits, create, load, register
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.hybrid import HybridRetriever
from selfrag_jax.retrieval.rerank import RerankRetriever
from selfrag_jax.retrieval.simple import SimpleRetriever
from selfrag_jax.storage.atomic import write_json
from selfrag_jax.storage.generation import FolderError

ANIMALS = ["zebra", "otter", "heron", "badger", "lynx", "marten", "stoat", "adder", "curlew", "plover"]
PLACES = ["river", "forest", "marsh", "desert", "harbor", "meadow", "island", "canyon", "glacier", "village"]
DOCUMENTS = [
  Document(
    f"{animal}-{place}", animal.title(), f"The {animal} lives near the {place}.", {"n": i * 10 + j}, source=place
  )
  for i, animal in enumerate(ANIMALS)
  for j, place in enumerate(PLACES)
]
MAKERS = {
  "simple": SimpleRetriever,
  "bm25": BM25Retriever,
  "dense": lambda: DenseRetriever("token-bag", backend="numpy"),
  "rerank": lambda: RerankRetriever(
    "bm25", "mmr", weight=0.5, depth=20, reranker_settings={"model_name": "token-bag", "tradeoff": 1.0}
  ),
  "hybrid": lambda: HybridRetriever(("bm25", "dense"), settings=[{}, {"model_name": "token-bag", "backend": "numpy"}]),
}


@pytest.fixture(params=MAKERS)
def retriever(request):
  made = MAKERS[request.param]()
  made.add_documents(DOCUMENTS)
  return made


def ids(found):
  return [document.id for document in found]


def test_it_finds_what_the_query_names(retriever):
  queries = [f"where does the {animal} find a {place}?" for animal, place in zip(ANIMALS, PLACES, strict=True)]
  found = retriever.retrieve_batch(queries, 3)
  assert [row[0].id for row in found] == [f"{a}-{p}" for a, p in zip(ANIMALS, PLACES, strict=True)]
  for row in found:
    scores = [document.score for document in row]
    assert len(row) == 3
    assert scores == sorted(scores, reverse=True)


def test_a_batch_is_its_queries_one_by_one(retriever):
  queries = ["zebra marsh", "the otter", "glacier", "unheard words", "lynx lynx harbor"]
  for row, query in zip(retriever.retrieve_batch(queries, 4), queries, strict=True):
    alone = retriever.retrieve(query, 4)
    assert ids(row) == ids(alone)
    np.testing.assert_allclose([d.score for d in row], [d.score for d in alone], rtol=1e-6)


def test_results_are_copies_and_documents_have_no_score(retriever):
  first = retriever.retrieve("zebra marsh", 2)
  kept = [document.score for document in first]
  retriever.retrieve("otter river", 2)
  assert [document.score for document in first] == kept
  assert all(document.score is None for document in retriever.documents)


def test_a_filter_does_not_starve_the_result(retriever):
  found = retriever.retrieve("zebra marsh", 10, where={"source": ["canyon", "island"]})
  assert {document.source for document in found} == {"canyon", "island"}
  assert ids(found)[:2] in (["zebra-island", "zebra-canyon"], ["zebra-canyon", "zebra-island"])
  even = retriever.retrieve("zebra", 5, where=lambda fields: fields["n"] % 2 == 0)
  assert len(even) == 5
  assert all(document.metadata["n"] % 2 == 0 for document in even)


def test_what_is_deleted_is_not_found_and_what_is_added_is(retriever):
  retriever.retrieve("zebra", 1)  # the index is built
  assert retriever.delete("zebra-marsh") == 1
  assert retriever.delete(where={"source": "river"}) == 10
  retriever.add_documents([Document("new", "Quokka", "The quokka lives near the marsh.")])
  assert len(retriever) == 90
  assert "new" in retriever
  found = ids(retriever.retrieve("zebra marsh", 50))
  assert "zebra-marsh" not in found
  assert not any(id.endswith("river") for id in found)
  assert ids(retriever.retrieve("quokka", 1)) == ["new"]
  again = Document("zebra-marsh", "Zebra", "The zebra has moved to the volcano.")
  retriever.add_documents([again])
  assert retriever.retrieve("zebra volcano", 1)[0].content == again.content


def test_small_changes_are_seen_at_once(retriever):
  retriever.retrieve("zebra", 1)  # the index is built, and a few changes do not build it anew
  for new in ("quokka", "wombat"):
    retriever.add_documents([Document(new, new.title(), f"The {new} lives near the marsh.")])
    assert ids(retriever.retrieve(f"{new} marsh", 1)) == [new]
  for gone in ("quokka", "zebra-marsh"):
    retriever.delete(gone)
    assert gone not in ids(retriever.retrieve("quokka zebra marsh", 100))
  assert ids(retriever.retrieve("wombat marsh", 1)) == ["wombat"]


def test_ids_are_taken_once(retriever):
  before = len(retriever)
  for new in ([DOCUMENTS[3]], [Document("x"), Document("x")]):
    with pytest.raises(ValueError, match="is taken"):
      retriever.add_documents([Document("first"), *new])
  assert len(retriever) == before
  with pytest.raises(KeyError, match="no document has the id 'nobody'"):
    retriever.delete(["zebra-marsh", "nobody"])
  assert "zebra-marsh" in retriever


def test_an_upsert_replaces(retriever):
  before = len(retriever)
  new = [Document("zebra-marsh", content="a quokka"), Document("fresh", content="a quokka too")]
  assert retriever.upsert_documents(new) == 2
  assert len(retriever) == before + 1
  assert {d.id for d in retriever.retrieve("quokka", 2)} == {"zebra-marsh", "fresh"}
  assert retriever.get("zebra-marsh").content == "a quokka"
  with pytest.raises(ValueError, match="two documents have the id 'x'"):
    retriever.upsert_documents([Document("x"), Document("x")])


def test_an_upsert_that_fails_changes_nothing(retriever, monkeypatch):
  documents, found = retriever.documents, retriever.retrieve("zebra marsh", 3)
  monkeypatch.setattr(DenseRetriever, "_embed", fail)
  monkeypatch.setattr(SimpleRetriever, "_add", fail)
  monkeypatch.setattr(BM25Retriever, "_add", fail)
  with pytest.raises(OSError, match="the encoder is gone"):
    retriever.upsert_documents([Document("fresh"), Document("zebra-marsh", content="a quokka")])
  monkeypatch.undo()
  assert retriever.documents == documents
  assert retriever.retrieve("zebra marsh", 3) == found


def fail(self, *_):
  raise OSError("the encoder is gone")


def test_more_than_there_is_may_be_asked_for(retriever):
  assert len(retriever.retrieve("zebra", 10**30)) == len(retriever.retrieve("zebra", len(retriever)))


def test_a_folder_gives_the_same_results(retriever, tmp_path):
  retriever.retrieve("zebra", 1)
  retriever.delete("zebra-marsh")
  retriever.add_documents([Document("new", "Quokka", "The quokka lives near the marsh.", {"é": [1]})])
  queries = ["zebra marsh", "quokka", "otter harbor village"]
  retriever.save(tmp_path / "kb")
  again = load(tmp_path / "kb")
  assert type(again) is type(retriever)
  assert again.settings == retriever.settings
  assert again.documents == retriever.documents
  assert again.retrieve_batch(queries, 5) == retriever.retrieve_batch(queries, 5)
  again.add_documents([Document("newer", content="a wombat")])
  again.save(tmp_path / "kb")
  assert ids(load(tmp_path / "kb").retrieve("wombat", 1)) == ["newer"]


def test_texts_may_hold_any_end_of_a_line(retriever, tmp_path):
  retriever.add_documents([Document("lines", content="a\u2028quokka\x85\x0b\x0c\r\n\x1ccame\u2029here")])
  retriever.save(tmp_path)
  assert load(tmp_path).get("lines") == retriever.get("lines")


def test_ctrl_c_behind_the_manifest_keeps_what_it_names(tmp_path, monkeypatch):
  made = SimpleRetriever()
  made.add_documents(DOCUMENTS[:5])
  made.save(tmp_path)
  made.add_documents(DOCUMENTS[5:10])
  write = write_json

  def interrupted(*args):
    write(*args)
    raise KeyboardInterrupt

  monkeypatch.setattr("selfrag_jax.storage.manifest.write_json", interrupted)
  with pytest.raises(KeyboardInterrupt):
    made.save(tmp_path)
  assert len(load(tmp_path)) == 10


def test_an_empty_retriever_finds_nothing(tmp_path):
  for make in MAKERS.values():
    empty = make()
    assert empty.retrieve_batch(["zebra", "otter"], 3) == [[], []]
    empty.save(tmp_path / empty.name)
    assert load(tmp_path / empty.name).retrieve("zebra") == []
    empty.add_documents(DOCUMENTS[:1])
    empty.delete(DOCUMENTS[0].id)
    assert empty.retrieve("zebra") == []


@pytest.mark.parametrize("name", ["simple", "bm25"])
def test_words_that_no_document_has_find_nothing(name):
  made = MAKERS[name]()
  made.add_documents(DOCUMENTS)
  assert made.retrieve_batch(["unheard words", ""], 3) == [[], []]


def test_bm25_finds_nothing_for_stop_words():
  made = BM25Retriever()
  made.add_documents(DOCUMENTS)
  assert made.retrieve_batch(["the of and", "the zebra"], 1)[0] == []


def test_what_cannot_be_meant_is_refused(retriever):
  with pytest.raises(ValueError, match="top_k = 0 must be at least 1"):
    retriever.retrieve("zebra", 0)
  with pytest.raises(ValueError, match="list of texts"):
    retriever.retrieve_batch("zebra")
  for arguments in ({}, {"ids": "zebra-marsh", "where": {}}):
    with pytest.raises(ValueError, match="one of the two"):
      retriever.delete(**arguments)
  with pytest.raises(KeyError):
    retriever.get("nobody")


@pytest.mark.parametrize("top_k", [0, -1, True, 2.5, "3", None])
def test_a_number_of_documents_is_a_whole_one(retriever, top_k):
  with pytest.raises(ValueError, match=f"top_k = {top_k!r} must be"):
    retriever.retrieve("zebra", top_k)


@pytest.mark.parametrize("given", [{"id": "x"}, "a text", None])
def test_what_is_no_document_is_not_added(retriever, given):
  with pytest.raises(ValueError, match="is no Document"):
    retriever.add_documents([Document("new", content="x"), given])
  assert "new" not in retriever


def test_more_than_there_are_is_all_there_are(retriever):
  everything = retriever.retrieve("the zebra of the marsh", len(retriever))
  assert retriever.retrieve("the zebra of the marsh", 10**9) == everything
  assert retriever.retrieve("the zebra of the marsh", np.int32(3)) == retriever.retrieve("the zebra of the marsh", 3)


def test_an_empty_query_finds_nothing_beside_others(retriever):
  found = retriever.retrieve_batch(["", "zebra marsh", " \n"], 2)
  assert [ids(row)[:1] for row in found] == [[], ["zebra-marsh"], []]


@pytest.mark.parametrize("query", ["half \ud800 a pair", None, 7, b"zebra"])
def test_what_is_no_text_is_no_query(retriever, query):
  with pytest.raises(ValueError, match=r"a query is .*; it must be a text"):
    retriever.retrieve_batch(["zebra", query])


def test_filters_know_names_and_operators(retriever):
  small = retriever.retrieve("zebra marsh", 100, where={"n": {"$lt": 12}, "source": {"$contains": "mar"}})
  assert {document.id for document in small} <= {"zebra-marsh", "otter-marsh"}
  assert "zebra-marsh" in ids(small)
  for ask in (lambda where: retriever.retrieve("zebra", where=where), lambda where: retriever.delete(where=where)):
    with pytest.raises(ValueError, match="asks for 'sorce', which the metadata lacks; did you mean source"):
      ask({"sorce": "marsh"})
    with pytest.raises(ValueError, match=r"unknown operator '\$ge'"):
      ask({"n": {"$ge": 3}})
  assert retriever.delete(where={"n": {"$gte": 10}}) == 90
  assert len(retriever) == 10


def test_an_empty_filter_deletes_nothing(retriever):
  with pytest.raises(ValueError, match="where is empty"):
    retriever.delete(where={})
  assert len(retriever) == 100


@pytest.mark.parametrize("name", MAKERS)
def test_an_empty_retriever_finds_nothing_by_any_name(name):
  made = MAKERS[name]()
  assert made.retrieve("zebra", where={"anything": 1}) == []
  with pytest.raises(ValueError, match="unknown operator"):
    made.retrieve("zebra", where={"anything": {"$ge": 1}})


def test_documents_added_later_are_filtered_by_names_that_only_earlier_ones_have(retriever):
  retriever.retrieve("zebra", 1)
  retriever.add_documents([Document("new", "Quokka", "The quokka lives near the marsh.")])
  assert ids(retriever.retrieve("zebra marsh", 1, where={"n": {"$lt": 5}})) == ["zebra-marsh"]


def test_a_retriever_of_ones_own(tmp_path):
  @register("longest")
  class Longest(BaseRetriever):
    """Finds the longest texts, whatever the query."""

    def __init__(self):
      super().__init__()
      self.lengths = {}

    def _add(self, documents):
      self.lengths |= {document.id: len(document.text) for document in documents}

    def _delete(self, ids):
      for id in ids:
        del self.lengths[id]

    def _search(self, queries, top_k, where):
      best = sorted(self.lengths, key=lambda id: -self.lengths[id])[:top_k]
      return Hits([best] * len(queries), [[float(self.lengths[id]) for id in best]] * len(queries))

  made = create("longest")
  made.add_documents([Document("a", content="xx"), Document("b", content="xxxx")])
  assert [(d.id, d.score) for d in made.retrieve("?")] == [("b", 4.0), ("a", 2.0)]
  made.save(tmp_path / "kb")
  assert load(tmp_path / "kb").retrieve("?") == made.retrieve("?")


def test_a_subclass_that_lacks_a_method_cannot_be_made():
  class Half(BaseRetriever):
    def _add(self, documents):
      """Index nothing."""

  with pytest.raises(TypeError, match="abstract"):
    Half()
  with pytest.raises(ValueError, match=r"no retriever is called 'nope'; one of bm25, dense, hybrid"):
    create("nope")


def test_damage_is_named(retriever, tmp_path):
  folder = tmp_path / "kb"
  retriever.save(folder)
  documents = folder / "data-1" / "documents-00000.array_record"
  original = documents.read_bytes()
  documents.write_bytes(original[:100] + bytes([original[100] ^ 1]) + original[101:])
  with pytest.raises(FolderError, match=r"documents-00000\.array_record is not what was written"):
    load(folder)
  documents.unlink()
  with pytest.raises(FolderError, match=r"documents-00000\.array_record is missing"):
    load(folder)
  documents.write_bytes(original)
  load(folder)
  (folder / "index.pkl").write_bytes(b"")
  with pytest.raises(FolderError, match=r"index\.pkl is a pickle"):
    load(folder)
  (folder / "index.pkl").unlink()
  manifest = folder / "manifest.json"
  whole = manifest.read_text()
  for text, message in (
    ('{"format": 99}', "has format 99, this version reads 1"),
    ('{"format": 1', r"manifest\.json is damaged"),
    ('{"format": 1, "generation": 1}', r"manifest\.json is damaged"),
    (whole.replace("retriever.json", "../../../secret.json"), "lies outside of"),
  ):
    manifest.write_text(text)
    with pytest.raises(FolderError, match=message):
      load(folder)
  retriever.save(folder)  # what is damaged can be replaced
  assert ids(load(folder).retrieve("zebra desert", 3)) == ids(retriever.retrieve("zebra desert", 3))
  with pytest.raises(FileNotFoundError, match="is no knowledge base"):
    load(tmp_path / "nowhere")


def test_a_save_that_fails_leaves_the_old_folder(tmp_path, monkeypatch):
  made = SimpleRetriever()
  made.add_documents(DOCUMENTS[:5])
  made.save(tmp_path / "kb")
  made.add_documents(DOCUMENTS[5:10])

  def full(self, folder):
    (folder / "half").write_text("x")
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(SimpleRetriever, "_save", full)
  with pytest.raises(OSError, match="No space"):
    made.save(tmp_path / "kb")
  assert len(load(tmp_path / "kb")) == 5
  assert sorted(path.name for path in (tmp_path / "kb").iterdir()) == [".lock", "data-1", "manifest.json"]
