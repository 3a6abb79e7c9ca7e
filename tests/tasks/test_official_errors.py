"""Files of another format than the official one: every other content is an error that names the place."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.tasks.qa import load_task
from tests.tasks.official_files import FILES, load, write


def changed(content, *path):
  """Return a copy of the content in which the value at a path is another; a last value of None removes it."""
  *keys, last, value = path
  result = place = json.loads(json.dumps(content))  # the records of a fixture may be one object
  for key in keys:
    place = place[key]
  if value is None:
    del place[last]
  else:
    place[last] = value
  return result


QUESTION = ("data", 0, "paragraphs", 0, "qas", 1)


@pytest.mark.parametrize(
  ("name", "path", "message"),
  [
    ("squad", ("version", "v2.0"), r"dev-v1\.1\.json: version is 'v2\.0', this data set has '1\.1'"),
    ("squad", ("version", None), r"version is None"),
    ("squad", ("data", None), r"dev-v1\.1\.json: data is None"),
    ("squad", ("data", 0, "paragraphs", "x"), r"article 0: paragraphs is 'x', it must be a list"),
    ("squad", ("data", 0, "paragraphs", 0, "qas", None), r"article 0, paragraph 0: qas is None"),
    ("squad", ("data", 0, "title", None), r"article 0, paragraph 0, question 0: .* here title is None"),
    ("squad", ("data", 0, "paragraphs", 0, "context", 3), r"question 0: .* here context is 3, it must be a text"),
    ("squad_v2", (*QUESTION, 7), r"question 1: .* here id is None"),
    ("squad_v2", (*QUESTION, "question", None), r"question 1: .* here question is None"),
    ("squad_v2", (*QUESTION, "answers", None), r"question 1: .* here answers is None"),
    (
      "squad_v2",
      (*QUESTION, "is_impossible", "yes"),
      r"question 1: .* is_impossible is 'yes', it must be true or false",
    ),
    ("squad_v2", (*QUESTION, "is_impossible", False), r"question 1: .* answers is empty"),
    ("squad_v2", (*QUESTION, "answers", [{"text": "x"}]), r"question 1: .* but is_impossible is true"),
    ("squad_v2", (*QUESTION, "answers", ["x"]), r"question 1: .* here text is None"),
    ("hotpotqa", (1, 7), r"record 1: .* here answer is None"),
    ("hotpotqa", (1, "_id", None), r"record 1: .* here the id and the question must be"),
    ("hotpotqa", (1, "answer", None), r"record 1: .* here answer is None"),
    ("hotpotqa", (1, "answer", " "), r"record 1: .* here answer is empty"),
    ("hotpotqa", (1, "supporting_facts", None), r"record 1: .* here supporting_facts is None"),
    ("hotpotqa", (1, "supporting_facts", 0, ["Paris"]), r"record 1: .* here supporting_facts has \['Paris'\]"),
    ("hotpotqa", (1, "context", None), r"record 1: .* here context is None"),
    ("hotpotqa", (1, "context", 0, ["Paris", "text"]), r"record 1: .* here context has \['Paris', 'text'\]"),
    ("hotpotqa", (1, "context", 0, ["Paris", [3]]), r"record 1: .* here context has \['Paris', \[3\]\]"),
    ("2wikimultihopqa", (1, "answer", None), r"dev\.json, record 1: .* here answer is None"),  # as in its test split
    ("2wikimultihopqa", (2, "supporting_facts", None), r"record 2: .* here supporting_facts is None"),
    ("2wikimultihopqa", (0, "context", 1, ["Ann Lee", "text"]), r"record 0: .* here context has \['Ann Lee', 'text'\]"),
    ("musique", (1, "id", None), r"line 2: .* here the id and the question must be"),
    ("musique", (1, "answer", None), r"line 2: .* here answer is None"),
    ("musique", (1, "answer_aliases", None), r"line 2: .* here answer_aliases is None"),
    ("musique", (1, "answerable", None), r"line 2: .* here answerable is None"),
    ("musique", (2, "paragraphs", 0, "idx", None), r"line 3: .* here idx is None"),
    ("musique", (2, "paragraphs", 0, "title", None), r"line 3: .* here title is None"),
    ("musique", (2, "paragraphs", 0, "paragraph_text", None), r"line 3: .* here paragraph_text is None"),
    ("musique", (2, "question_decomposition", None), r"line 3: .* here question_decomposition is None"),
    ("musique", (2, "question_decomposition", 0, "x"), r"line 3: .* here paragraph_support_idx is None"),
    ("musique", (2, "paragraphs", 0, "idx", 5), r"line 3: .* here paragraph_support_idx is 7, it must be"),
    ("nq_open", (1, "question", None), r"line 2: .* here question is None"),
    ("nq_open", (1, "answer", "Ann"), r"line 2: .* here answer is 'Ann', it must be a list"),
    ("nq_open", (1, "answer", [3]), r"line 2: .* here answer is \[3\], it must be a list of texts"),
    ("nq_open", (1, "answer", []), r"line 2: .* here answer is empty"),
    ("nq_open", (1, 7), r"line 2: a JSON object was expected"),
    ("triviaqa", ("Data", None), r"unfiltered-web-dev\.json: Data is None"),
    ("triviaqa", ("Data", 1, "QuestionId", None), r"record 1: .* here QuestionId is None"),
    ("triviaqa", ("Data", 1, "Question", None), r"record 1: .* here Question is None"),
    ("triviaqa", ("Data", 1, "Answer", None), r"record 1: .* here Answer is None, it must be an object"),
    ("triviaqa", ("Data", 1, "Answer", "Value", None), r"record 1: .* here Value is None"),
    ("triviaqa", ("Data", 1, "Answer", "Aliases", "x"), r"record 1: .* here Aliases is 'x'"),
    ("popqa", (0, 2, "q"), r"line 2: .* here question is None"),
    ("popqa", (0, 0, "0"), r"line 2: .* here id is None"),
    ("popqa", (0, 3, None), r"line 2: 4 columns stand below 3 headings"),
    ("popqa", (2, 3, "politician"), r"line 3: .* here possible_answers is 'politician', it must be a list of texts in"),
    ("popqa", (2, 3, "[3]"), r"line 3: .* here possible_answers is '\[3\]'"),
    ("popqa", (2, 3, "[]"), r"line 3: .* here possible_answers is empty"),
    ("popqa", (2, 3, None), r"line 3: 3 columns stand below 4 headings"),
    ("gsm8k", (1, "question", None), r"line 2: a line of GSM8K .* here question is None"),
    ("gsm8k", (1, "answer", 5), r"line 2: .* here answer is 5"),
    ("gsm8k", (1, "answer", "It is 5"), r"line 2: .* here answer ends with 'It is 5'"),
    ("gsm8k", (1, "answer", "5 #### five"), r"line 2: .* here answer ends with '5 #### five'"),
    ("mmlu", (0, ["question", *"ABCD", "answer"]), r"line 1: .* here the last column is 'answer'"),  # headings
    ("mmlu", (1, 5, "E"), r"line 4: .* here the last column is 'E', it must be A, B, C or D"),
    ("mmlu", (1, 5, ""), r"line 4: .* here the last column is ''"),
    ("mmlu", (1, 5, None), r"line 4: .* has 5 columns"),
    ("arc_easy", (1, "id", None), r"line 2: .* here id is None"),
    ("arc_easy", (1, "question", "What?"), r"line 2: .* here question is 'What\?', it must be an object"),
    ("arc_easy", (1, "question", "stem", None), r"line 2: .* here stem is None"),
    ("arc_easy", (1, "question", "choices", None), r"line 2: .* here choices is None"),
    ("arc_easy", (1, "question", "choices", 0, "text", None), r"line 2: .* here text is None"),
    ("arc_easy", (1, "question", "choices", 0, "label", None), r"line 2: .* here label is None"),
    ("arc_easy", (1, "answerKey", None), r"line 2: .* here answerKey is None"),
    ("arc_easy", (1, "answerKey", "5"), r"line 2: .* here answerKey is '5', it must be one of the labels \['1'"),
    ("arc_easy", (1, "question", "choices", 0, "label", "2"), r"line 2: .* here answerKey is '2', it must be one of"),
    ("smoltalk", (1, "messages", None), r"line 2: .* here messages is None"),
    ("smoltalk", (1, "messages", 0, "role", "user"), r"line 2: .* here messages has the roles \['user', 'user'"),
    ("smoltalk", (1, "messages", 2, None), r"line 2: .* here messages has the roles \['system', 'user'\]"),
    ("smoltalk", (1, "messages", 2, "role", "tool"), r"line 2: .* here messages has the roles"),
    ("smoltalk", (1, "messages", 1, "content", None), r"line 2: .* here content is None"),
  ],
)
def test_another_format_is_an_error_that_names_the_field_and_the_place(tmp_path, name, path, message):
  with pytest.raises(ValueError, match=message) as caught:
    load(tmp_path, name, changed(FILES[name][2], *path))
  assert FILES[name][0] in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_examples_or_of_another_kind_is_an_error_that_names_it(tmp_path, name):
  file = write(tmp_path, name)
  for content in (b"", b"\xff\xfe", b"[]", b"{}", b"3", b"version https://git-lfs.github.com/spec/v1\n"):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=file.name):
      load_task(name, file, split=FILES[name][1])


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.sampled_from(["Paris", "#### 5", '["x"]', "A", ""]),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "title", "label"]), inner),
  max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(["hotpotqa", "musique", "nq_open", "gsm8k", "arc_easy", "smoltalk"]), data=st.data())
def test_any_record_is_an_example_or_an_error_that_names_the_file(tmp_path_factory, name, data):
  record = FILES[name][2][0]
  content = [record | data.draw(st.dictionaries(st.sampled_from(sorted(record)), JSON, max_size=2))]
  said = FILES[name][0]
  try:
    load(tmp_path_factory.getbasetemp(), name, content)
  except ValueError as error:
    said = str(error)
  assert FILES[name][0] in said
