"""Official files: each format is read as it is published, and every other content is an error that names the place."""

import csv
import io
import json
import sys
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.tasks.official import final_number
from selfrag_jax.tasks.qa import DATA_SETS, chosen_letter, load_task

PARAGRAPH = "The Normans gave their name to Normandy, a region in France."
SQUAD = {
  "version": "v2.0",
  "data": [
    {
      "title": "The_Normans_%28people%29",
      "paragraphs": [
        {
          "context": PARAGRAPH,
          "qas": [
            {
              "id": "s0",
              "question": "Where is Normandy?",
              "answers": [{"text": t, "answer_start": 53} for t in ("France", "in France", "France")],
              "is_impossible": False,
            },
            {
              "id": "s1",
              "question": "Where is Oslo?",
              "answers": [],
              "is_impossible": True,
              "plausible_answers": [{"text": "France", "answer_start": 53}],
            },
            {"id": "s2", "question": "Who?", "answers": [{"text": "The Normans", "answer_start": 0}]},
          ],
        }
      ],
    }
  ],
}
SQUAD_1 = json.loads(json.dumps(SQUAD | {"version": "1.1"}))
SQUAD_1["data"][0]["paragraphs"][0]["qas"][1] = SQUAD["data"][0]["paragraphs"][0]["qas"][2] | {"id": "s3"}
HOTPOT = [
  {
    "_id": f"h{number}",
    "question": "Is Paris on the Seine?",
    "answer": answer,
    "type": "bridge",
    "level": "easy",
    "supporting_facts": [["Paris", 1], ["Seine", 0], ["Paris", 0]],
    "context": [["Oslo", ["Oslo is in Norway."]], ["Paris", ["Paris is a city.", " It is on the  Seine."]]],
  }
  for number, answer in enumerate(("yes", "no", "the Seine"))
]
MUSIQUE = [
  {
    "id": "2hop__1_2",
    "question": "Which river crosses the capital of that country?",
    "answer": "the Seine",
    "answer_aliases": ["Seine", "the Seine"],
    "answerable": answerable,
    "paragraphs": [
      {"idx": 7, "title": "Paris", "paragraph_text": "Paris lies on the Seine.", "is_supporting": True},
      {"idx": 3, "title": "France", "paragraph_text": "The capital is Paris.", "is_supporting": True},
      {"idx": 4, "title": "France", "paragraph_text": "France borders Spain.", "is_supporting": False},
    ],
    "question_decomposition": [
      {"id": 1, "question": "capital?", "answer": "Paris", "paragraph_support_idx": 3},
      {"id": 2, "question": "river?", "answer": "the Seine", "paragraph_support_idx": 7 if answerable else None},
    ],
  }
  for answerable in (True, False, True)
]
NQ = [{"question": "who wrote it", "answer": ["Ann", "Ann B", "Ann"]}] * 3
TRIVIA = {
  "Data": [
    {
      "QuestionId": f"t{number}",
      "Question": "Which city?",
      "Answer": {"Value": "Oslo", "Aliases": ["Oslo", "Christiania"], "NormalizedValue": "oslo", "Type": "Entity"},
    }
    for number in range(3)
  ],
  "Domain": "unfiltered-web",
}
POPQA = [["id", "subj", "question", "possible_answers"]] + [
  [str(number), "George", "What is George's job?", '["politician", "pol."]'] for number in range(3)
]
GSM8K = [{"question": "How many?", "answer": "40*27=<<40*27=1080>>1080 clips\n#### 1,080"}] * 3
MMLU = [["What is 1 + 1,\nas a word?", "one", "two", "three", "four", "B"]] * 3
ARC = [
  {
    "id": f"Mercury_{key}",
    "question": {
      "stem": "What is hot?",
      "choices": [{"text": t, "label": x} for t, x in zip(texts, keys, strict=True)],
    },
    "answerKey": key,
  }
  for key, keys, texts in (
    ("C", "ABCD", ["ice", "snow", "fire", "fog"]),
    ("2", "1234", ["ice", "fire", "snow", "fog"]),
    ("E", "ABCDE", ["ice", "snow", "rain", "fog", "fire"]),
  )
]
SMOLTALK = [
  {
    "messages": [
      {"role": "system", "content": "Be short."},
      {"role": "user", "content": "Hi"},
      {"role": "assistant", "content": "Hello"},
    ]
  }
] * 3


