"""The RAG experiment: conditions differ in the documents alone; a run trains, reports, and is evaluated again."""

import json

import flax.linen as nn
import jax
import jsonschema
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from configs.rag import get_config
from selfrag_jax.experiments.chat_model import Answer, ChatModel, load_chat
from selfrag_jax.experiments.rag import PHASES, PlainConfig, build, dry_run, evaluate, read_plain, run, value_names
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.export import export_safetensors
from selfrag_jax.model.lm import init_params
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.tasks.countries import Countries
from selfrag_jax.tasks.country_wordings import RELATIONS, UNKNOWN
from selfrag_jax.tasks.facts import FIRST, LAST, SPLITS
from selfrag_jax.tasks.rag import save_conversations
from selfrag_jax.tasks.task import Task
from selfrag_jax.text.chat import COMPACT, render_conversation
from selfrag_jax.text.rag_prompts import create_rag_training_example
from selfrag_jax.text.tokenizer import BPETokenizer
from selfrag_jax.train.load import load_model

PHASE = {"steps": 2, "batch_size": 8, "accumulate": 1}
TINY = {
  "mesh.data": 1,
  "mesh.fsdp": 8,
  **{f"{phase}.{key}": value for phase in PHASES for key, value in PHASE.items()},
  "model.d_model": 32,
  "model.ssm_head_dim": 16,
  "model.mlp_dim": 32,
  "evaluation.final": 8,
  "evaluation.periodic": 4,
  "evaluation.batch_size": 4,
}


def made(**changes):
  config = get_config("hybrid")
  config.update_from_flattened_dict(TINY | changes)
  return build(config.to_dict())


def documents(row):
  found = [message for message in row["messages"] if message["role"] == "retrieval"]
  return [document for message in found for document in message["documents"]]


def test_conditions_differ_in_the_documents_alone():
  experiment = made()
  rows = {condition: list(experiment.reading.questions("test", 8, condition)) for condition in Countries.conditions}
  for condition, of in rows.items():
    assert [row["messages"][-2] for row in of] == [row["messages"][-2] for row in rows["retrieved"]], condition
    assert [len(documents(row)) for row in of] == [0 if condition == "none" else 5] * 8
  for condition in ("none", "shuffled", "missing"):  # no document answers
    shown = [[document["content"] for document in documents(row)] for row in rows[condition]]
    assert not any(row["gold"] in found for row, found in zip(rows["retrieved"], shown, strict=True)), condition
  assert all(row["answers"] == (UNKNOWN,) for row in rows["missing"])
  pairs = zip(rows["retrieved"], rows["edited"], strict=True)
  assert all(before["answers"] != after["answers"] for before, after in pairs)


@pytest.mark.parametrize("shown", ["none", "shuffled"])
def test_the_controls_train_on_other_documents(shown):
  experiments = [made(**{"rag.documents": name, "rag.max_tokens": 384}) for name in ("retrieved", shown)]
  plain, control = (experiment.phase("rag", None).batch(0) for experiment in experiments)
  assert (plain["tokens"] != control["tokens"]).any()
  start = experiments[0].tokenizer.special["[RETRIEVAL_START]"]
  assert (plain["tokens"] == start).sum() == sum(row.max() for row in plain["segment_ids"])  # one a conversation
  if shown == "none":
    assert not (control["tokens"] == start).any()
    assert control["segment_ids"].max() > plain["segment_ids"].max()  # shorter: more fit into a row


