"""Folders of questions: they are read unchanged, and mistakes in them are named."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.tasks.datasets import Passage, Question, joined, read_qa_folder

CORPUS = [
  {"_id": "p0", "title": "Paris", "text": "Paris lies on the Seine."},
  {"_id": "p1", "title": "France", "text": "The capital of France is Paris."},
  {"_id": "p2", "title": "France", "text": "France borders Spain."},
]
HOTPOT = {
  "_id": "q0",
  "question": "Which river crosses the capital of France?",
  "answer": "Seine",
  "supporting_facts": [["Paris", 0], ["France", 0], ["Paris", 1]],
}
MUSIQUE = {
  "id": "q1",
  "question": "Which river crosses the capital of that country?",
  "answer": "the Seine",
  "answer_aliases": ["Seine", "the Seine"],
  "answerable": True,
  "paragraphs": [
    {"idx": 7, "title": "Paris", "paragraph_text": "Paris lies on the Seine."},
    {"idx": 3, "title": "France", "paragraph_text": "The capital of France is Paris."},
    {"idx": 4, "title": "France", "paragraph_text": "France borders Spain."},
  ],
  "question_decomposition": [
    {"question": "capital?", "answer": "Paris", "paragraph_support_idx": 3},
    {"question": "river of #1?", "answer": "the Seine", "paragraph_support_idx": 7},
  ],
}
QRELS = ["q0\tp0\t1", "q0\tp1\t1"]


def write(folder, corpus=CORPUS, questions=(HOTPOT,), qrels=QRELS):
  (folder / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in corpus))
  (folder / "questions.json").write_text(json.dumps(list(questions)))
  (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *qrels, ""]))
  return folder


def test_hotpotqa_names_come_before_the_order_of_the_supporting_facts(tmp_path):
  passages, [question], unanswered = read_qa_folder(write(tmp_path))
  assert passages == [Passage(record["_id"], record["title"], record["text"]) for record in CORPUS]
  # the question names France, so a reader begins there although the first supporting fact is about Paris
  assert question == Question("q0", HOTPOT["question"], ("Seine",), (1, 0))
  assert unanswered == 0


def test_hotpotqa_keeps_the_order_of_the_facts_where_the_question_names_all_or_none(tmp_path):
  for text in ("Which river?", "Which river is in France and in Paris?"):
    folder = write(tmp_path, questions=[HOTPOT | {"question": text}])
    assert read_qa_folder(folder).questions[0].gold == (0, 1)


def test_musique_follows_the_decomposition_and_knows_aliases(tmp_path):
  # two passages are titled France: the text decides
  folder = write(tmp_path, questions=[MUSIQUE], qrels=["q1\tp0\t1", "q1\tp1\t1", "q1\tp2\t0"])
  assert read_qa_folder(folder).questions == [Question("q1", MUSIQUE["question"], ("the Seine", "Seine"), (1, 0))]


def test_questions_without_answers_are_left_out_and_counted(tmp_path):
  unknown = [
    HOTPOT | {"_id": "a", "answer": ""},
    HOTPOT | {"_id": "b", "answer": None},
    MUSIQUE | {"answerable": False},
  ]
  folder = write(tmp_path, questions=[*unknown, HOTPOT])
  data = read_qa_folder(folder)
  assert [question.id for question in data.questions] == ["q0"]
  assert data.unanswered == 3
  with pytest.raises(ValueError, match=r"none of the 3 questions of .* has an answer"):
    read_qa_folder(write(tmp_path, questions=unknown, qrels=[]))


def test_a_missing_folder_or_file_is_named_with_what_belongs_there(tmp_path):
  with pytest.raises(
    FileNotFoundError, match=r"nowhere lacks .*should contain corpus\.jsonl .*qrels\.tsv .*questions\.json"
  ):
    read_qa_folder(tmp_path / "nowhere")
  (write(tmp_path) / "qrels.tsv").unlink()
  with pytest.raises(FileNotFoundError, match=r"lacks qrels\.tsv;"):
    read_qa_folder(tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"corpus": []}, r"corpus\.jsonl holds no document"),
    ({"corpus": [*CORPUS, CORPUS[1]]}, r"corpus\.jsonl, line 4: the id 'p1' occurs twice"),
    ({"corpus": [{"_id": "p0", "title": "no text"}]}, "line 1: _id, title and text must be strings"),
    ({"questions": [HOTPOT, HOTPOT]}, "question id 'q0' occurs twice"),
    ({"questions": [{"question": "no id"}]}, "record 0: the id and the question must be strings"),
    ({"questions": [{"_id": "q0", "question": "?", "answer": "a"}]}, "question q0: KeyError.'supporting_facts'"),
    ({"qrels": [*QRELS, "q0\tp9\t1"]}, r"qrels\.tsv, line 4: there is no document 'p9'"),
    ({"qrels": ["q9\tp0\t1"]}, r"qrels\.tsv, line 2: there is no query 'q9'"),
    ({"qrels": ["q0 p0 1"]}, r"qrels\.tsv, line 2: 'q0 p0 1' is not query-id, corpus-id and score"),
    ({"qrels": ["q0\tp0\tyes"]}, r"qrels\.tsv, line 2"),
    ({"qrels": ["q0\tp0\tnan"]}, r"qrels\.tsv, line 2"),
    ({"qrels": [*QRELS, QRELS[0]]}, r"qrels\.tsv, line 4: query 'q0' and document 'p0' are judged twice"),
    ({"questions": [HOTPOT | {"answer_aliases": "Seine"}]}, "record 0: answer must be a string, and answer_aliases a"),
    ({"questions": [HOTPOT | {"answer_aliases": 3}]}, "record 0: answer must be a string, and answer_aliases a"),
    ({"questions": [HOTPOT | {"answer": {"a": 1}}]}, "record 0: answer must be a string"),
    ({"questions": [HOTPOT | {"answer": 0}]}, "record 0: answer must be a string"),
    ({"questions": [HOTPOT | {"answerable": "false"}]}, "record 0: answerable is 'false', not true or false"),
    ({"questions": [HOTPOT | {"supporting_facts": [["Paris", 0, 1]]}]}, "question q0: ValueError"),
    ({"questions": [HOTPOT | {"supporting_facts": [[3, 0]]}]}, "question q0: AttributeError"),
    ({"corpus": [{"_id": "p0", "title": 0, "text": "x"}]}, "line 1: _id, title and text must be strings"),
    ({"qrels": []}, r"question q0 is supported by \[\]"),
    ({"qrels": ["q1\tp0\t1", "q1\tp2\t1"], "questions": [MUSIQUE]}, r"question q1 is supported by \['p0', 'p2'\]"),
  ],
)
def test_contradictions_are_errors_that_name_the_place(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    read_qa_folder(write(tmp_path, **change))


def test_questions_that_are_no_json_are_an_error_that_names_the_file(tmp_path):
  (write(tmp_path) / "questions.json").write_bytes(b'[{"_id": "\xff"}]')
  with pytest.raises(ValueError, match=r"questions\.json: .*expected a list of records"):
    read_qa_folder(tmp_path)


@pytest.mark.parametrize(("name", "n_passages"), [("multihop_hotpotqa", 994), ("multihop_musique", 1890)])
def test_real_folders_resolve_every_gold_passage(shared_data, name, n_passages):
  folder = shared_data / name
  passages, questions, unanswered = read_qa_folder(folder)
  assert (len(passages), len(questions), unanswered) == (n_passages, 100, 0)
  assert len({question.id for question in questions}) == 100
  assert all(2 <= len(set(question.gold)) == len(question.gold) <= 4 for question in questions)
  assert all(0 <= slot < n_passages for question in questions for slot in question.gold)
  # most answers that are no yes or no can be read in a gold passage, an answer of another question cannot
  said = [" ".join(passages[slot].text for slot in question.gold).lower() for question in questions]
  own = sum(question.answers[0].lower() in text for question, text in zip(questions, said, strict=True))
  other = sum(
    question.answers[0].lower() in text for question, text in zip(questions, said[1:] + said[:1], strict=True)
  )
  assert own > 80
  assert other < 20


def test_folders_are_joined_by_what_their_passages_say(tmp_path):
  one, other = read_qa_folder(write(tmp_path)), read_qa_folder(write(tmp_path))
  extra = Passage("p0", "Another", "that shares an id alone")
  other = other._replace(
    passages=[extra, *other.passages],
    questions=[
      question._replace(text="Where?", gold=tuple(i + 1 for i in question.gold)) for question in other.questions
    ],
    unanswered=2,
  )
  both = joined([one, other])
  assert both.passages == [*one.passages, extra]
  assert [question.gold for question in both.questions] == [one.questions[0].gold] * 2
  assert both.unanswered == one.unanswered + 2
  assert joined([one]) == one
  with pytest.raises(ValueError, match=r"1 questions stand in two folders, such as .*: give each question once"):
    joined([one, both])


def test_hops_of_real_musique_questions_follow_the_decomposition(shared_data):
  folder = shared_data / "multihop_musique"
  passages, questions, _ = read_qa_folder(folder)
  records = {record["id"]: record for record in json.loads((folder / "questions.json").read_text())}
  for question in questions:
    steps = records[question.id]["question_decomposition"]
    hops = int(question.id[0])  # "3hop1__…"
    assert len(question.gold) == len(steps) == hops
    for slot, step in zip(question.gold, steps, strict=True):
      assert step["answer"].lower() in f"{passages[slot].title} {passages[slot].text}".lower()


def test_judgements_without_headings_are_an_error(tmp_path):
  """Else the first of them would be taken for the headings."""
  (write(tmp_path) / "qrels.tsv").write_text("\n".join(QRELS))
  with pytest.raises(ValueError, match=r"qrels\.tsv, line 1: .* stands where the headings are expected"):
    read_qa_folder(tmp_path)


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.sampled_from(["Paris", "Seine", "\ud800", ""]),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["idx", "title", "x"]), inner),
  max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(base=st.sampled_from([HOTPOT, MUSIQUE]), changes=st.dictionaries(st.sampled_from([*HOTPOT, *MUSIQUE]), JSON))
def test_any_record_is_a_question_or_an_error_that_names_the_file(tmp_path_factory, base, changes):
  folder = write(tmp_path_factory.getbasetemp(), questions=[base | changes], qrels=[])
  with pytest.raises(ValueError, match=r"questions"):  # at best it has no passage
    read_qa_folder(folder)
  (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tp0\t1\nq0\tp1\t1\n")
  try:
    understood = all(
      isinstance(answer, str) for question in read_qa_folder(folder).questions for answer in question.answers
    )
  except ValueError as error:
    understood = str(folder) in str(error)
  assert understood


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(["corpus.jsonl", "qrels.tsv", "questions.json"]), content=st.binary(max_size=60))
def test_any_bytes_are_an_error_that_names_the_file(tmp_path_factory, name, content):
  folder = write(tmp_path_factory.getbasetemp())
  (folder / name).write_bytes(content)
  with pytest.raises(ValueError, match=str(folder)):
    read_qa_folder(folder)


def test_nesting_and_halves_of_surrogate_pairs_are_errors(tmp_path):
  for content in ("[" * 100_000, json.dumps([HOTPOT | {"question": "\ud800"}])):
    (write(tmp_path) / "questions.json").write_text(content)
    with pytest.raises(ValueError, match=r"questions\.json: .*; expected a list of records"):
      read_qa_folder(tmp_path)
