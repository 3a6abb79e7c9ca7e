"""Gemma 3, its text model: windows and global attention in turn. In Hugging Face's format and in GGUF."""

from collections.abc import Mapping
from typing import Any

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layouts.table import ARCHITECTURE, PLAIN, Layout, Weight, pattern_of, whole
from selfrag_jax.model.layouts.transformer import ATTENTION, ENDS, FIELDS, GGUF_NAMES, MLP, gguf_fields, renamed

_BLOCKS = {"sliding_attention": "L", "full_attention": "T"}
_PERIOD = 6  # one in so many layers is global, where no field says it
_IMPLIED = {**PLAIN, "mlp": "geglu", "rope": True, "qk_norm": True, "post_norms": True, "attention_softcap": None}


def _periodic(n_layers: int, period: int) -> str:
  return "".join("LT"[(layer + 1) % period == 0] for layer in range(n_layers))


def _pattern(fields: Mapping[str, Any]) -> str:
  """Return the blocks of `layer_types`, or of the older field with their period. Raises ValueError for others."""
  if types := fields.get("layer_types"):
    return pattern_of(types, _BLOCKS)
  period = fields.get("sliding_window_pattern", _PERIOD)
  if not isinstance(period, int) or period < 1:
    raise ValueError(f"sliding_window_pattern is {period!r}; it must be a number of layers")
  return _periodic(fields["num_hidden_layers"], period)


def _of_windows(field: str) -> Any:
  return lambda fields: fields[field] if "L" in _pattern(fields) else None


def _written(config: ModelConfig) -> dict[str, Any]:
  names = {block: name for name, block in _BLOCKS.items()}
  local = config.window_rope_base or config.rope_base
  bases = {"full_attention": config.rope_base, "sliding_attention": local}
  return {
    "layer_types": [names[block] for block in config.block_pattern or ()],
    "sliding_window": config.window or 4096,
    "rope_local_base_freq": local,
    "rope_parameters": {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()},
    "query_pre_attn_scalar": round((config.attention_multiplier or config.head_width**-0.5) ** -2),
    "hidden_activation": "gelu_pytorch_tanh",
  }


GEMMA3 = Layout(
  architecture="Gemma3ForCausalLM",
  blocks="TL",
  fields={
    **FIELDS,
    "intermediate_size": "mlp_dim",
    "final_logit_softcapping": "logit_softcap",
  },
  defaults={
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
  },
  allowed={
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),  # which transformers does not apply
    "use_bidirectional_attention": (False, None),
    "rope_scaling": (None,),
    "rope_type": ("default",),
    "quantization_config": (None,),
  },
  implied={
    **{name: value for name, value in _IMPLIED.items() if name != "logit_softcap"},
    "norm_plus_one": True,
    "block_pattern": _pattern,
    "window": _of_windows("sliding_window"),
    "window_rope_base": _of_windows("rope_local_base_freq"),
    "embedding_multiplier": lambda fields: whole(fields, "hidden_size") ** 0.5,
    "attention_multiplier": lambda fields: whole(fields, "query_pre_attn_scalar") ** -0.5,
  },
  weights=(
    *ENDS,
    *ATTENTION,
    *MLP,
    Weight("model.layers.{}.input_layernorm.weight", "mixer_norm/scale", "D", "D"),
    Weight("model.layers.{}.self_attn.q_norm.weight", "mixer/query_norm/scale", "E", "E"),
    Weight("model.layers.{}.self_attn.k_norm.weight", "mixer/key_norm/scale", "E", "E"),
    Weight("model.layers.{}.post_attention_layernorm.weight", "mixer_post_norm/scale", "D", "D"),
    Weight("model.layers.{}.pre_feedforward_layernorm.weight", "mlp_norm/scale", "D", "D"),
    Weight("model.layers.{}.post_feedforward_layernorm.weight", "mlp_post_norm/scale", "D", "D"),
  ),
  written=_written,
)


def _gguf() -> Layout:
  name = lambda field: f"gemma3.{field}"
  n_layers, window, local = name("block_count"), name("attention.sliding_window"), name("rope.freq_base_swa")
  period, key_length = name("attention.sliding_window_pattern"), name("attention.key_length")
  pattern = lambda fields: _periodic(whole(fields, n_layers), whole(fields, period))
  of_windows = lambda field: lambda fields: fields.get(field) if "L" in pattern(fields) else None

  def written(config: ModelConfig) -> dict[str, Any]:
    first = "".join(config.block_pattern or ()).find("T")
    found = {period: first + 1 or config.n_layers + 1, local: config.window_rope_base or config.rope_base}
    return found | ({window: config.window} if config.window else {})

  norms = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
  }
  weights = renamed(GEMMA3.weights, {**GGUF_NAMES, **norms})

  return Layout(
    blocks="TL",
    fields={
      **gguf_fields("gemma3"),
      name("attention.head_count_kv"): "n_kv_heads",
      name("final_logit_softcapping"): "logit_softcap",
    },
    defaults={
      key_length: 256,
      name("attention.value_length"): None,
      name("rope.freq_base"): 1_000_000.0,
      name("final_logit_softcapping"): None,
      local: 10_000.0,
      period: _PERIOD,
    },
    allowed={
      ARCHITECTURE: ("gemma3",),
      name("rope.scaling.type"): ("none",),
      name("rope.scaling.factor"): (1.0,),
    },
    implied={
      **{field: value for field, value in _IMPLIED.items() if field != "logit_softcap"},
      "norm_plus_one": True,
      "block_pattern": pattern,
      "window": of_windows(window),
      "window_rope_base": of_windows(local),
      "embedding_multiplier": lambda fields: whole(fields, name("embedding_length")) ** 0.5,
      "attention_multiplier": lambda fields: whole(fields, key_length) ** -0.5,
    },
    weights=tuple(w._replace(numbers="+1" if w.ours.endswith("norm/scale") else "same") for w in weights),
    written=written,
  )


GEMMA3_GGUF = _gguf()