def test_the_longest_conversation_of_a_training_fits_into_a_row():
  """One that does not would stop a training at any of its steps."""
  experiment = build(get_config("hybrid").to_dict())
  length = lambda text: len(experiment.tokenizer.encode(text))
  wordings = [wordings[by] for wordings in RELATIONS.values() for by in ("train", "authors")]
  name = f"{FIRST[0]} {LAST[0]}"
  statement = max((text.format(c=name, v=name) for wording in wordings for text in wording.statements), key=length)
  question = max((text.format(c=name) for wording in wordings for text in wording.questions), key=length)
  content = " ".join([statement] * experiment.config["data"]["repeats"])
  messages = [{"role": "retrieval", "documents": [{"title": name, "content": content}] * experiment.reading.top_k}]
  turn = [{"role": "user", "content": question}, {"role": "assistant", "content": max(UNKNOWN, name, key=length)}]
  messages += turn * (1 + experiment.reading.further)
  ids, _ = render_conversation(experiment.tokenizer, {"messages": messages}, COMPACT)
  assert max(length(word) for word in (*FIRST, *LAST)) == 1
  assert len(ids) <= min(getattr(experiment, phase).max_tokens for phase in PHASES)


def test_the_first_phase_reads_all_and_the_others_answers_alone():
  experiment = made()
  whole, choose, rag = (experiment.phase(name, None).batch(0) for name in experiment.phases())
  assert np.array_equal(whole["mask"], whole["segment_ids"] > 0)
  for answers in (choose, rag):
    assert 0.05 < answers["mask"].sum() / (answers["segment_ids"] > 0).sum() < 0.15


@pytest.mark.parametrize(
  ("shares", "changed"), [(("noise", "authors"), ["rag"]), (("near", "reversed", "alike"), ["pretrain", "rag"])]
)
def test_each_phase_reads_its_own_form(shares, changed):
  tokens = lambda experiment, name: experiment.phase(name, None).batch(0)["tokens"]
  varied, plain = made(), made(**{f"data.{share}": 0.0 for share in shares})
  assert [name for name in PHASES if not np.array_equal(tokens(varied, name), tokens(plain, name))] == changed


def test_a_control_sees_in_every_phase_of_answers_what_it_sees_in_the_last(monkeypatch):
  experiment, seen = made(**{"rag.documents": "none"}), []
  training = Countries.training
  monkeypatch.setattr(
    Countries, "training", lambda self, shown, share: seen.append(shown) or training(self, shown, share)
  )
  for name in experiment.phases():
    experiment.phase(name, None)
  assert seen == ["retrieved", "none", "none"]


def test_documents_are_shown_as_often_as_the_config_says(monkeypatch):
  once, twice = (made(**{"data.repeats": n, **{f"{p}.max_tokens": 384 for p in PHASES}}) for n in (1, 2))
  for phase in once.phases():
    lengths = [(of.phase(phase, None).batch(0)["segment_ids"] > 0).sum() for of in (once, twice)]
    assert lengths[0] < lengths[1]
  asked = []
  monkeypatch.setattr(ChatModel, "answer", lambda self, messages, **_: asked.append(messages) or [Answer("", 0, 0)] * 4)
  for experiment in (once, twice):
    experiment.score(nn.unbox(init_params(experiment.model, jax.random.key(0))), "test", 4, "retrieved")
  for before, after in zip(*asked, strict=True):
    assert [f"{one['content']} {one['content']}" for one in before[0]["documents"]] == [
      one["content"] for one in after[0]["documents"]
    ]
    assert before[1:] == after[1:]


def test_a_run_reports_and_is_evaluated_again(tmp_path, capsys):
  experiment = made()
  dry_run(experiment)
  assert "first conversation of phase rag" in capsys.readouterr().out
  assert not list(tmp_path.iterdir())
  report = run(experiment, tmp_path)
  jsonschema.validate(json.loads(json.dumps(report)), read_schema("rag"))
  assert set(numbers(report)) == value_names(experiment)
  assert (tmp_path / "rag.csv").read_text().count("\n") == 1 + 3 * len(Countries.conditions)
  with np.load(tmp_path / "rag.npz", allow_pickle=False) as scores:
    assert scores["rag.edited.exact"].mean() == report["em"]["rag"]["edited"]
  again = evaluate(made(), tmp_path)
  assert {**again, "wall_seconds": 0} == {**report, "wall_seconds": 0}


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
  with pytest.raises(ValueError, match=r"config\.data\.path is empty; give the folder"):
    build(get_config("conversations").to_dict())


