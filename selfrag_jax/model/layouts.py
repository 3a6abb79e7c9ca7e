"""The layouts of architectures in file formats: tables that map config fields and tensors with their axes to ours.

Each `Layout` is read from left to right on import and from right to left on export. Tensors are only rearranged, so a
round trip returns every byte.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.vocabulary import HEAD


class Weight(NamedTuple):
  """One tensor under its name in the file and ours, with its axes in einops' notation; `{}` stands for the layer."""

  theirs: str
  ours: str
  their_axes: str
  our_axes: str

  @property
  def stacked(self) -> bool:
    return "{}" in self.theirs


@dataclasses.dataclass(frozen=True)
class Layout:
  """The layout of one architecture in one file format.

  fields: their config field -> attribute of ModelConfig. defaults: the values of absent fields. allowed: their fields
  without a counterpart in ModelConfig -> the values that we implement. implied: ModelConfig fields -> the only value
  that the architecture can have.
  """

  kind: Literal["T", "M"]
  fields: Mapping[str, str]
  defaults: Mapping[str, Any]
  allowed: Mapping[str, tuple]
  implied: Mapping[str, Any]
  weights: tuple[Weight, ...]
  architecture: str | None = None  # the class in transformers; None: import only

  def tensors(self, config: ModelConfig) -> list[Weight]:
    """Return the weights of a model with this config: without the head if its embeddings are tied."""
    return [weight for weight in self.weights if not (config.tie_embeddings and weight.ours == HEAD)]


# the name in Hugging Face's format and in GGUF, our name, their axes and our axes
_LLAMA_TENSORS = (
  ("model.embed_tokens.weight", "token_embd.weight", "embed", "V D", "V D"),
  ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", "mixer_norm/scale", "D", "D"),
  ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", "mixer/q", "(H E) D", "D H E"),
  ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", "mixer/k", "(K E) D", "D K E"),
  ("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", "mixer/v", "(K E) D", "D K E"),
  ("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", "mixer/o", "D (H E)", "H E D"),
  ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", "mlp_norm/scale", "D", "D"),
  ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", "mlp/gate", "F D", "D F"),
  ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", "mlp/up", "F D", "D F"),
  ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", "mlp/down", "D F", "F D"),
  ("model.norm.weight", "output_norm.weight", "final_norm/scale", "D", "D"),
  ("lm_head.weight", "output.weight", HEAD, "V D", "V D"),
)
# llama.cpp rotates neighbours (2i, 2i + 1) by one angle, we rotate i and i + E/2: its q and k interleave our halves.
_GGUF_AXES = {"mixer/q": ("(H pair half) D", "D H (half pair)"), "mixer/k": ("(K pair half) D", "D K (half pair)")}
_LLAMA_IMPLIED = {
  "mlp": "swiglu",
  "window": None,
  "rope": True,
  "qk_norm": False,
  "attention_softcap": None,
  "logit_softcap": None,
}

LLAMA = Layout(
  kind="T",
  architecture="LlamaForCausalLM",
  fields={
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
    "rope_theta": "rope_base",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
  },
  defaults={
    "num_key_value_heads": None,
    "head_dim": None,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
  },
  allowed={
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_scaling": (None,),
    "rope_type": ("default",),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
  },
  implied=_LLAMA_IMPLIED,
  weights=tuple(Weight(theirs, *ours) for theirs, _, *ours in _LLAMA_TENSORS),
)

LLAMA_GGUF = Layout(
  kind="T",
  fields={
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_embeddings",
    "llama.embedding_length": "d_model",
    "llama.block_count": "n_layers",
    "llama.attention.head_count": "n_heads",
    "llama.attention.head_count_kv": "n_kv_heads",
    "llama.attention.key_length": "head_dim",
    "llama.attention.layer_norm_rms_epsilon": "norm_eps",
    "llama.feed_forward_length": "mlp_dim",
    "llama.rope.freq_base": "rope_base",
    "llama.rope.dimension_count": "head_width",
  },
  defaults={
    "llama.attention.head_count_kv": None,
    "llama.attention.key_length": None,
    "llama.rope.freq_base": 10_000.0,
    "llama.rope.dimension_count": None,
  },
  allowed={"general.architecture": ("llama",), "llama.rope.scaling.type": ("none",)},
  implied=_LLAMA_IMPLIED,
  weights=tuple(Weight(gguf, ours, *_GGUF_AXES.get(ours, axes)) for _, gguf, ours, *axes in _LLAMA_TENSORS),
)

MAMBA2 = Layout(
  kind="M",
  architecture="Mamba2ForCausalLM",
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
  implied={"mamba_mlp": False, "logit_softcap": None},
  weights=(
    Weight("backbone.embeddings.weight", "embed", "V D", "V D"),
    Weight("backbone.layers.{}.norm.weight", "mixer_norm/scale", "D", "D"),
    Weight("backbone.layers.{}.mixer.in_proj.weight", "mixer/in_proj", "projected D", "D projected"),
    Weight("backbone.layers.{}.mixer.conv1d.weight", "mixer/conv_kernel", "C 1 W", "W C"),
    Weight("backbone.layers.{}.mixer.conv1d.bias", "mixer/conv_bias", "C", "C"),
    Weight("backbone.layers.{}.mixer.dt_bias", "mixer/dt_bias", "heads", "heads"),
    Weight("backbone.layers.{}.mixer.A_log", "mixer/A_log", "heads", "heads"),
    Weight("backbone.layers.{}.mixer.D", "mixer/D", "heads", "heads"),
    Weight("backbone.layers.{}.mixer.norm.weight", "mixer/norm/scale", "inner", "inner"),
    Weight("backbone.layers.{}.mixer.out_proj.weight", "mixer/out_proj", "D inner", "inner D"),
    Weight("backbone.norm_f.weight", "final_norm/scale", "D", "D"),
    Weight("lm_head.weight", HEAD, "V D", "V D"),
  ),
)

HUGGING_FACE = {"llama": LLAMA, "mamba2": MAMBA2}


def axis_sizes(config: ModelConfig, vocab_size: int) -> dict[str, int]:
  """Return the length of every axis that the tables name; `vocab_size` is the number of rows in the file."""
  c = config
  attention = {"H": c.n_heads, "K": c.kv_heads, "E": c.head_width, "half": 2, "pair": c.head_width // 2}
  mamba = {"heads": c.ssm_heads, "inner": c.ssm_inner, "C": c.conv_channels, "W": c.ssm_conv}
  mamba["projected"] = c.ssm_inner + c.conv_channels + c.ssm_heads
  return {"1": 1, "V": vocab_size, "D": c.d_model, "F": c.mlp_width, **attention, **mamba}


def _groups(axes: str) -> list[list[str]]:
  return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", axes)]


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """Return the shape of a tensor with these axes."""
  return tuple(math.prod(sizes[name] for name in group) for group in _groups(axes))


def rearrange(x: np.ndarray, source: str, target: str, sizes: Mapping[str, int]) -> np.ndarray:
  """Rearrange axes like `einops.rearrange(x, f"{source} -> {target}", **sizes)`."""
  before, after = ([name for group in _groups(axes) for name in group if name != "1"] for axes in (source, target))
  split = x.reshape([sizes[name] for name in before])
  return split.transpose([before.index(name) for name in after]).reshape(shape_of(target, sizes))
