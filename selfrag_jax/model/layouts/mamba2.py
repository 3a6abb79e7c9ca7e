"""Mamba-2 in Hugging Face's format."""

import math

from selfrag_jax.model.layouts.table import PLAIN, Layout, Weight, all_of
from selfrag_jax.model.layouts.transformer import mamba
from selfrag_jax.model.vocabulary import HEAD

MAMBA2 = Layout(
  architecture="Mamba2ForCausalLM",
  blocks="M",
  fields={
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "expand": "ssm_expand",
    "state_size": "ssm_state",
    "head_dim": "ssm_head_dim",
    "num_heads": "ssm_heads",
    "n_groups": "ssm_groups",
    "conv_kernel": "ssm_conv",
    "chunk_size": "ssm_chunk",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
  },
  defaults={"tie_word_embeddings": False},
  allowed={
    "hidden_act": ("silu",),
    "use_bias": (False,),
    "use_conv_bias": (True,),
    "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),  # as transformers 4 and 5 write it
    "quantization_config": (None,),
  },
  implied={**PLAIN, "block_pattern": all_of("M", "num_hidden_layers"), "mamba_mlp": False},
  weights=(
    Weight("backbone.embeddings.weight", "embed", "V D", "V D"),
    Weight("backbone.layers.{}.norm.weight", "mixer_norm/scale", "D", "D"),
    *mamba("backbone.layers.{}.mixer."),
    Weight("backbone.norm_f.weight", "final_norm/scale", "D", "D"),
    Weight("lm_head.weight", HEAD, "V D", "V D"),
  ),
)