def _asked(town):
  shown = [{"title": town, "content": f"{town} has a harbor."}, {"title": "Else", "content": "Nothing is here. " * 2}]
  return create_rag_training_example("What has it?", f"a harbor of {town}", shown)


def test_plain_conversations_need_questions_of_files_and_their_own_files(tmp_path):
  with pytest.raises(ValueError, match=r"rag\.plain\.share = 0\.2 is for questions of files"):
    made(**{"rag.plain.share": 0.2})
  with pytest.raises(ValueError, match=r"needs the files of gsm8k: set rag\.plain\.path"):
    read_plain(PlainConfig(share=0.2, data_set="gsm8k"), is_of_files=True)
  (tmp_path / "train.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "It is 2.\\n#### 2"}\n')
  plain = read_plain(PlainConfig(share=0.2, data_set="gsm8k", path=str(tmp_path)), is_of_files=True)
  assert len(plain) == 1
  assert read_plain(PlainConfig(), is_of_files=False) is None


def test_some_conditions_are_enough(tmp_path):
  changes = {"evaluation.conditions": "retrieved, none", "evaluation.final": 4}
  report = run(experiment := made(**changes), tmp_path)
  assert list(report["em"]["rag"]) == ["retrieved", "none"]
  assert set(numbers(report)) == value_names(experiment)
  with pytest.raises(ValueError, match=r"config\.evaluation\.conditions has 'retreived'; did you mean retrieved\?"):
    made(**{"evaluation.conditions": "retreived"})


def test_updates_need_a_model_from_the_first_phase_on():
  with pytest.raises(ValueError, match=r"pretrain\.lora\.rank = 4 needs a model to adapt: set config\.init"):
    made(**{"pretrain.lora.rank": 4})


def test_a_run_with_lora_changes_the_projections_alone(tmp_path):
  experiment = made(**{"rag.lora.rank": 4, "evaluation.final": 4})
  dry_run(experiment)
  report = run(experiment, tmp_path)
  assert {**evaluate(experiment, tmp_path), "wall_seconds": 0} == {**report, "wall_seconds": 0}
  before, after = (load_model(tmp_path, phase).params["params"] for phase in ("choose", "rag"))
  assert (before["embed"] == after["embed"]).all()
  mixers = [params["segments_0"]["layer_0"]["mixer"]["in_proj"] for params in (before, after)]
  assert not (mixers[0] == mixers[1]).all()


@pytest.fixture
def chat_folder(tmp_path):
  """A tiny model with the tokens of ChatML, as transformers would save it."""
  alphabet = sorted(ByteLevel.alphabet())
  tokenizer = BPETokenizer.from_pieces([*alphabet, "<|im_start|>", "<|im_end|>"], [], [256, 257])
  sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "mlp_dim": 16, "init_scale": 0.3}
  model = ModelConfig(vocab_size=tokenizer.vocab_size, **sizes)
  params = nn.unbox(init_params(model, jax.random.key(0)))
  export_safetensors(tmp_path / "chat", model, params, tokenizer=tokenizer, vocab_size=258, context_tokens=512)
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


def test_a_pretrained_model_is_tuned_in_two_runs_and_keeps_its_tokenizer(chat_folder, squad, tmp_path):
  small = {
    "data.path": str(squad), "data.top_k": 1, "model.remat": "none", "evaluation.final": 6,
    "evaluation.periodic": 2, "evaluation.batch_size": 2, "evaluation.max_new_tokens": 3,
    **{f"rag.{key}": value for key, value in (("steps", 2), ("batch_size", 8), ("max_tokens", 512), ("accumulate", 1))},
  }  # fmt: skip
  init = chat_folder
  for name, changes in (("first", {}), ("second", {"rag.lora.rank": 2})):
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


def test_a_run_from_scratch_is_no_start_for_another_tokenizer(tmp_path):
  run(made(**{"evaluation.final": 4}), tmp_path)
  with pytest.raises(ValueError, match=r"holds no tokenizer: put its tokenizer\.json beside"):
    made(init=str(tmp_path))
