"""Audits: the gold passages that a corpus lacks are named, and their questions left out."""

import pytest

from selfrag_jax import Document
from selfrag_jax.retrieval.beir import read_corpus
from selfrag_jax.tasks.audit import audit_corpus, complete_only, with_texts
from selfrag_jax.tasks.qa import load_task
from selfrag_jax.tasks.task import Task

PARIS = {"title": "Paris", "content": "Paris lies on the Seine."}
FRANCE = {"title": "France", "content": "The capital of France is Paris."}
SPAIN = {"title": "France", "content": "France borders Spain."}
CORPUS = [Document(str(i), **passage) for i, passage in enumerate((PARIS, FRANCE))]
EXAMPLES = [
  {"id": "river", "answers": ("the Seine",), "gold": (PARIS, FRANCE)},
  {"id": "border", "answers": ("Spain",), "gold": (FRANCE, SPAIN)},
  {"id": "sea", "answers": ("Channel", "sei"), "gold": ({"title": "Paris"},)},
  {"id": "is it", "answers": ("no",), "gold": (PARIS,)},
  {"id": "free", "answers": ("42",), "gold": ()},
]


def test_the_missing_passages_are_named_and_their_questions_left_out():
  # the corpus has another passage of the same title: the text decides
  kept, audit = complete_only(Task("facts", EXAMPLES, dict), CORPUS)
  assert [conversation["id"] for conversation in kept] == ["river", "sea", "is it", "free"]
  assert audit == audit_corpus(EXAMPLES, CORPUS)
  assert audit.missing == {"border": ["France"]}
  assert (audit.questions, audit.complete, audit.ungrounded) == (4, 3, 1)
  assert str(audit) == (
    "3 of 4 questions have all gold passages; 1 left out: border (France); "
    "an answer stands in the gold passages of 1 of 2; 1 more name no passage"
  )


def test_answers_are_looked_for_in_whole_words_and_yes_or_no_is_not_looked_for():
  audit = audit_corpus(EXAMPLES, CORPUS)  # "sei" is no word of Paris, and "no" is said nowhere
  assert (audit.extractive, audit.readable) == (2, 1)
  said = Document("2", "Paris", "Paris is far from the Channel")
  for corpus in ([*CORPUS, said], [said, *CORPUS]):
    assert audit_corpus(EXAMPLES, corpus).readable == 2  # named by its title alone: any passage may say it


def test_white_space_and_the_underscores_of_addresses_make_no_other_passage():
  example = {"id": "q", "answers": ("x",), "gold": ({"title": "New_York", "content": "A  city.\nBig."},)}
  assert audit_corpus([example], [Document("0", "New York ", "A city.Big.")]).complete == 1
  for other in (Document("0", "York", "A city. Big."), Document("0", "New York", "A city. big.")):
    with pytest.raises(ValueError, match=r"none of the 1 gold passages .* \('q', \['New_York'\]\)"):
      audit_corpus([example], [other])


def test_a_long_list_of_questions_is_cut_in_the_summary_only():
  many = [{"id": f"q{i}", "answers": (), "gold": (SPAIN,)} for i in range(5)]
  audit = audit_corpus([*many, EXAMPLES[0]], CORPUS)
  assert len(audit.missing) == 5
  assert "left out: q0 (France), q1 (France), q2 (France), and 2 more;" in str(audit)


def test_a_corpus_without_any_gold_passage_is_an_error():
  with pytest.raises(ValueError, match="none of the 6 gold passages of 4 questions is in the corpus"):
    audit_corpus(EXAMPLES, [Document("0", "Oslo", "Oslo is in Norway.")])
  with pytest.raises(ValueError, match="none of the 1 questions names a gold passage"):
    audit_corpus(EXAMPLES[4:], CORPUS)
  with pytest.raises(ValueError, match="no question of facts has all its gold passages"):
    complete_only(Task("facts", EXAMPLES[1:2], dict), CORPUS)


@pytest.mark.parametrize(("name", "readable"), [("hotpotqa", (91, 91)), ("musique", (97, 99))])
def test_real_corpora_of_multi_hop_questions_are_complete(shared_data, name, readable):
  folder = shared_data / f"multihop_{name}"
  task, corpus = load_task(name, folder / "questions.json", split="validation"), read_corpus(folder / "corpus.jsonl")
  audit = audit_corpus(task, corpus)
  assert (audit.questions, audit.complete, dict(audit.missing)) == (100, 100, {})
  assert (audit.readable, audit.extractive) == readable
  gold = {(passage["title"], passage["content"]) for passage in task[0]["gold"]}
  kept, audit = complete_only(task, [document for document in corpus if document.title not in dict(gold)])
  assert task[0]["id"] in audit.missing
  assert len(kept) == audit.complete < 100


def test_the_real_corpus_of_squad_has_the_paragraph_of_every_question(shared_data):
  task = load_task("squad_v2", shared_data / "qa_squad_v2_dev_half", split="validation")
  audit = audit_corpus(task, read_corpus(shared_data / "ir_squad_dev_half" / "corpus.jsonl"))
  assert (audit.questions, audit.complete, audit.extractive) == (6078, 6078, 2908)
  assert audit.readable > 0.98 * audit.extractive


def test_a_passage_that_is_named_by_its_title_gets_its_text():
  documents = [Document("0", "New York", "A city."), Document("1", "Oslo", "Another one.")]
  gold = [{"title": "New_York"}, {"title": "Oslo", "content": "Its own text."}, {"title": "Rome"}]
  [example] = with_texts([{"id": "a", "gold": gold}], documents)
  assert [passage["content"] for passage in example["gold"]] == ["A city.", "Its own text.", ""]
  assert example["id"] == "a"