def lines(records):
  return "".join(json.dumps(record) + "\n" for record in records)


def rows(records, delimiter=","):
  file = io.StringIO()
  csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(records)
  return file.getvalue()


def tabs(records):
  return rows(records, "\t")


# name -> the official file of a split, the split, its content, and how it is written
FILES = {
  "squad": ("dev-v1.1.json", "validation", SQUAD_1, json.dumps),
  "squad_v2": ("train-v2.0.json", "train", SQUAD, json.dumps),
  "hotpotqa": ("hotpot_dev_distractor_v1.json", "validation", HOTPOT, json.dumps),
  "hotpotqa_fullwiki": ("hotpot_dev_fullwiki_v1.json", "validation", HOTPOT, json.dumps),
  "2wikimultihopqa": ("dev.json", "validation", HOTPOT, json.dumps),
  "musique": ("musique_ans_v1.0_dev.jsonl", "validation", MUSIQUE, lines),
  "musique_full": ("musique_full_v1.0_train.jsonl", "train", MUSIQUE, lines),
  "nq_open": ("NQ-open.dev.jsonl", "validation", NQ, lines),
  "triviaqa": ("unfiltered-web-dev.json", "validation", TRIVIA, json.dumps),
  "triviaqa_rc": ("wikipedia-train.json", "train", TRIVIA, json.dumps),
  "popqa": ("popQA.tsv", "test", POPQA, tabs),
  "gsm8k": ("test.jsonl", "test", GSM8K, lines),
  "mmlu": ("val/anatomy_val.csv", "validation", MMLU, rows),
  "arc_easy": ("ARC-Easy-Dev.jsonl", "validation", ARC, lines),
  "arc_challenge": ("ARC-Challenge-Test.jsonl", "test", ARC, lines),
  "smoltalk": ("train.jsonl", "train", SMOLTALK, lines),
}


def write(folder, name, content=None):
  """Write the file of a data set under its official name, with other content if it is given."""
  file, _, records, written = FILES[name]
  (folder / file).parent.mkdir(exist_ok=True)
  (folder / file).write_text(written(records if content is None else content), encoding="utf-8")
  return folder / file


def load(folder, name, content=None):
  write(folder, name, content)
  return load_task(name, folder, split=FILES[name][1])


def test_every_data_set_has_a_fixture():
  assert FILES.keys() == DATA_SETS.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_folder_and_its_file_are_the_same_task_and_the_official_reply_is_right(tmp_path, name):
  task, split = load(tmp_path, name), FILES[name][1]
  assert len(task) == 3
  assert list(load_task(name, tmp_path / FILES[name][0], split=split)) == list(task)
  for conversation in task:
    assert json.loads(json.dumps(conversation))["id"]
    assert conversation["messages"][-2]["role"] == "user"
    reply = conversation["messages"][-1]
    assert reply["role"] == "assistant"
    if name == "smoltalk":
      continue
    assert conversation["question"] in conversation["messages"][0]["content"]
    assert task.evaluate(conversation, reply["content"]) == task.reward(conversation, reply["content"]) == 1
    assert task.evaluate(conversation, "something else") == task.reward(conversation, "something else") == 0


def test_squad_keeps_questions_without_an_answer_and_has_the_paragraph(tmp_path):
  task = load(tmp_path, "squad_v2")
  assert [conversation["answers"] for conversation in task] == [("France", "in France"), (), ("The Normans",)]
  document = {"title": "The Normans (people)", "content": PARAGRAPH}
  assert all(conversation["gold"] == conversation["context"] == (document,) for conversation in task)
  assert task[1]["messages"][1]["content"] == ""
  assert task.evaluate(task[1], "France") == 0
  assert task.evaluate(task[0], "") == 0
  assert task.evaluate(task[0], "the FRANCE.") == 1
  assert task.reward(task[0], "France or Spain") == 0.5


