"""RAG fine-tuning of a pretrained model on the questions of files: every setting reaches what it is about."""

import json
import re

import flax.linen as nn
import jax
import jsonschema
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from configs.rag import get_config
from selfrag_jax.experiments.chat_model import load_chat
from selfrag_jax.experiments.rag import build, evaluate, run, value_names
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.export import export_safetensors
from selfrag_jax.model.lm import init_params
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.retrieval import BaseRetriever, Document, base, create
from selfrag_jax.retrieval.base import Hits
from selfrag_jax.tasks.facts import SPLITS
from selfrag_jax.tasks.rag import save_conversations
from selfrag_jax.tasks.task import Task
from selfrag_jax.text.rag_prompts import create_rag_training_example
from selfrag_jax.text.tokenizer import BPETokenizer
from selfrag_jax.train.load import load_model


def write_chat(folder, seed):
  """Write a tiny model with the tokens of ChatML, as transformers would save it; return its parameters."""
  alphabet = sorted(ByteLevel.alphabet())
  tokenizer = BPETokenizer.from_pieces([*alphabet, "<|im_start|>", "<|im_end|>"], [], [256, 257])
  sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "mlp_dim": 16, "init_scale": 0.3}
  model = ModelConfig(vocab_size=tokenizer.vocab_size, **sizes)
  params = nn.unbox(init_params(model, jax.random.key(seed)))
  export_safetensors(folder, model, params, tokenizer=tokenizer, vocab_size=258, context_tokens=512)
  return params


@pytest.fixture
def chat_folder(tmp_path):
  write_chat(tmp_path / "chat", seed=0)
  return tmp_path / "chat"


@pytest.fixture
def squad(tmp_path):
  """Questions of SQuAD 2.0 about twelve towns."""
  ask = lambda town, kind: {
    "id": f"{town} {kind}", "question": f"Who is the {kind} of {town}?", "is_impossible": kind == "king",
    "answers": [] if kind == "king" else [{"text": f"{town[0]}{kind}", "answer_start": 0}],
  }  # fmt: skip
  towns = [f"{letter}ville" for letter in "ABCDEFGHIJKL"]
  paragraphs = lambda town: [
    {
      "context": f"{town} has {town[0]}mayor and {town[0]}cook.",
      "qas": [ask(town, kind) for kind in ("mayor", "cook", "king")],
    }
  ]
  data = [{"title": town, "paragraphs": paragraphs(town)} for town in towns]
  (tmp_path / "dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": data}))
  return tmp_path / "dev-v2.0.json"


@pytest.fixture
def sums(tmp_path):
  """The settings of plain conversations: sums, as in GSM8K."""
  rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(20)]
  (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
  return {"rag.plain.data_set": "gsm8k", "rag.plain.path": str(tmp_path)}


@pytest.fixture
def small(chat_folder, squad):
  return {
    "init": str(chat_folder), "data.path": str(squad), "data.top_k": 1, "model.remat": "none", "evaluation.final": 6,
    "evaluation.periodic": 2, "evaluation.batch_size": 2, "evaluation.max_new_tokens": 3,
    **{f"rag.{key}": value for key, value in (("steps", 2), ("batch_size", 8), ("max_tokens", 512), ("accumulate", 1))},
  }  # fmt: skip


@pytest.fixture
def made(small):
  """Build the experiment with other settings."""

  def make(**changes):
    config = get_config("smollm2_135m")
    config.update_from_flattened_dict(small | changes)
    return build(config.to_dict())

  return make


def test_a_pretrained_model_is_tuned_in_two_runs_and_keeps_its_tokenizer(small, sums, tmp_path):
  init = small["init"]
  for name, changes in (("first", {}), ("second", {"rag.lora.rank": 2, "rag.plain.share": 0.5, **sums})):
    config = get_config("smollm2_135m")
    config.update_from_flattened_dict(small | {"init": str(init)} | changes)
    report = run(build(config.to_dict()), tmp_path / name)
    jsonschema.validate(json.loads(json.dumps(report)), read_schema("rag"))
    init = tmp_path / name
  assert 0 < report["with_answer"] < report["n"] == 6
  assert list(report["em"]) == ["base", "rag"]
  config.update_from_flattened_dict({"rag.steps": 0})
  before = run(build(config.to_dict()), tmp_path / "before")
  jsonschema.validate(json.loads(json.dumps(before)), read_schema("rag"))
  assert before["f1"] == {"base": report["f1"]["base"]}
  config.update_from_flattened_dict({"evaluation.before": False})
  with pytest.raises(ValueError, match=r"no model would be scored: set rag\.steps, or init and evaluation\.before"):
    build(config.to_dict())
  config.update_from_flattened_dict({"rag.steps": 2})
  assert list(evaluate(build(config.to_dict()), tmp_path / name)["em"]) == ["rag"]
  tuned = load_chat(str(init))
  assert tuned.context_tokens == 512
  assert tuned.tokenizer.special["<|im_end|>"] == 257
  weights = [load_model(tmp_path / name).params["params"]["segments_0"] for name in ("first", "second")]
  assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), *weights)))


