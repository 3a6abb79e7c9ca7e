"""Granite 4's hybrid of attention and Mamba-2, without experts: in Hugging Face's format and in GGUF.

Also the form in which hybrids of our own are exported: a Mamba-2 layer without an MLP has one there that adds nothing.
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layouts.llama import neighbours
from selfrag_jax.model.layouts.table import ARCHITECTURE, PLAIN, Layout, Weight, pattern_of, whole
from selfrag_jax.model.layouts.transformer import ATTENTION, ENDS, FIELDS, GGUF_NAMES, MLP, gguf_fields, mamba, renamed

# as transformers names them up to version 5.12 and since
_BLOCKS = {"attention": "T", "full_attention": "T", "mamba": "M", "linear_attention": "M"}
_FACTORS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
_IMPLIED = {name: value for name, value in PLAIN.items() if name not in _FACTORS} | {
  "mlp": "swiglu",
  "qk_norm": False,
  "attention_softcap": None,
}


def _pattern(fields: Mapping[str, Any]) -> str:
  """Return the blocks of `layer_types`; all are Mamba-2 where it is absent."""
  return pattern_of(fields.get("layer_types") or ["mamba"] * fields["num_hidden_layers"], _BLOCKS)


def _attention_multiplier(fields: Mapping[str, Any]) -> float | None:
  """Return the factor of the scores, None where it is what attention takes without one."""
  width = fields["head_dim"] or whole(fields, "hidden_size") // whole(fields, "num_attention_heads")
  factor = fields["attention_multiplier"]
  return None if factor == width**-0.5 else factor


def _ssm_head_dim(fields: Mapping[str, Any]) -> int:
  """Return the width of a head of the SSM: "auto" is that of equal heads. Raises ValueError if heads do not fit."""
  inner, heads = (whole(fields, name) for name in ("hidden_size", "mamba_n_heads"))
  inner *= whole(fields, "mamba_expand")
  width = fields["mamba_d_head"]
  if "M" not in _pattern(fields):
    return 1 if width == "auto" else width
  if width == "auto":
    width = inner // heads
  if width != inner / heads:
    raise ValueError(f"mamba_d_head is {reprlib.repr(width)}, the other sizes make it {inner / heads:g}")
  return width


def _written(config: ModelConfig) -> dict[str, Any]:
  names = {"T": "attention", "M": "mamba"}  # which version 5 reads, too
  return {
    "layer_types": [names[block] for block in config.block_pattern or ()],
    "position_embedding_type": "rope" if config.rope else "nope",
    "attention_multiplier": config.attention_multiplier or config.head_width**-0.5,
    "mamba_d_head": config.ssm_head_dim,
    "mamba_n_heads": config.ssm_heads,
    "intermediate_size": config.mlp_width,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_mlp": config.mamba_mlp,  # ours: the MLPs of Mamba-2 layers are neutral
  }


GRANITE = Layout(
  architecture="GraniteMoeHybridForCausalLM",
  blocks="TM",
  fields={
    **FIELDS,
    "shared_intermediate_size": "mlp_dim",
    **{name: name for name in _FACTORS if name != "attention_multiplier"},
    "mamba_expand": "ssm_expand",
    "mamba_d_state": "ssm_state",
    "mamba_n_groups": "ssm_groups",
    "mamba_d_conv": "ssm_conv",
    "mamba_chunk_size": "ssm_chunk",
  },
  defaults={
    "num_key_value_heads": None,
    "head_dim": None,
    "shared_intermediate_size": 1024,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    **dict.fromkeys(_FACTORS, 1.0),
    "num_local_experts": 8,
    "mamba_expand": 2,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
  },
  allowed={
    "num_local_experts": (0,),
    "position_embedding_type": ("nope", None, "rope"),
    "hidden_act": ("silu",),
    "normalization_function": ("rmsnorm",),
    "attention_bias": (False,),
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None),
    "rope_scaling": (None,),
    "rope_type": ("default",),
    "quantization_config": (None,),
  },
  implied={
    **_IMPLIED,
    "block_pattern": _pattern,
    "attention_multiplier": _attention_multiplier,
    "ssm_head_dim": _ssm_head_dim,
    "rope": lambda fields: fields.get("position_embedding_type") == "rope",
    "mamba_mlp": lambda fields: fields.get("mamba_mlp", True),
  },
  weights=(
    *ENDS,
    Weight("model.layers.{}.input_layernorm.weight", "mixer_norm/scale", "D", "D"),
    *ATTENTION,
    *mamba("model.layers.{}.mamba."),
    Weight("model.layers.{}.post_attention_layernorm.weight", "mlp_norm/scale", "D", "D", neutral=1.0),
    Weight("model.layers.{}.shared_mlp.input_linear.weight", "mlp/gate", "F D", "D F", part=(0, 2)),
    Weight("model.layers.{}.shared_mlp.input_linear.weight", "mlp/up", "F D", "D F", part=(1, 2)),
    Weight("model.layers.{}.shared_mlp.output_linear.weight", "mlp/down", "D F", "F D"),
  ),
  written=_written,
)


# our own fields of GGUF, for what llama.cpp need not know: whether the MLPs of Mamba-2 layers are neutral, the length
# of an SSD chunk, and the key and value heads of a model without attention
_NEUTRAL, _CHUNK, _KV_HEADS = (f"selfrag_jax.{field}" for field in ("mamba_mlp", "ssm_chunk", "n_kv_heads"))


def _kv_heads_by_layer(kind: str, fields: Mapping[str, Any]) -> list[int]:
  """Return the key and value heads of each layer, 0 for Mamba-2. Raises ValueError for anything else."""
  name, n = f"{kind}.attention.head_count_kv", whole(fields, f"{kind}.block_count")
  counts = fields.get(name)
  counts = [counts] * n if isinstance(counts, int) else counts
  are_counts = isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
  if isinstance(counts, list) and are_counts and len(counts) == n and len({*counts} - {0}) <= 1:
    return counts
  raise ValueError(f"{name} is {reprlib.repr(counts)}; it must be 0 or one number for each layer")


def _gguf(kind: str) -> Layout:
  """Return the layout of an architecture of GGUF as llama.cpp writes it, without Mamba-2 layers."""
  scales = {
    f"{kind}.embedding_scale": "embedding_multiplier",
    f"{kind}.residual_scale": "residual_multiplier",
    f"{kind}.attention.scale": "attention_multiplier",
    f"{kind}.logit_scale": "logits_scaling",
  }
  rope, by_layer = f"{kind}.rope.scaling.finetuned", partial(_kv_heads_by_layer, kind)

  def written(config: ModelConfig) -> dict[str, Any]:
    counts = [config.kv_heads if block == "T" else 0 for block in config.block_pattern or ()]
    ours = {_NEUTRAL: config.mamba_mlp, _KV_HEADS: config.kv_heads}
    return {f"{kind}.attention.head_count_kv": counts, rope: config.rope, **ours}

  return Layout(
    blocks="T",
    fields={**gguf_fields(kind), **scales},
    defaults={
      f"{kind}.attention.key_length": None,
      f"{kind}.attention.value_length": None,
      f"{kind}.rope.freq_base": 10_000.0,
      **{scale: None if scale.endswith("attention.scale") else 1.0 for scale in scales},
      rope: True,  # what llama.cpp takes where the field is absent
    },
    allowed={
      ARCHITECTURE: (kind,),
      f"{kind}.expert_count": (0,),
      f"{kind}.rope.scaling.type": ("none",),
      rope: (True, False),
    },
    implied={
      **_IMPLIED,
      "block_pattern": lambda fields: "".join("MT"[count > 0] for count in by_layer(fields)),
      "n_kv_heads": lambda fields: max(by_layer(fields)) or fields.get(_KV_HEADS),
      "rope": lambda fields: fields[rope],
      "mamba_mlp": lambda fields: fields.get(_NEUTRAL, True),
    },
    weights=(
      *neighbours(renamed((*ENDS, *ATTENTION, *MLP), GGUF_NAMES)),
      Weight("blk.{}.attn_norm.weight", "mixer_norm/scale", "D", "D"),
      Weight("blk.{}.ffn_norm.weight", "mlp_norm/scale", "D", "D", neutral=1.0),
    ),
    written=written,
  )


def _hybrid_gguf(kind: str) -> Layout:
  """Return the layout of an architecture that has Mamba-2 layers, too."""
  plain, name = _gguf(kind), lambda field: f"{kind}.{field}"
  inner, heads, width = name("ssm.inner_size"), name("ssm.time_step_rank"), name("embedding_length")
  return dataclasses.replace(
    plain,
    blocks="TM",
    fields={
      **plain.fields,
      name("ssm.conv_kernel"): "ssm_conv",
      name("ssm.state_size"): "ssm_state",
      name("ssm.group_count"): "ssm_groups",
      inner: "ssm_inner",
      heads: "ssm_heads",
      _CHUNK: "ssm_chunk",
    },
    defaults={**plain.defaults, _CHUNK: 256},
    implied={
      **plain.implied,
      "ssm_head_dim": lambda fields: whole(fields, inner) // whole(fields, heads),
      "ssm_expand": lambda fields: whole(fields, inner) // whole(fields, width),
    },
    weights=(
      *plain.weights,
      Weight("blk.{}.ssm_in.weight", "mixer/in_proj", "projected D", "D projected", "M"),
      Weight("blk.{}.ssm_conv1d.weight", "mixer/conv_kernel", "C W", "W C", "M"),
      Weight("blk.{}.ssm_conv1d.bias", "mixer/conv_bias", "C", "C", "M"),
      Weight("blk.{}.ssm_dt.bias", "mixer/dt_bias", "heads", "heads", "M"),
      Weight("blk.{}.ssm_a", "mixer/A_log", "heads 1", "heads", "M", numbers="-exp"),
      Weight("blk.{}.ssm_d", "mixer/D", "heads 1", "heads", "M"),
      Weight("blk.{}.ssm_norm.weight", "mixer/norm/scale", "G per", "(G per)", "M"),
      Weight("blk.{}.ssm_out.weight", "mixer/out_proj", "D inner", "inner D", "M"),
    ),
  )


GRANITE_GGUF, GRANITE_HYBRID_GGUF = _gguf("granite"), _hybrid_gguf("granitehybrid")