def test_hotpotqa_has_its_context_and_the_titles_that_support_it(tmp_path):
  task = load(tmp_path, "hotpotqa")
  oslo, paris = (
    {"title": "Oslo", "content": "Oslo is in Norway."},
    {"title": "Paris", "content": "Paris is a city. It is on the Seine."},
  )
  assert task[0]["context"] == (oslo, paris)
  assert task[0]["gold"] == (paris, {"title": "Seine"})  # of the second the record has the title alone
  assert task.reward(task[0], "yes, it is") == 0  # HotpotQA: yes and no are all or nothing


def test_musique_has_its_gold_paragraphs_by_hops_and_none_where_one_was_taken_away(tmp_path):
  answerable, not_answerable, _ = load(tmp_path, "musique_full")
  paris, france, spain = (
    {"title": title, "content": text}
    for title, text in (
      ("Paris", "Paris lies on the Seine."),
      ("France", "The capital is Paris."),
      ("France", "France borders Spain."),
    )
  )
  assert answerable["gold"] == (france, paris)
  assert answerable["context"] == not_answerable["context"] == (paris, france, spain)
  assert answerable["answers"] == ("the Seine", "Seine")
  assert not_answerable["answers"] == not_answerable["gold"] == ()


def test_short_answers_have_all_their_aliases(tmp_path):
  assert load(tmp_path, "nq_open")[0]["answers"] == ("Ann", "Ann B")
  assert load(tmp_path, "triviaqa")[0]["answers"] == ("Oslo", "Christiania")
  assert load(tmp_path, "popqa")[0]["answers"] == ("politician", "pol.")
  assert load(tmp_path, "nq_open")[1]["id"] == "NQ-open.dev line 2"


def test_numbers_of_gsm8k_are_compared_as_numbers(tmp_path):
  task = load(tmp_path, "gsm8k")
  assert task[0]["answers"] == ("1080",)
  assert task[0]["messages"][1]["content"] == GSM8K[0]["answer"]
  for right in ("#### 1080", "It is $1,080.00.", "3 + 4\n#### 1080 clips in 2 months"):
    assert task.evaluate(task[0], right) == 1
  for wrong in ("", "####", "1080 or 1081", "#### -1080", "10801", "#### 1.080", "1080 #### none"):
    assert task.evaluate(task[0], wrong) == 0


@pytest.mark.parametrize(
  ("text", "number"),
  [("5-3", 3), ("x is -3", -3), ("about .5", Decimal("0.5")), ("v2", None), ("109,200,000", 109200000), ("1/4.", 4)],
)
def test_the_final_number_of_a_text(text, number):
  assert final_number(text) == number


def test_choices_have_letters_and_the_numbers_of_some_exams_become_letters(tmp_path):
  task = load(tmp_path, "arc_easy")
  assert [conversation["answers"] for conversation in task] == [("C",), ("B",), ("E",)]
  assert all(c["choices"][ord(c["answers"][0]) - ord("A")] == "fire" for c in task)
  assert "\nA. ice\nB. fire\nC. snow\nD. fog\n" in task[1]["messages"][0]["content"]
  task = load(tmp_path, "mmlu")
  assert task[0]["question"] == "What is 1 + 1,\nas a word?"
  assert task[0]["choices"] == ("one", "two", "three", "four")


@pytest.mark.parametrize(
  ("completion", "letter"),
  [
    ("B", "B"),
    (" (B) two", "B"),
    ("**B.**", "B"),
    ("B: two", "B"),
    ("A dog", None),
    ("The answer is B.", "B"),
    ("A. no\nAnswer: A\nNo. Answer: (C)", "C"),
    ("the answer is a dog", None),
    ("the answer is Both", None),
    ("E", None),
    ("b", None),
    ("BC", None),
    ("", None),
  ],
)
def test_the_letter_that_a_completion_chooses(completion, letter):
  assert chosen_letter(completion, 4) == letter


def test_empty_lines_are_no_rows(tmp_path):
  (tmp_path / "law.csv").write_text("\n\n".join([rows(MMLU)] * 2) + "\n")
  assert len(load_task("mmlu", tmp_path / "law.csv", split="test")) == 6


