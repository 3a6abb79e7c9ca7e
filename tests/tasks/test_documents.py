"""Questions over documents that move: the files are read, and only the gold document changes its place."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.tasks.documents import DocumentQuestion, positions, prompt, read_questions, with_gold_at

JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=4),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["title", "text", "x"]), inner),
  max_leaves=6,
)
QUESTION = DocumentQuestion("Who?", ("Ada",), "gold", ("a", "b", "c"))
PASSAGES = {
  "question": "who wrote it", "answers": ["Ada", "Ada L."], "gold": {"title": "T", "text": "Ada wrote it."},
  "distractors": [{"title": "U", "text": "Nobody."}],
}  # fmt: skip
PAIRS = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k2", "value": "v2"}


def write(path, *records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_both_layouts_are_read(tmp_path):
  write(tmp_path / "nq.jsonl", PASSAGES)
  write(tmp_path / "kv.jsonl", PAIRS)
  found = read_questions(tmp_path)
  assert found["nq"] == [
    DocumentQuestion("who wrote it", ("Ada", "Ada L."), "(Title: T) Ada wrote it.", ("(Title: U) Nobody.",))
  ]
  [pairs] = found["kv"]
  assert (pairs.answers, pairs.gold, pairs.others) == (("v2",), '"k2": "v2"', ('"k1": "v1"', '"k3": "v3"'))
  assert '"k2"' in pairs.question


@pytest.mark.parametrize(
  "record",
  [
    *[{"question": "who"}, {**PASSAGES, "answers": []}, {**PAIRS, "key": "k9"}, {**PAIRS, "value": "v1"}],
    *[{**PASSAGES, "answers": "Ada"}, {**PASSAGES, "question": 3}, {**PASSAGES, "gold": {"title": None, "text": "x"}}],
    *[{**PASSAGES, "distractors": {"title": "U"}}, {**PASSAGES, "distractors": ["U"]}, {**PASSAGES, "gold": "x"}],
    *[{**PAIRS, "value": 3}, {**PAIRS, "ordered_kv_records": [["k2", "v2", "x"]]}, {**PAIRS, "ordered_kv_records": 3}],
    {**PAIRS, "ordered_kv_records": [["k2", "v1"], ["k2", "v2"]]},
  ],
)
def test_another_record_is_named(tmp_path, record):
  write(tmp_path / "a.jsonl", PASSAGES, record)
  with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*expected question, answers"):
    read_questions(tmp_path)


def test_nothing_to_read_is_said(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"holds no questions; give a \.jsonl file"):
    read_questions(tmp_path)
  (tmp_path / "a.jsonl").write_text("")
  with pytest.raises(ValueError, match=r"a\.jsonl holds no questions"):
    read_questions(tmp_path)


def test_only_the_document_that_answers_moves():
  lists = [with_gold_at(QUESTION, 3, place) for place in positions(3, 5)]
  assert lists == [["gold", "a", "b"], ["a", "gold", "b"], ["a", "b", "gold"]]
  assert positions(20, 5) == [0, 5, 10, 14, 19]
  with pytest.raises(ValueError, match="5 documents, one of them at 0, from 3 others"):
    with_gold_at(QUESTION, 5, 0)


def test_prompts_number_the_documents():
  said = prompt(QUESTION, ["one", "two"])
  assert "\n[1] one\n[2] two\n" in said
  assert said.endswith("Question: Who?")
  assert "documents" not in prompt(QUESTION, [])


def test_the_shared_files_are_read(shared_data):
  nq = read_questions(shared_data / "position_recall_nq")
  kv = read_questions(shared_data / "lost_in_the_middle")
  for files, others in ((nq, 29), (kv, 74)):
    [questions] = files.values()
    assert len(questions) == 100
    assert all(len(question.others) == others for question in questions)
  [questions] = nq.values()
  assert all(any(answer in question.gold for answer in question.answers) for question in questions)


@settings(max_examples=200, deadline=None)
@given(base=st.sampled_from([PASSAGES, PAIRS]), changes=st.dictionaries(st.sampled_from([*PASSAGES, *PAIRS]), JSON))
def test_any_record_is_a_question_or_an_error_with_its_line(tmp_path_factory, base, changes):
  path = tmp_path_factory.getbasetemp() / "any.jsonl"
  write(path, base | changes)
  try:
    [[question]] = read_questions(path).values()
    understood = all(isinstance(text, str) for text in (question.question, question.gold, *question.answers))
  except ValueError as error:
    understood = "any.jsonl, line 1" in str(error)
  assert understood
