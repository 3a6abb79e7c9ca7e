"""TextGrad's tasks from local files: a missing file is named, and nothing is downloaded."""

import json

import numpy as np
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.tasks import DataLoader, load_instance_task, load_task, parse_integer_answer

ENGINE = tg.CallableEngine(lambda content, system: "<ACCURACY> 1 </ACCURACY>")


def text(value):
  return tg.Variable(value, requires_grad=False, role_description="text")


@pytest.fixture
def root(tmp_path):
  rows = [{"input": f"q{i}", "target": str(i)} for i in range(250)]
  for name in ("object_counting", "word_sorting"):
    (tmp_path / f"{name}.json").write_text(json.dumps({"examples": rows}))
  for name, n in (("train", 600), ("test", 30)):
    lines = [json.dumps({"question": f"q{i}", "answer": f"so it is\n#### 1,{i:03}"}) for i in range(n)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
  (tmp_path / "college_physics_test.csv").write_text('"What, {x}?",a,b,c,d,C\n')
  columns = ["Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
  (tmp_path / "gpqa_diamond.csv").write_text(",".join(columns) + "\nwhy?,right,w1,w2,w3\n")
  (tmp_path / "leetcode-hard.jsonl").write_text('{"task_id": "1", "prompt": "p", "test": "t"}\n')
  return str(tmp_path)


def test_splits(root, monkeypatch):
  train, val, test, score = load_task("BBH_object_counting", ENGINE, root)
  assert [len(part) for part in (train, val, test)] == [50, 100, 100]
  assert (train[0], val[0], test[-1]) == (("q0", "0"), ("q50", "50"), ("q249", "249"))
  assert "Answer: $VALUE" in train.get_task_description()
  loss = score(inputs={"prediction": text("It is\nAnswer: 12.0"), "ground_truth_answer": text("12")})
  assert (loss.value, loss.requires_grad) == ("1", True)
  monkeypatch.setenv("TEXTGRAD_DATA", root)
  train, val, test, _ = load_task("GSM8K_DSPy", evaluation_api=None)
  assert [len(part) for part in (train, val, test)] == [200, 300, 30]
  assert not set(train) & set(val)
  question, answer = test[0]
  assert answer == str(1000 + int(question[1:]))


def test_other_tasks_of_bbh_are_judged(root):
  *_, judge = load_task("BBH_word_sorting", ENGINE, root)
  assert judge.parse_output(judge([text("q"), text("a"), text("p")])) == "1"


def test_tasks_of_one_sample_each(root):
  (question, letter, loss, score), *_ = load_instance_task("MMLU_college_physics", ENGINE, root)
  assert (letter, score(text("so\nAnswer: C")), score(text("Answer: A")), score(text("?"))) == ("C", 1, 0, 0)
  assert "What, {x}?\n\nA) a\nB) b" in question
  assert loss(text("Answer: A")).value == "<ACCURACY> 1 </ACCURACY>"
  (question, letter, *_), *_ = load_instance_task("GPQA_diamond", ENGINE, root)
  assert f"{letter}) right" in question
  assert list(load_instance_task("LeetCodeHardEval", ENGINE, root)) == [("1", "p", "t")]


def test_missing_files_are_named_with_their_source(tmp_path, monkeypatch):
  monkeypatch.delenv("TEXTGRAD_DATA", raising=False)
  with pytest.raises(FileNotFoundError, match=r"object_counting\.json.*BIG-Bench-Hard.*TEXTGRAD_DATA"):
    load_task("BBH_object_counting", ENGINE)
  for load, task, file in (
    (load_task, "BBH_word_sorting", r"word_sorting\.json"),
    (load_task, "GSM8K_DSPy", r"train\.jsonl"),
    (load_instance_task, "MMLU_x", r"x_test\.csv"),
    (load_instance_task, "GPQA_diamond", r"gpqa_diamond\.csv"),
    (load_instance_task, "LeetCodeHardEval", r"leetcode-hard\.jsonl"),
  ):
    with pytest.raises(FileNotFoundError, match=f"{file} is not there.*github"):
      load(task, ENGINE, str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", '{"examples": [{"input": 1}]}', "no json", '{"examples": 3}', "\xff"])
def test_damaged_files_are_named(tmp_path, content):
  for name in ("object_counting.json", "train.jsonl"):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
  with pytest.raises(ValueError, match=r"object_counting\.json does not have the expected format"):
    load_task("BBH_object_counting", ENGINE, str(tmp_path))
  if content:
    with pytest.raises(ValueError, match=r"train\.jsonl does not have the expected format"):
      load_task("GSM8K_DSPy", ENGINE, str(tmp_path))


def test_unknown_tasks(root):
  with pytest.raises(ValueError, match="did you mean 'GSM8K_DSPy'"):
    load_task("GSM8K_DSP", ENGINE, root)
  with pytest.raises(ValueError, match="did you mean 'LeetCodeHardEval'"):
    load_instance_task("LeetCodeHard", ENGINE, root)


@pytest.mark.parametrize(
  ("answer", "number"),
  [("Answer: 12.50", 12), ("1,234 plums", 1234), ("none", 0), ("", 0), ("3 then $45.", 45), ("٣", 0), (".5", 0)],
)
def test_the_last_number_of_an_answer(answer, number):
  assert parse_integer_answer(answer) == number


def test_batches():
  loader = DataLoader([(i, str(i)) for i in range(5)], batch_size=2, shuffle=False)
  assert list(loader) == [((0, 1), ("0", "1")), ((2, 3), ("2", "3")), ((4,), ("4",))]
  assert list(loader) == list(loader)
  shuffled = DataLoader(list(range(100)), batch_size=100)
  assert sorted(np.concatenate(list(shuffled))) == list(range(100))
  with pytest.raises(ValueError, match="batch_size = 0"):
    DataLoader([1], batch_size=0)


ROW = '"q","1","2","3","4"'


@pytest.mark.parametrize(
  ("name", "content", "load"),
  [
    ("x_test.csv", f'{ROW},"A"\n"{"a" * 200_000}', lambda root: load_instance_task("MMLU_x", ENGINE, root)),
    ("x_test.csv", f"{ROW}\n", lambda root: load_instance_task("MMLU_x", ENGINE, root)),
    ("x_test.csv", f'{ROW},"E"\n', lambda root: load_instance_task("MMLU_x", ENGINE, root)),
    ("x_test.csv", "\n", lambda root: load_instance_task("MMLU_x", ENGINE, root)),
    ("gpqa_diamond.csv", "Question,Correct Answer\nq\n", lambda root: load_instance_task("GPQA_diamond", ENGINE, root)),
    ("leetcode-hard.jsonl", '{"task_id": "1"}', lambda root: load_instance_task("LeetCodeHardEval", ENGINE, root)),
    ("leetcode-hard.jsonl", "[1]", lambda root: load_instance_task("LeetCodeHardEval", ENGINE, root)),
    ("train.jsonl", '{"question": "q", "answer": 5}', lambda root: load_task("GSM8K_DSPy", ENGINE, root)),
    ("train.jsonl", '{"question": 5, "answer": "#### 5"}', lambda root: load_task("GSM8K_DSPy", ENGINE, root)),
    ("train.jsonl", "[" * 100_000, lambda root: load_task("GSM8K_DSPy", ENGINE, root)),
    ("x.json", '{"examples": [{"input": 5, "target": "a"}]}', lambda root: load_task("BBH_x", ENGINE, root)),
    ("x.json", '{"examples": [{"input": "\\ud800", "target": "a"}]}', lambda root: load_task("BBH_x", ENGINE, root)),
  ],
)
def test_files_that_are_damaged_within_are_named(tmp_path, name, content, load):
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=f"{name} does not have the expected format"):
    load(str(tmp_path))
