"""Data sets by their names on the Hugging Face hub: what is downloaded, what the cache gives offline, and errors."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from selfrag_jax.experiments.retrieval import JudgedTitles, read_parts
from selfrag_jax.experiments.search_data import PassagesData, read_folder
from selfrag_jax.retrieval.beir import EXAMPLE, read_beir
from selfrag_jax.storage.hub import locate_data
from selfrag_jax.tasks.documents import read_questions
from selfrag_jax.tasks.qa import load_task
from selfrag_jax.tasks.text import read_documents, text_files

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LINE = json.dumps({"question": "1 + 1?", "answer": "That is two. #### 2"})
HOTPOT = {"_id": "q", "question": "Oslo?", "answer": "Norway", "supporting_facts": [["Oslo", 0]]}
OSLO = {"title": "Oslo", "text": "Oslo is the capital of Norway."}
FILES = {
  "main/test.jsonl": LINE,
  "text.txt": "Some text.",
  "passages/corpus.jsonl": json.dumps({"_id": "p", **OSLO}),
  "passages/qrels.tsv": "query-id\tcorpus-id\tscore\nq\tp\t1\n",
  "passages/questions.json": json.dumps([HOTPOT]),
  "judged/corpus.jsonl": json.dumps({"_id": "p", **OSLO}),
  "judged/queries.jsonl": json.dumps({"_id": "q", "text": "Oslo?"}),
  **{f"judged/qrels/{split}.tsv": "query-id\tcorpus-id\tscore\nq\tp\t1\n" for split in ("train", "dev", "test")},
  "documents/few.jsonl": json.dumps({"question": "Oslo?", "answers": ["Norway"], "gold": OSLO, "distractors": []}),
}


def put_in_cache(cache, name="somebody/data", revision="main"):
  """Lay the files out as the hub's library does that has downloaded them."""
  repository = cache / f"datasets--{name.replace('/', '--')}"
  snapshot = repository / "snapshots" / COMMIT
  for file, content in FILES.items():
    (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
    (snapshot / file).write_text(content)
  shutil.copytree(EXAMPLE, snapshot / "world")
  (repository / "refs").mkdir()
  (repository / "refs" / revision).write_text(COMMIT)
  return snapshot


@pytest.fixture
def offline(tmp_path, monkeypatch):
  """An empty cache of the hub, which cannot be reached."""
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
  monkeypatch.chdir(tmp_path)
  return tmp_path / "cache"


READERS = {
  "official": lambda name: load_task("gsm8k", f"{name}:main", split="test")[0]["answers"] == ("2",),
  "official file": lambda name: len(load_task("gsm8k", f"{name}:main/test.jsonl", split="test")) == 1,
  "text": lambda name: list(read_documents(name)) == ["Some text."],
  "passages": lambda name: (
    read_folder(PassagesData("passages", path=f"{name}:passages"), "smollm2-135m").questions[0].answers == ("Norway",)
  ),
  "documents": lambda name: [*read_questions(f"{name}:documents")] == ["few"],
  "collection": lambda name: read_beir(f"{name}:world") == read_beir(EXAMPLE),
  "split by title": lambda name: read_parts(JudgedTitles(path=f"{name}:world")).keys() == {"train", "valid", "test"},
  "split by files": lambda name: read_parts(JudgedTitles(path=f"{name}:judged"))["valid"].queries == {"q": "Oslo?"},
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_the_name_of_a_data_set(offline, reader):
  put_in_cache(offline)
  assert READERS[reader]("somebody/data")


def test_the_cache_of_a_revision_is_read_where_the_environment_says_so(tmp_path):
  put_in_cache(tmp_path / "hub", revision="v2")
  task = "load_task('gsm8k', 'somebody/data@v2:main', split='test')"
  script = f"from selfrag_jax.tasks.qa import load_task\nprint({task}[0]['question'])"
  environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
  environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
  done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
  assert done.stdout == "1 + 1?\n", done.stderr


def test_a_folder_here_is_taken_before_the_hub(offline):
  put_in_cache(offline)
  Path("somebody/data").mkdir(parents=True)
  Path("somebody/data/mine.txt").write_text("My text.")
  assert list(read_documents("somebody/data")) == ["My text."]


@pytest.mark.parametrize("path", ["somebody", "/somebody/data", "../data", "a/b/c", "gs://somebody/data"])
def test_what_is_no_name_is_left_to_its_reader(offline, path):
  assert str(locate_data(path, ["*.txt"])) == path


@pytest.fixture
def asked(tmp_path, monkeypatch):
  """What the hub is asked for; it gives the files above."""
  snapshot, questions = put_in_cache(tmp_path), []

  def download(name, **options):
    questions.append((name, options))
    return str(snapshot)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  return questions


def test_no_more_is_downloaded_than_is_read(asked):
  text_files("somebody/data@abc")
  load_task("gsm8k", "somebody/data:main", split="test")
  read_beir("somebody/data:world")
  texts = {"allow_patterns": ["*.txt", "*.jsonl", "*.array_record"], "ignore_patterns": ["*/*"]}
  lines = {"allow_patterns": ["main", "main/test.jsonl"], "ignore_patterns": ["main/*/*"]}
  judged = ["world", "world/corpus.jsonl", "world/queries.jsonl", "world/qrels.tsv", "world/qrels/*.tsv"]
  assert asked == [
    ("somebody/data", {"repo_type": "dataset", "revision": "abc", **texts}),
    ("somebody/data", {"repo_type": "dataset", "revision": None, **lines}),
    ("somebody/data", {"repo_type": "dataset", "revision": None, "allow_patterns": judged}),
  ]


def test_a_data_set_that_is_not_there_is_an_error_that_says_what_to_download(offline, monkeypatch):
  monkeypatch.setenv("HF_TOKEN", "hf_secret")
  with pytest.raises(FileNotFoundError) as raised:
    load_task("gsm8k", "somebody/other@v2:main", split="test")
  command = "hf download somebody/other --repo-type dataset --revision v2 --include 'main*' --local-dir FOLDER"
  assert f"pass its path: FOLDER/main after `{command}`" in str(raised.value)
  assert "hf_secret" not in str(raised.value)


@pytest.mark.parametrize(("part", "split"), [("", "test"), (":main", "train"), (":absent", "test")])
def test_a_data_set_without_the_files_is_an_error_that_names_them(offline, part, split):
  put_in_cache(offline)
  named = re.escape(f"somebody/data{part} has no {split}.jsonl, which would be read")
  with pytest.raises(FileNotFoundError, match=named):
    load_task("gsm8k", f"somebody/data{part}", split=split)


def test_a_name_without_the_library_of_the_hub_is_an_error_that_says_what_to_install(offline, monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(FileNotFoundError, match=r"somebody/data is no file.*pip install -e '\.\[weights\]'"):
    list(read_documents("somebody/data"))