def test_all_files_of_a_split_belong_to_it(tmp_path):
  for split, subject in (("val", "law"), ("test", "law"), ("val", "anatomy")):
    (tmp_path / split).mkdir(exist_ok=True)
    (tmp_path / split / f"{subject}_{split}.csv").write_text(rows(MMLU[:1]))
  task = load_task("mmlu", tmp_path, split="validation")
  assert [conversation["id"] for conversation in task] == ["anatomy_val line 2", "law_val line 2"]


def test_chat_has_no_score(tmp_path):
  task = load(tmp_path, "smoltalk")
  assert task[0]["messages"] == SMOLTALK[0]["messages"]
  with pytest.raises(ValueError, match=r"smoltalk \(train\) has no score"):
    task.evaluate(task[0], "Hello")


def test_parquet_is_read_where_pyarrow_is_there(tmp_path):
  pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
  table = pyarrow.Table.from_pylist([{**record, "source": "x"} for record in SMOLTALK])
  parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
  task = load_task("smoltalk", tmp_path, split="train")
  assert [conversation["messages"] for conversation in task] == [record["messages"] for record in SMOLTALK]
  (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"no parquet")
  with pytest.raises(ValueError, match=r"train-00000-of-00001\.parquet: "):
    load_task("smoltalk", tmp_path, split="train")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
  (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"PAR1")
  with pytest.raises(ImportError, match=r"pip install 'selfrag_jax\[parquet\]'"):
    load_task("smoltalk", tmp_path, split="test")


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


def test_an_unknown_data_set_or_split_is_an_error_with_those_that_are_known(tmp_path):
  with pytest.raises(
    ValueError, match=r"no data set 'hotpot_qa': did you mean hotpotqa\?; known are squad, .*smoltalk"
  ):
    load_task("hotpot_qa", tmp_path, split="train")
  with pytest.raises(ValueError, match="gsm8k has no split 'validation'; it has train, test"):
    load_task("gsm8k", tmp_path, split="validation")


@pytest.mark.parametrize("name", [name for name in DATA_SETS if len(DATA_SETS[name].splits) > 1])
def test_no_split_is_ever_taken_for_another(tmp_path, name):
  file, present, *_ = FILES[name]
  write(tmp_path, name)
  for split in DATA_SETS[name].splits.keys() - {present}:
    with pytest.raises(FileNotFoundError) as caught:
      load_task(name, tmp_path, split=split)
    assert f"no {split} split of {name}" in str(caught.value)
    assert all(pattern in str(caught.value) for pattern in DATA_SETS[name].splits[split])
    with pytest.raises(ValueError, match=f"has the name of the {present} split"):
      load_task(name, tmp_path / file, split=split)


def test_a_file_that_is_not_there_is_named_with_what_may_be_given(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; give a file of gsm8k, or a folder with train"):
    load_task("gsm8k", tmp_path / "nowhere", split="train")


def test_a_file_with_a_name_of_its_own_is_of_the_split_that_is_said(tmp_path):
  (tmp_path / "mine.jsonl").write_text(lines(GSM8K))
  assert len(load_task("gsm8k", tmp_path / "mine.jsonl", split="train")) == 3


@pytest.mark.parametrize(
  ("name", "file", "split", "size"),
  [
    ("squad_v2", "qa_squad_v2_dev_half", "validation", 6078),
    ("hotpotqa", "multihop_hotpotqa/questions.json", "validation", 100),
    ("musique", "multihop_musique/questions.json", "validation", 100),
    ("gsm8k", "textgrad_gsm8k/train.first1000.jsonl", "train", 1000),
  ],
)
def test_real_files(shared_data, name, file, split, size):
  task = load_task(name, shared_data / file, split=split)
  assert len({conversation["id"] for conversation in task}) == len(task) == size
  assert sum(not conversation["answers"] for conversation in task) == (3168 if name == "squad_v2" else 0)
  for conversation in task:
    reply = conversation["messages"][1]["content"]
    assert task.evaluate(conversation, reply) == task.reward(conversation, reply) == 1
    if name != "gsm8k":
      assert conversation["gold"]
      assert all(passage in conversation["context"] for passage in conversation["gold"])