def test_conversations_with_documents_found_before_train_a_pretrained_model(chat_folder, tmp_path):
  task = Task("towns", [f"Town{i}" for i in range(8)], _asked)
  for split in SPLITS:
    save_conversations(tmp_path / f"{split}.jsonl", task)
  config = get_config("conversations")
  settings = {
    "init": str(chat_folder), "data.path": str(tmp_path), "rag.steps": 1, "rag.batch_size": 8, "rag.accumulate": 1,
    "rag.max_tokens": 192, "evaluation.final": 4, "evaluation.batch_size": 4, "mesh.data": 1, "mesh.fsdp": 8,
  }  # fmt: skip
  config.update_from_flattened_dict(settings)
  report = run(experiment := build(config.to_dict()), tmp_path / "run")
  assert (report["task"], report["n"], sorted(report["em"])) == ("conversations", 4, ["base", "rag"])
  assert set(numbers(report)) == value_names(experiment)
  assert report["dropped_documents"]["rag"] == {"retrieved": 0, "none": 0, "shuffled": 0}
  experiment.context_tokens = experiment.evaluation.max_new_tokens + 120
  assert experiment.score(experiment.base_params, "test", 4, "retrieved").dropped.tolist() == [1] * 4
  config.update_from_flattened_dict({"evaluation.max_new_tokens": 500})  # the context has 512 tokens
  with pytest.raises(ValueError, match="without its documents, which does not fit into 12"):
    build(config.to_dict())
  config.update_from_flattened_dict({"evaluation.max_new_tokens": 512})
  with pytest.raises(ValueError, match="max_new_tokens"):
    build(config.to_dict())
  config.update_from_flattened_dict({"evaluation.max_new_tokens": 8})
  save_conversations(tmp_path / "test.jsonl", [{**_asked("Here"), "answers": []}])
  with pytest.raises(ValueError, match="none of the 1 questions of the test has an answer"):
    build(config.to_dict())
  save_conversations(tmp_path / "test.jsonl", [_asked("Here")])
  with pytest.raises(ValueError, match="no other of 1 conversations has documents"):
    build(config.to_dict())
  with pytest.raises(ValueError, match=r"config\.data\.path is empty; give the folder"):
    build(get_config("conversations").to_dict())


def _asked(town):
  shown = [{"title": town, "content": f"{town} has a harbor."}, {"title": "Else", "content": "Nothing is here. " * 2}]
  return create_rag_training_example("What has it?", f"a harbor of {town}", shown)


def test_the_usual_settings_of_a_fine_tuning_are_keys():
  config = get_config("smollm2_135m")
  config.update_from_flattened_dict(
    {
      "init": "runs/mid", "model.block_pattern": "TTMM", "data.knowledge_base": "kb", "data.retriever": "dense",
      "data.top_k": 5, "rag.batch_size": 4, "rag.accumulate": 2, "rag.lora.rank": 8, "rag.plain.share": 0.2,
    }
  )  # fmt: skip
  with pytest.raises(ValueError, match=r"config\.data\.path is empty"):
    build(config.to_dict())


def shown(experiment):
  """Return the contents of the passages beside each question of the test."""
  rows = experiment.reading.questions("test", 99, "retrieved")
  return [[found["content"] for found in row["messages"][1]["documents"]] for row in rows]


def trained(experiment, name="rag", steps=3):
  """Return the conversations of the first steps, decoded, each with the part that the loss counts."""
  decode, phase, found = experiment.tokenizer.decode, experiment.phase(name, None), []
  for batch in map(phase.batch, range(steps)):
    for ids, mask, segments in zip(batch["tokens"], batch["mask"], batch["segment_ids"], strict=True):
      inside = [segments == segment for segment in range(1, segments.max() + 1)]
      found += [(decode(ids[at]), decode(ids[at & mask])) for at in inside]
  return found


