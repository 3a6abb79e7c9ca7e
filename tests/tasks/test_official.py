"""Official files: each format is read as it is published, and every split is its own."""

import json
import sys
from decimal import Decimal

import pytest

from selfrag_jax.tasks.official import final_number
from selfrag_jax.tasks.qa import DATA_SETS, chosen_letter, load_task
from tests.tasks.official_files import FILES, GSM8K, MMLU, PARAGRAPH, SMOLTALK, lines, load, rows, write


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


def test_2wikimultihopqa_has_spaces_between_its_sentences_and_two_gold_passages_or_four(tmp_path):
  film, both, first = load(tmp_path, "2wikimultihopqa")
  assert [row["id"] for row in (film, both, first)] == ["w0", "w1", "w2"]
  assert film["context"] == (
    {"title": "Oslo", "content": "Oslo is in Norway."},
    {"title": "Ann Lee", "content": "Ann Lee is a director. She was born in Bergen."},
    {"title": "Red Dust (film)", "content": "Red Dust is a film of 1990. Ann Lee directed it."},
  )
  assert film["gold"] == (film["context"][2], film["context"][1])  # by hops: the question names the first
  titles = [passage["title"] for passage in both["gold"]]
  assert titles == ["Red Dust", "Blue Sea", "Ann Lee", "Bo Dahl"]  # each once; those that the question names come first
  assert all(passage in both["context"] for passage in both["gold"])
  assert both["answers"] == ("yes",)
  assert load_task("2wikimultihopqa", tmp_path, split="validation").reward(both, "yes, they are") == 0  # as HotpotQA's
  assert first["gold"] == first["context"]
  assert first["context"][1]["content"] == "It is of 1980."


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
