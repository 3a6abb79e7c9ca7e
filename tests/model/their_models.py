"""Models of transformers with random weights, and their logits beside ours: the oracles of pretrained models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
  Gemma3ForCausalLM,
  Gemma3TextConfig,
  GraniteMoeHybridConfig,
  GraniteMoeHybridForCausalLM,
  LlamaConfig,
  LlamaForCausalLM,
  Mamba2Config,
  Mamba2ForCausalLM,
)

from selfrag_jax.model.lm import LM

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 21))
BASES = {"full_attention": 500.0, "sliding_attention": 50.0}
BYTES = sorted(ByteLevel.alphabet())
PIECES = ["<|im_start|>", "<|im_end|>", *BYTES[:-3], "th", "the"]  # without three bytes, as SmolLM2 lacks 21
MERGES = ["t h", "th e"]
TEXT = "the 42 paths <|im_end|>"


def make_llama(**overrides):
  fields = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
  fields |= dict(num_key_value_heads=2, rope_theta=500.0, rms_norm_eps=1e-4)
  return perturbed(LlamaForCausalLM(LlamaConfig(**(fields | overrides))))


def make_mamba(**overrides):
  fields = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=4, n_groups=1)
  return perturbed(Mamba2ForCausalLM(Mamba2Config(**(fields | dict(chunk_size=8) | overrides))))


def make_granite(pattern="MTM", **overrides):
  names = {"T": "full_attention", "M": "linear_attention"}
  fields = dict(vocab_size=61, hidden_size=32, num_hidden_layers=len(pattern), num_attention_heads=4)
  fields |= dict(num_key_value_heads=2, shared_intermediate_size=40, num_local_experts=0, rms_norm_eps=1e-4)
  fields |= dict(layer_types=[names[block] for block in pattern], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4)
  fields |= dict(mamba_chunk_size=8, embedding_multiplier=3, residual_multiplier=0.3, logits_scaling=2)
  fields |= dict(attention_multiplier=0.2)
  return perturbed(GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**(fields | overrides))))


def make_gemma(pattern="LLT", **overrides):
  names = {"L": "sliding_attention", "T": "full_attention"}
  fields = dict(vocab_size=61, hidden_size=32, num_hidden_layers=len(pattern), num_attention_heads=4, head_dim=12)
  fields |= dict(num_key_value_heads=2, intermediate_size=40, rms_norm_eps=1e-4, sliding_window=5)
  fields |= dict(query_pre_attn_scalar=24, layer_types=[names[block] for block in pattern])
  fields |= dict(rope_parameters={kind: {"rope_type": "default", "rope_theta": b} for kind, b in BASES.items()})
  return perturbed(Gemma3ForCausalLM(Gemma3TextConfig(**(fields | overrides))))


def perturbed(model):
  """Move every parameter: ones and zeros that are swapped, or left out, would not show."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
  return model.eval()


MODELS = {
  "llama": make_llama,
  "llama_tied_wide_heads": lambda: make_llama(tie_word_embeddings=True, head_dim=12),
  "mamba2": make_mamba,
  "mamba2_tied_groups": lambda: make_mamba(n_groups=2, tie_word_embeddings=True),
  **{f"granite_{p}": functools.partial(make_granite, p) for p in ("TTMM", "MMTT", "MMMM", "TTTT", "TMTM")},
  "granite_tied_groups": lambda: make_granite(tie_word_embeddings=True, mamba_n_groups=2),
  "granite_rope": lambda: make_granite(position_embedding_type="rope"),
  **{f"gemma_{p}": functools.partial(make_gemma, p) for p in ("LLT", "LL", "TT", "LTLTT")},
  "gemma_softcap": lambda: make_gemma(final_logit_softcapping=1.0),
  "gemma_untied": lambda: make_gemma(tie_word_embeddings=False),
}


def our_logits(loaded, tokens=TOKENS):
  model = LM(loaded.config)
  forward = jax.jit(lambda params: model.apply(params, model.apply(params, jnp.asarray(tokens)), method="logits"))
  return np.asarray(forward(loaded.params))[..., : loaded.base_vocab_size]


def their_logits(model, tokens=TOKENS):
  with torch.no_grad():
    return model(torch.tensor(tokens), use_cache=False).logits.numpy()
