"""GGUF: files as llama.cpp's converters write them equal transformers, ours come back, others are refused by name."""

import dataclasses
import io

import flax.linen as nn
import gguf
import jax
import numpy as np
import pytest
import sentencepiece as spm
from their_models import (
  MERGES,
  PIECES,
  TEXT,
  make_gemma,
  make_granite,
  make_llama,
  make_mamba,
  our_logits,
  their_logits,
)
from transformers import AutoTokenizer

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.export import export_gguf, export_safetensors
from selfrag_jax.model.gguf import gguf_tokenizer, read_gguf
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.text.chat import CHATML, GEMMA
from selfrag_jax.text.sentencepiece import SentencePieceTokenizer
from selfrag_jax.text.special import SPECIAL_TOKENS

ENDS = {
  "model.embed_tokens.weight": ["token_embd.weight"],
  "model.norm.weight": ["output_norm.weight"],
  "lm_head.weight": ["output.weight"],
  "input_layernorm.weight": ["attn_norm.weight"],
  **{f"self_attn.{x}_proj.weight": [f"attn_{x}.weight"] for x in "qkv"},
  "self_attn.o_proj.weight": ["attn_output.weight"],
}
MLP = {f"mlp.{x}_proj.weight": [f"ffn_{x}.weight"] for x in ("gate", "up", "down")}
LLAMA_NAMES = {**ENDS, **MLP, "post_attention_layernorm.weight": ["ffn_norm.weight"]}
GEMMA_NAMES = {
  **ENDS,
  **MLP,
  "self_attn.q_norm.weight": ["attn_q_norm.weight"],
  "self_attn.k_norm.weight": ["attn_k_norm.weight"],
  "post_attention_layernorm.weight": ["post_attention_norm.weight"],
  "pre_feedforward_layernorm.weight": ["ffn_norm.weight"],
  "post_feedforward_layernorm.weight": ["post_ffw_norm.weight"],
}
GRANITE_NAMES = {
  **ENDS,
  "post_attention_layernorm.weight": ["ffn_norm.weight"],
  "shared_mlp.input_linear.weight": ["ffn_gate.weight", "ffn_up.weight"],
  "shared_mlp.output_linear.weight": ["ffn_down.weight"],
  "mamba.in_proj.weight": ["ssm_in.weight"],
  "mamba.conv1d.weight": ["ssm_conv1d.weight"],
  "mamba.conv1d.bias": ["ssm_conv1d.bias"],
  "mamba.dt_bias": ["ssm_dt.bias"],
  "mamba.A_log": ["ssm_a"],
  "mamba.D": ["ssm_d"],
  "mamba.norm.weight": ["ssm_norm.weight"],
  "mamba.out_proj.weight": ["ssm_out.weight"],
}


def write_gguf(path, model, architecture="llama", pre="smollm", rope_scaling=None):
  """Write a Llama as llama.cpp's converter does."""
  c = model.config
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_context_length(c.max_position_embeddings)
  writer.add_block_count(c.num_hidden_layers)
  writer.add_embedding_length(c.hidden_size)
  writer.add_feed_forward_length(c.intermediate_size)
  writer.add_head_count(c.num_attention_heads)
  writer.add_head_count_kv(c.num_key_value_heads)
  writer.add_layer_norm_rms_eps(c.rms_norm_eps)
  writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
  writer.add_rope_dimension_count(c.head_dim)
  if rope_scaling:
    writer.add_rope_scaling_type(rope_scaling)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(PIECES)
  writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(PIECES) - 2))
  writer.add_token_merges(MERGES)
  write_tensors(writer, model, LLAMA_NAMES)


