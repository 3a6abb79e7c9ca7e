"""The config of prompt optimization: tasks, engines and limits are checked before any call is paid for."""

import pytest

from configs.gradient_rag import get_config
from selfrag_jax.experiments import gradient_rag
from selfrag_jax.tasks.prompt_tasks import is_same_answer, make_task


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"budget": {"tokens": -5}}, r"config\.budget\.tokens is -5"),
    ({"budget": {"cost": float("nan")}}, r"config\.budget\.cost is nan"),
    ({"budget": {"cost": float("inf")}}, r"config\.budget\.cost is inf"),
    ({"budget": {"prompt_price": -1.0}}, r"config\.budget\.prompt_price is -1"),
    ({"budget": {"cost": 1.0}}, r"config\.budget\.cost needs"),
    ({"optimizer": {"batch_size": 0}}, r"config\.optimizer\.batch_size is 0"),
    ({"optimizer": {"steps": -1}}, r"config\.optimizer\.steps is -1"),
    ({"optimizer": {"batch_size": 2**31 - 1}}, r"config\.optimizer\.batch_size is 2147483647; .* at most 1048576"),
    (
      {"task": {"sizes": {"train": 2**31 - 1, "valid": 3, "test": 3}}},
      r"sizes\.train is 2147483647; .* at most 1048576",
    ),
    ({"optimizer": {"lerning_rate": 1}}, "lerning_rate"),
    ({"rag": {"tokns": 1}}, "tokns"),
    ({"task": {"sizes": {"train": 3, "valid": 0, "test": 3}}}, r"config\.task\.sizes\.valid is 0"),
    ({"engines": {"critic": {"name": "m", "base_url": "http://127.0.0.1:9", "temprature": 1}}}, "temperature"),
    ({"engines": {"critic": {"name": "m", "base_url": "http://127.0.0.1:9", "api_key": "k"}}}, "api_key_env"),
    ({"engines": {"critic": {"name": "local:x", "top_p": 1}}}, "has no 'top_p'"),
    ({"engines": {"critic": {"name": ""}}}, r"config\.engines\.critic\.name"),
  ],
)
def test_settings_are_checked_before_anything_is_paid(change, message, prompt_config):
  made = prompt_config()
  for section, values in change.items():
    if section == "engines":
      values = {"critic": {**made[section]["critic"], **values["critic"]}}
    made[section] = {**made[section], **values}
  with pytest.raises(ValueError, match=message):
    gradient_rag.build(made)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"memory": "all"}, "none, window, retrieval"),
    ({"task": {"name": "sudoku"}}, "rulebook, router, program, bbh, gsm8k"),
    ({"task": {"name": "rulebook", "calls": 3}}, r"config\.task\.calls is 3; one of 1, 2"),
    ({"task": {"name": "rulebook"}}, r"config\.task\.sizes is missing"),
    ({"task": get_config("bbh").to_dict()["task"]}, "--config.task.path=FILE"),
    ({"task": get_config("router").to_dict()["task"]}, "the folder of router: --config.task.path=FOLDER"),
    ({"optimizer": {"batch_size": 0}}, r"config\.optimizer\.batch_size is 0; it must be a whole number, at least 1"),
    ({"budget": {"cost": -1.0}}, r"config\.budget\.cost is -1\.0; it must be a finite number, at least 0"),
  ],
)
def test_settings_are_checked(change, message, prompt_config):
  with pytest.raises(ValueError, match=message):
    gradient_rag.build(prompt_config(**change))


@pytest.mark.parametrize(
  ("answer", "target", "right"),
  [
    ("I count 3 and 5. Answer: 8", "8", True),
    ("Answer: 9\nNo. Answer: 8.", "8", True),
    ("the answer is (B)", "(B)", True),
    ("(A) or (B)? Answer: (A)", "(B)", False),
    ("It is 1,200.00 in all", "1200", True),
    ("8 of 9", "8", False),
    ("", "8", False),
    ("Answer: yes", "Yes", True),
  ],
)
def test_what_counts_as_right(answer, target, right):
  assert is_same_answer(answer, target) is right


def test_files_of_tasks(tmp_path, shared_data):
  section = {
    "name": "bbh",
    "path": str(shared_data / "textgrad_bbh" / "date_understanding.json"),
    "sizes": {"train": 3},
    "calls": 1,
  }
  (sample, *_) = make_task(section, 0).parts["train"]
  assert sample.target.startswith("(")
  section = {
    "name": "gsm8k",
    "path": str(next((shared_data / "textgrad_gsm8k").glob("*.jsonl"))),
    "sizes": {"test": 1000},
    "calls": 2,
  }
  task = make_task(section, 0)
  assert all(float(sample.target) is not None for sample in task.parts["test"])
  assert [text.file for text in task.texts] == ["notes.txt", "prompt.txt"]
  with pytest.raises(ValueError, match=r"1001.*more than the 1000"):
    make_task({**section, "sizes": {"test": 1001}}, 0)
  (tmp_path / "bad.jsonl").write_text('{"question": "x"}\n')
  with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
    make_task({**section, "path": str(tmp_path / "bad.jsonl")}, 0)
  (tmp_path / "bad.json").write_text("[]")
  with pytest.raises(ValueError, match=r"bad\.json is no file of BIG-Bench-Hard"):
    make_task({"name": "bbh", "path": str(tmp_path / "bad.json"), "sizes": {}, "calls": 1}, 0)
  with pytest.raises(FileNotFoundError, match="nowhere"):
    make_task({"name": "bbh", "path": "nowhere", "sizes": {}, "calls": 1}, 0)
