"""lm-evaluation-harness on our models: the same results as its Hugging Face backend on the same weights."""

import json
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from selfrag_jax.apps.harness import HarnessLM
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import LoadedModel, load_model

CONTEXT = 48
TEXTS = [f"The {a} of {b} is {c}." for a in ("port", "river") for b in ("Ostia", "Lund") for c in ("old", "very long")]
LONG = " ".join(TEXTS) * 2  # several windows
FIRST, LAST = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A Llama that was not trained, and a tokenizer, in the files of Hugging Face."""
  path = tmp_path_factory.mktemp("llama")
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[FIRST, LAST], initial_alphabet=alphabet)
  tokenizer.train_from_iterator(TEXTS, trainer)
  PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=FIRST, eos_token=LAST).save_pretrained(path)
  torch.manual_seed(0)
  sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
  config = LlamaConfig(
    vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT, initializer_range=0.3,
    bos_token_id=0, eos_token_id=1, **sizes,
  )  # fmt: skip
  LlamaForCausalLM(config).save_pretrained(path)
  return path


@pytest.fixture(scope="module")
def both(folder):
  # its cache of logits takes the wrong ones where the same text is split at several places
  theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3, logits_cache=False)
  return theirs, HarnessLM(load_model(folder), batch_size=3)


def asked(kind, arguments):
  return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def test_likelihoods_are_those_of_the_other_backend(both):
  pairs = [(text[:n], text[n:]) for text in TEXTS for n in (4, 9, 14)] + [("", "The port"), (LONG, " and so on")]
  theirs, ours = (model.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True) for model in both)
  np.testing.assert_allclose([score for score, _ in ours], [score for score, _ in theirs], atol=2e-4)
  assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_whole_texts_are_scored_in_the_same_windows(both):
  texts = [(LONG,), (TEXTS[0],), (LONG[:100],)]
  theirs, ours = (
    model.loglikelihood_rolling(asked("loglikelihood_rolling", texts), disable_tqdm=True) for model in both
  )
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_continuations_are_those_of_the_other_backend(both):
  requests = [
    *((text, {"until": ["a"], "max_gen_toks": 12}) for text in TEXTS),
    (TEXTS[0], {"until": [], "max_gen_toks": 5}),
    (LONG, {"until": ["."], "max_gen_toks": 8}),  # its beginning is cut
  ]
  theirs, ours = (model.generate_until(asked("generate_until", requests), disable_tqdm=True) for model in both)
  assert ours == theirs
  assert any(ours)


def test_a_task_gives_the_same_report(both, tmp_path):
  rows = [{"q": text, "choices": [" yes", " no", " never"], "gold": i % 3} for i, text in enumerate(TEXTS)]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (tmp_path / "ours.yaml").write_text(
    f"task: ports\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path / 'rows.jsonl'}}}\n"
    "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: gold\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
  )
  tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
  reports = [
    simple_evaluate(model=model, tasks=["ports"], task_manager=tasks, bootstrap_iters=0, log_samples=True)
    for model in both
  ]
  scores = [{name: value for name, value in report["results"]["ports"].items() if "acc" in name} for report in reports]
  assert scores[0] == scores[1]
  said = [np.array([sample["filtered_resps"] for sample in report["samples"]["ports"]]) for report in reports]
  np.testing.assert_allclose(said[0].astype(float), said[1].astype(float), atol=2e-4)


@pytest.mark.parametrize(("first", "last"), [("<s>", "</s>"), ("<|endoftext|>", "<|endoftext|>"), ("<A>", "<B>")])
def test_tokens_of_models_that_do_not_chat(folder, tmp_path, first, last):
  """The tokens around a text are the model's own, as in the other backend, and never appended ones."""
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  for file in ("tokenizer.json", "tokenizer_config.json"):
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(text.replace(FIRST, first).replace(LAST, last if last != first else "<other>"))
  options = {"prefix_token": first, "end_token": last} if first == "<A>" else {}
  theirs = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", logits_cache=False)
  if first == "<A>":
    with pytest.raises(ValueError, match=r"the model knows no control token </s> or .*end_token="):
      HarnessLM(load_model(tmp_path))
  ours = HarnessLM(load_model(tmp_path), **options)
  assert (ours.prefix_token_id, ours.eot_token_id) == (0, 0 if first == last else 1)
  pairs = [("", text) for text in TEXTS]
  scores = [
    [score for score, _ in m.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)] for m in (theirs, ours)
  ]
  np.testing.assert_allclose(scores[1], scores[0], atol=2e-4)


def test_text_never_becomes_a_control_token(both):
  control = both[1].tok_encode(f"a{LAST}b{FIRST}")
  assert not {both[1].eot_token_id, both[1].prefix_token_id} & set(control)
  assert (both[1].prefix_token_id, both[1].eot_token_id) == (0, 1)


def test_what_cannot_be_asked_is_an_error(both, folder):
  loaded = load_model(folder)
  with pytest.raises(ValueError, match="without a tokenizer"):
    HarnessLM(LoadedModel(loaded.config, loaded.params, {}, None))
  with pytest.raises(ValueError, match="max_gen_toks = 48 leaves no room for a text: this model reads 48 tokens"):
    both[1].generate_until(asked("generate_until", [("a", {"max_gen_toks": 48})]))


def test_a_model_that_began_here_is_asked_too():
  config = ModelConfig(
    ByteTokenizer().vocab_size, d_model=16, n_layers=2, n_heads=2, block_pattern="TM", ssm_head_dim=8
  )
  params = nn.unbox(init_params(config, jax.random.key(0)))
  model = HarnessLM(LoadedModel(config, params, {}, ByteTokenizer()), batch_size=2, max_new_tokens=4)
  [(score, _)] = model.loglikelihood(asked("loglikelihood", [("ab", "cd")]), disable_tqdm=True)
  ids = [model.prefix_token_id, *model.tok_encode("abcd")][1:]
  logits = LM(config).apply(params, LM(config).apply(params, np.array([ids])), method="logits")
  log_probs = np.asarray(jax.nn.log_softmax(logits))[0]
  assert score == pytest.approx(log_probs[1, ids[2]] + log_probs[2, ids[3]], abs=1e-4)
  best, other = int(log_probs[1].argmax()), int(log_probs[1].argmin())
  scored = model._loglikelihood_tokens([(None, ids[:2], [best]), (None, ids[:2], [other])], disable_tqdm=True)
  assert [greedy for _, greedy in scored] == [True, False]
  sampled = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "until": ["."]}
  said = model.generate_until(asked("generate_until", [("ab", sampled)] * 8 + [("", sampled)]), disable_tqdm=True)
  assert len(set(said)) > 4  # no batch repeats another one's samples
  assert len(model.generate_until(asked("generate_until", [("ab", {"do_sample": True})]), disable_tqdm=True)) == 1
  short = HarnessLM(LoadedModel(config, params, {}, ByteTokenizer()), max_length=8)
  with pytest.raises(ValueError, match="a continuation has 12 tokens, this model reads 8"):
    short.loglikelihood(asked("loglikelihood", [("ab", "c" * 12)]), disable_tqdm=True)
