"""Several searches for one question: later queries come from what was found; the budget is shared."""

import pytest

from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.multi_hop import MultiHopRetriever, add_names, add_passage

QUESTION = "What is the port of the ally of Avalor?"
# the document that answers shares no word with the question
DOCUMENTS = [
  Document("ally", "Avalor", "The ally of Avalor, since the war, is Bretan."),
  Document("port", "Bretan", "Ships land in Cadiz when they reach Bretan."),
  *(Document(f"other{i}", f"Town {i}", f"The ally of town {i} is a port {i}.") for i in range(8)),
]


def ids(found):
  return [document.id for document in found]


def filled(*arguments, **settings):
  retriever = MultiHopRetriever(*arguments, **settings)
  retriever.add_documents(DOCUMENTS)
  return retriever


def test_the_second_search_finds_what_the_question_does_not_name():
  found = filled(hops=2).retrieve(QUESTION, 4)
  assert "port" in ids(found)
  assert "port" not in ids(filled(hops=1).retrieve(QUESTION, 4))
  [said] = next(document for document in found if document.id == "port").components
  assert said["hop"] == 1
  assert said["query"] == f"{QUESTION} Bretan"
  assert {document.components[0]["query"] for document in found} == {QUESTION, f"{QUESTION} Bretan"}


def test_a_rule_may_ask_with_the_whole_passage():
  found = filled(write_query="add_passage").retrieve(QUESTION, 4)
  assert {document.components[0]["query"] for document in found} == {QUESTION, f"{QUESTION} {DOCUMENTS[0].text}"}
  assert add_passage(QUESTION, [[]]) is None


def test_one_search_is_the_retriever_alone():
  plain = BM25Retriever()
  plain.add_documents(DOCUMENTS)
  assert ids(filled(hops=1).retrieve(QUESTION, 5)) == ids(plain.retrieve(QUESTION, 5))


@pytest.mark.parametrize(("top_k", "hops", "sizes"), [(5, 2, [3, 2]), (7, 3, [3, 2, 2]), (1, 4, [1]), (2, 3, [1, 1])])
def test_the_budget_is_shared_and_no_document_comes_twice(top_k, hops, sizes):
  found = filled(write_query=lambda question, read: f"ally {len(read)}", hops=hops).retrieve("ally of town", top_k)
  assert len(set(ids(found))) == len(found) == top_k
  hop_of = [document.components[0]["hop"] for document in found]
  assert [hop_of.count(hop) for hop in range(len(sizes))] == sizes
  assert hop_of[: len(sizes)] == list(range(len(sizes)))  # the best of each search come first
  assert [document.score for document in found] == [1 / (1 + place) for place in range(top_k)]


def test_a_rule_may_stop():
  retriever = filled(write_query=lambda question, read: None, hops=3)
  assert {document.components[0]["hop"] for document in retriever.retrieve("ally of town", 9)} == {0}
  assert len(retriever.retrieve("ally of town", 9)) == 3


def test_questions_of_a_batch_do_not_mix():
  retriever, others = filled(hops=2), ["ally of town 3", "Where do ships land?"]
  alone = [ids(retriever.retrieve(query, 4)) for query in (QUESTION, *others)]
  assert [ids(found) for found in retriever.retrieve_batch([QUESTION, *others], 4)] == alone


def test_a_filter_holds_in_every_search():
  found = filled(hops=2).retrieve(QUESTION, 4, where=lambda fields: fields["id"] != "port")
  assert "port" not in ids(found)


@pytest.mark.parametrize(
  ("read", "query"),
  [
    (
      [[Document("a", "Bretan", "It lies in the North Sea near Port of Spain.")]],
      "Who? Bretan It North Sea Port of Spain",
    ),
    ([[Document("a", content="no capitals here")]], "Who? no capitals here"),
    ([[Document("a", "Bretan", "x")], [Document("b", "Cadiz", "Bretan")]], "Who? Cadiz"),
    ([[Document("a", content="Who?")]], None),
    ([[]], None),
  ],
)
def test_new_names_are_added_to_the_question(read, query):
  assert add_names("Who?", read) == query


def test_a_folder_keeps_the_rule_but_no_function(tmp_path):
  retriever = filled(hops=2)
  retriever.save(tmp_path / "rule")
  assert ids(load(tmp_path / "rule").retrieve(QUESTION, 4)) == ids(retriever.retrieve(QUESTION, 4))
  own = lambda question, read: "ships"
  retriever = filled(write_query=own)
  retriever.save(tmp_path / "own")
  with pytest.raises(ValueError, match=r"saved with a function; give it again: load\(folder, write_query="):
    load(tmp_path / "own")
  assert ids(load(tmp_path / "own", write_query=own).retrieve("ally", 4)) == ids(retriever.retrieve("ally", 4))


@pytest.mark.parametrize(
  ("settings", "error"),
  [
    (
      {"write_query": "names"},
      "no rule for queries is called 'names'; add_names, add_passage, or a function of your own",
    ),
    ({"hops": 0}, "hops"),
    ({"retriever": "bm52"}, "no retriever is called 'bm52'"),
  ],
)
def test_wrong_settings_are_refused(settings, error):
  with pytest.raises(ValueError, match=error):
    MultiHopRetriever(**settings)