def write_tensors(writer, model, names):
  """Write the tensors as llama.cpp's converters do, under its names, and end the file."""
  c = model.config
  for name, tensor in model.state_dict().items():
    value, parts = tensor.numpy(), name.split(".")
    prefix = f"blk.{parts[2]}." if ".layers." in name else ""
    stem = ".".join(parts[3:]) if prefix else name
    if name == "lm_head.weight" and c.tie_word_embeddings:
      continue
    if "q_proj" in name or "k_proj" in name:
      width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
      if c.model_type != "gemma3_text":  # rotary pairs become neighbours
        value = value.reshape(-1, 2, width // 2, c.hidden_size).swapaxes(1, 2).reshape(value.shape)
    elif name.endswith("A_log"):
      value = -np.exp(value)[:, None]
    elif name.endswith("mamba.D"):
      value = value[:, None]
    elif name.endswith("conv1d.weight"):
      value = value[:, 0]
    elif name.endswith("mamba.norm.weight"):
      value = value.reshape(c.mamba_n_groups, -1)
    elif "norm" in name and c.model_type == "gemma3_text":
      value = value + 1
    for theirs, part in zip(names[stem], np.split(value, len(names[stem])), strict=True):
      writer.add_tensor(prefix + theirs, np.ascontiguousarray(part))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def write_sizes(path, model, architecture):
  c = model.config
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_context_length(96)
  writer.add_block_count(c.num_hidden_layers)
  writer.add_embedding_length(c.hidden_size)
  writer.add_head_count(c.num_attention_heads)
  writer.add_layer_norm_rms_eps(c.rms_norm_eps)
  return writer


def write_granite(path, model, **others):
  """Write a Granite 4 hybrid; one of attention alone is a `granite` there."""
  c = model.config
  is_mamba = [kind == "linear_attention" for kind in c.layer_types]
  writer = write_sizes(path, model, "granitehybrid" if any(is_mamba) else "granite")
  writer.add_feed_forward_length(c.shared_intermediate_size)
  heads = [0 if mamba else c.num_key_value_heads for mamba in is_mamba]
  writer.add_head_count_kv(heads if any(is_mamba) else c.num_key_value_heads)
  writer.add_attention_scale(c.attention_multiplier)
  writer.add_embedding_scale(c.embedding_multiplier)
  writer.add_residual_scale(c.residual_multiplier)
  writer.add_logit_scale(c.logits_scaling)
  if any(is_mamba):
    writer.add_ssm_conv_kernel(c.mamba_d_conv)
    writer.add_ssm_state_size(c.mamba_d_state)
    writer.add_ssm_group_count(c.mamba_n_groups)
    writer.add_ssm_inner_size(c.mamba_expand * c.hidden_size)
    writer.add_ssm_time_step_rank(c.mamba_n_heads)
  writer.add_rope_scaling_finetuned(c.position_embedding_type == "rope")
  for name, value in others.items():
    writer.add_uint32(name, value)
  write_tensors(writer, model, GRANITE_NAMES)


def write_gemma(path, model):
  c = model.config
  writer = write_sizes(path, model, "gemma3")
  writer.add_feed_forward_length(c.intermediate_size)
  writer.add_head_count_kv(c.num_key_value_heads)
  writer.add_key_length(c.head_dim)
  writer.add_value_length(c.head_dim)
  writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
  writer.add_sliding_window(c.sliding_window)
  write_tensors(writer, model, GEMMA_NAMES)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_equals_transformers(tied, tmp_path):
  model = make_llama(vocab_size=len(PIECES), tie_word_embeddings=tied, hidden_size=64, max_position_embeddings=96)
  write_gguf(tmp_path / "tiny.gguf", model)
  loaded = load_pretrained(tmp_path / "tiny.gguf")
  assert loaded.context_tokens == 96
  assert (loaded.config.norm_eps, loaded.config.rope_base, loaded.config.tie_embeddings) == (1e-4, 500.0, tied)
  np.testing.assert_allclose(our_logits(loaded), their_logits(model), atol=1e-4, rtol=0)
  assert loaded.config.vocab_size == loaded.tokenizer.vocab_size == len(PIECES) + len(SPECIAL_TOKENS) + 3
  assert loaded.chat_template == CHATML
  ids = loaded.tokenizer.encode(TEXT)
  assert PIECES[ids[0]] == "the"
  assert PIECES.index("<|im_end|>") not in ids


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(architecture="gemma", pre="gemma"), "general.architecture is 'gemma'"),
    (dict(pre="llama-bpe"), "'llama-bpe'"),
    (dict(rope_scaling=gguf.RopeScalingType.YARN), "llama.rope.scaling.type is 'yarn'"),
  ],
)
def test_gguf_that_is_not_implemented_is_refused_by_name(fields, message, tmp_path):
  write_gguf(tmp_path / "tiny.gguf", make_llama(vocab_size=len(PIECES)), **fields)
  with pytest.raises(ValueError, match=message):
    load_pretrained(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("options", [{}, {"mamba_n_groups": 2, "tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("pattern", ["TTMM", "MMMM", "TMTM"])
def test_a_granite_hybrid_equals_transformers(pattern, options, tmp_path):
  model = make_granite(pattern, **options)
  write_granite(tmp_path / "tiny.gguf", model)
  loaded = load_pretrained(tmp_path / "tiny.gguf")
  assert (loaded.context_tokens, loaded.config.rope, loaded.config.mamba_mlp) == (96, False, True)
  np.testing.assert_allclose(our_logits(loaded), their_logits(model), atol=1e-4, rtol=0)


def test_a_granite_of_attention_alone_equals_transformers(tmp_path):
  model = make_granite("TT", position_embedding_type="rope")
  write_granite(tmp_path / "tiny.gguf", model)
  np.testing.assert_allclose(
    our_logits(load_pretrained(tmp_path / "tiny.gguf")), their_logits(model), atol=1e-4, rtol=0
  )


def test_a_gemma_equals_transformers(tmp_path):
  bases = {"full_attention": 500.0, "sliding_attention": 10_000.0}  # the file has no field for the second
  rotary = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
  model = make_gemma("LLLLLTL", rope_parameters=rotary, query_pre_attn_scalar=12)
  write_gemma(tmp_path / "tiny.gguf", model)
  np.testing.assert_allclose(
    our_logits(load_pretrained(tmp_path / "tiny.gguf")), their_logits(model), atol=1e-4, rtol=0
  )


@pytest.mark.parametrize(
  "make",
  [
    make_llama,
    lambda: make_llama(tie_word_embeddings=True, head_dim=12),
    make_granite,
    lambda: make_granite("MMMM", mamba_n_groups=2),
    lambda: make_granite("TT", position_embedding_type="rope"),
    lambda: make_gemma("LLTLLT", query_pre_attn_scalar=12),
    lambda: make_gemma("LL", query_pre_attn_scalar=12),
  ],
)
def test_what_is_written_comes_back(make, tmp_path):
  make().save_pretrained(tmp_path / "theirs")
  loaded = load_pretrained(tmp_path / "theirs", extra_tokens=5)
  path = tmp_path / "tiny.gguf"
  export_gguf(path, loaded.config, loaded.params, vocab_size=loaded.base_vocab_size, context_tokens=77)
  again = load_pretrained(path, extra_tokens=5)
  assert again.context_tokens == 77
  if "M" not in loaded.config.block_pattern:  # llama.cpp has an architecture of attention alone
    assert read_gguf(path)[0]["general.architecture"] in ("llama", "granite", "gemma3")
  mamba = {name: value for name, value in vars(loaded.config).items() if name.startswith(("ssm_", "mamba_"))}
  unsaid = {} if "M" in loaded.config.block_pattern else mamba  # nothing is said of layers that are not there
  assert dataclasses.replace(again.config, **unsaid) == loaded.config
  np.testing.assert_allclose(our_logits(again), our_logits(loaded), atol=1e-5, rtol=0)
  with pytest.raises(FileExistsError, match="exists"):
    export_gguf(path, loaded.config, loaded.params, context_tokens=77)


def test_a_hybrid_of_ours_comes_back_without_the_mlps_that_it_does_not_have(tmp_path):
  config = ModelConfig(61, d_model=32, n_layers=3, block_pattern="MTM", init_scale=0.2)
  params = nn.unbox(init_params(config, jax.random.key(0)))
  export_gguf(tmp_path / "tiny.gguf", config, params, context_tokens=77)
  loaded = load_pretrained(tmp_path / "tiny.gguf")
  assert loaded.config == dataclasses.replace(config, init_scale=0.02, attention_multiplier=None)
  for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(loaded.params), strict=True):
    rows = 61 if ours.shape == (128, 32) else None  # the embedding is padded
    np.testing.assert_allclose(theirs[:rows], ours[:rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  ("make", "prefix", "numbers"),
  [
    (make_granite, "granitehybrid", ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")),
    (lambda: make_llama(rope_theta=500, head_dim=12), "llama", ("rope.freq_base",)),
    (lambda: make_gemma(query_pre_attn_scalar=12), "gemma3", ("rope.freq_base", "rope.freq_base_swa")),
  ],
)
def test_fields_have_the_types_that_llama_cpp_asks_for(make, prefix, numbers, tmp_path):
  make().save_pretrained(tmp_path / "theirs")
  loaded = load_pretrained(tmp_path / "theirs")
  export_gguf(tmp_path / "tiny.gguf", loaded.config, loaded.params, context_tokens=77)
  fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
  for name in (*numbers, "attention.layer_norm_rms_epsilon"):
    assert fields[f"{prefix}.{name}"].types == [gguf.GGUFValueType.FLOAT32], name
  for name in ("context_length", "vocab_size", "block_count", "attention.key_length", "attention.value_length"):
    assert fields[f"{prefix}.{name}"].types == [gguf.GGUFValueType.UINT32], name


@pytest.mark.parametrize("make", [make_granite, lambda: make_gemma("LT", query_pre_attn_scalar=12)])
def test_numbers_of_bfloat16_keep_every_bit_in_float32(make, tmp_path):
  make().bfloat16().save_pretrained(tmp_path / "theirs")
  loaded = load_pretrained(tmp_path / "theirs", dtype="bfloat16")
  export_gguf(tmp_path / "tiny.gguf", loaded.config, loaded.params, context_tokens=77)
  again = load_pretrained(tmp_path / "tiny.gguf", dtype="bfloat16")
  for ours, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(again.params), strict=True):
    np.testing.assert_array_equal(theirs, ours)


@pytest.mark.parametrize(
  ("others", "message"),
  [
    ({"granitehybrid.expert_count": 4}, "granitehybrid.expert_count is 4"),
    ({"granitehybrid.attention.key_length": 9}, "attn_v.weight has shape"),
  ],
)
def test_a_granite_that_is_not_implemented_is_refused_by_name(others, message, tmp_path):
  write_granite(tmp_path / "tiny.gguf", make_granite(), **others)
  with pytest.raises(ValueError, match=message):
    load_pretrained(tmp_path / "tiny.gguf")


def test_a_model_that_gguf_cannot_express_is_refused_by_name(tmp_path):
  make_mamba().save_pretrained(tmp_path)
  loaded = load_pretrained(tmp_path)
  loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, logit_softcap=3.0))
  with pytest.raises(ValueError, match=r"logit_softcap is 3\.0; granitehybrid can only express None"):
    export_gguf(tmp_path / "tiny.gguf", loaded.config, loaded.params, context_tokens=77)
  assert not (tmp_path / "tiny.gguf").exists()


def test_an_exported_file_holds_the_tokenizer(tmp_path):
  write_gguf(tmp_path / "theirs.gguf", make_llama(vocab_size=len(PIECES)))
  loaded = load_pretrained(tmp_path / "theirs.gguf")
  export_gguf(tmp_path / "ours.gguf", loaded.config, loaded.params, tokenizer=loaded.tokenizer, context_tokens=77)
  again = load_pretrained(tmp_path / "ours.gguf")
  assert again.base_vocab_size == again.tokenizer.vocab_size == loaded.tokenizer.vocab_size
  assert again.tokenizer.special == loaded.tokenizer.special
  assert again.tokenizer.encode(TEXT) == loaded.tokenizer.encode(TEXT)


@pytest.mark.parametrize("keep", [True, False])
def test_sentence_pieces_go_into_folders_and_files_and_come_back(keep, tmp_path):
  out = io.BytesIO()
  spm.SentencePieceTrainer.train(
    sentence_iterator=iter([TEXT, "paths and hats"] * 20), model_writer=out, vocab_size=300, model_type="bpe",
    byte_fallback=True, user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n\n"], minloglevel=2,
    normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
  )  # fmt: skip
  tokenizer = SentencePieceTokenizer(out.getvalue())
  make_gemma("LT", vocab_size=300, query_pre_attn_scalar=12).save_pretrained(tmp_path / "theirs")
  (tmp_path / "theirs" / "tokenizer.model").write_bytes(out.getvalue())
  loaded = load_pretrained(tmp_path / "theirs")
  assert loaded.chat_template == GEMMA
  assert loaded.config.vocab_size == tokenizer.vocab_size
  rows = None if keep else loaded.base_vocab_size
  of = dict(tokenizer=loaded.tokenizer, vocab_size=rows, context_tokens=77)
  export_safetensors(tmp_path / "ours", loaded.config, loaded.params, **of)
  export_gguf(tmp_path / "ours.gguf", loaded.config, loaded.params, **of)
  fields, _ = read_gguf(tmp_path / "ours.gguf")
  assert fields["tokenizer.ggml.eot_token_id"] == tokenizer.special["<end_of_turn>"]
  assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.special["</s>"]
  for name in ("ours", "ours.gguf"):
    again = load_pretrained(tmp_path / name).tokenizer
    assert again.special == tokenizer.special
    for text in (TEXT, "  two\n\nlines <start_of_turn> é🙂"):
      assert again.encode(text) == tokenizer.encode(text)
      assert again.decode(again.encode(text)) == text


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("tokenizer.ggml.scores", None, "tokenizer.ggml.scores is missing"),
    ("tokenizer.ggml.scores", [0.5], r"tokenizer.ggml.tokens has \d+ entries"),
    ("tokenizer.ggml.unknown_token_id", "first", r"tokenizer.ggml.unknown_token_id is 'first'"),
    ("tokenizer.ggml.token_type", [True] * len(PIECES), "tokenizer.ggml.token_type has True"),
    ("tokenizer.ggml.add_space_prefix", 1, "tokenizer.ggml.add_space_prefix is 1"),
    ("tokenizer.ggml.model", "bert", "the file's tokenizer is 'bert'.*implemented are 'llama', and 'gpt2'"),
  ],
)
def test_a_list_of_pieces_that_does_not_fit_is_named(field, value, message):
  metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.pre": "default"}
  metadata |= {"tokenizer.ggml.token_type": [1] * len(PIECES), "tokenizer.ggml.scores": [0.0] * len(PIECES)}
  with pytest.raises(ValueError, match=message):
    gguf_tokenizer({**metadata, field: value})


@pytest.mark.parametrize("keep", [True, False])
def test_exported_tokenizer_gives_the_same_ids_here_and_in_transformers(keep, tmp_path):
  write_gguf(tmp_path / "tiny.gguf", make_llama(vocab_size=len(PIECES)))
  loaded = load_pretrained(tmp_path / "tiny.gguf")
  rows = loaded.config.vocab_size if keep else loaded.base_vocab_size
  folder = tmp_path / "exported"
  export_safetensors(folder, loaded.config, loaded.params, tokenizer=loaded.tokenizer, vocab_size=rows)
  again = load_pretrained(folder)
  assert again.base_vocab_size == rows
  assert again.tokenizer.special == loaded.tokenizer.special
  assert again.tokenizer.encode(TEXT) == loaded.tokenizer.encode(TEXT)
  theirs = AutoTokenizer.from_pretrained(folder)
  assert theirs("the 42 paths").input_ids == loaded.tokenizer.encode("the 42 paths")
  assert len(theirs) == rows
  assert {token.content: i for i, token in theirs.added_tokens_decoder.items()} == {
    token: i for token, i in loaded.tokenizer.special.items() if i < rows
  }