@pytest.mark.parametrize(("key", "value"), [("block_pattern", "M"), ("d_model", 32)])
def test_a_pretrained_model_keeps_its_shape(made, key, value):
  with pytest.raises(ValueError, match=rf"of .*{key}.* in config\.model, one gives the pretrained model's weights"):
    made(**{f"model.{key}": value})


def test_the_model_to_start_from_is_the_one_that_is_named(made, tmp_path):
  for seed in (1, 2):
    written = write_chat(tmp_path / "other", seed)["params"]["segments_0"]
    phase = made(init=str(tmp_path / "other")).phase("rag", None)
    begun = phase.initial_state().params["params"]["segments_0"]
    jax.tree.map(np.testing.assert_array_equal, begun, written)


def test_passages_are_found_by_the_retriever_and_in_the_knowledge_base_that_are_named(made, tmp_path, monkeypatch):
  class Last(BaseRetriever):
    """The documents that came last, whatever is asked."""

    name = "last"

    def _add(self, documents):
      self.found = [document.id for document in documents]

    def _delete(self, ids):
      raise NotImplementedError

    def _search(self, queries, top_k, where):
      found = self.found[: -top_k - 1 : -1]
      return Hits([found] * len(queries), [[*range(len(found), 0, -1)]] * len(queries))

  monkeypatch.setitem(base._registry, "last", Last)
  of_question = shown(made())
  assert len({*map(tuple, of_question)}) > 1
  assert {len(passages) for passages in of_question} == {1}
  last = ["Lville has Lmayor and Lcook.", "Kville has Kmayor and Kcook."]
  for top_k in (1, 2):
    found = shown(made(**{"data.retriever": "last", "data.top_k": top_k}))
    assert found == [last[:top_k]] * len(found)
  books = create("bm25")
  towns = [f"{letter}ville" for letter in "ABCDEFGHIJKL"]
  books.add_documents([Document(f"{town} {i}", town, f"{town}, book {i}") for town in towns for i in range(6)])
  books.save(tmp_path / "books")
  for top_k in (1, 5):
    found = shown(made(**{"data.knowledge_base": str(tmp_path / "books"), "data.top_k": top_k}))
    assert {len(passages) for passages in found} == {top_k}
    assert all("book" in passage for passages in found for passage in passages)
  with pytest.raises(ValueError, match="books is of the type bm25, not last"):
    made(**{"data.knowledge_base": str(tmp_path / "books"), "data.retriever": "last"})


@pytest.mark.parametrize(("rows", "parts"), [(8, 1), (24, 1), (24, 3), (32, 4)])
def test_a_step_has_its_rows_in_so_many_parts(made, rows, parts):
  phase = made(**{"rag.batch_size": rows, "rag.accumulate": parts}).phase("rag", None)
  assert {array.shape for array in phase.batch(0).values()} == {(rows, 512)}
  loops = {int(n) for n in re.findall(r"\blength=(\d+)", str(phase.trace()["update"].jaxpr))}
  assert loops & {3, 4, 8, 24, 32} == {parts} - {1}


@pytest.mark.parametrize("rank", [2, 8])
def test_updates_have_the_rank_that_is_asked_for(made, rank):
  trains = jax.tree.leaves(made(**{"rag.lora.rank": rank}).phase("rag", None).abstract_state().params)
  assert trains
  assert all(rank in update.shape[1:] for update in trains)


def test_a_share_of_the_conversations_is_plain(made, sums):
  """In phase `rag` alone: what is asked for, with its own answer, and between the others as they are without it."""
  alone = trained(made(), steps=20)
  is_sum = lambda text: "What is" in text
  assert not any(is_sum(text) for text, _ in alone)
  mixed = trained(made(**{"rag.plain.share": 0.5}, **sums), steps=8)
  plain = [(text, said) for text, said in mixed if is_sum(text)]
  assert 0.35 < len(plain) / len(mixed) < 0.65
  assert {*mixed} - {*plain} <= {*alone}
  for text, said in plain:
    [number] = {*re.findall(r"What is (\d+) \+ (\d+)\?", text)[0]}
    assert said.startswith(f"It is {2 * int(number)}.\n#### {2 * int(number)}")
    assert "RETRIEVAL" not in text
    assert "documents" not in text  # nor what our questions are told to do
  every = made(
    **{"rag.plain.share": 1.0, "pretrain.steps": 2, "pretrain.batch_size": 8, "pretrain.max_tokens": 512}, **sums
  )
  assert all(is_sum(text) for text, _ in trained(every))
  assert not any(is_sum(text) for text, _ in trained(every, "pretrain"))
  assert shown(every) == shown(made())  # and the report asks what it asks
