"""Llama in Hugging Face's format and in GGUF."""

from selfrag_jax.model.layouts.table import ARCHITECTURE, PLAIN, Layout, Weight, all_of
from selfrag_jax.model.layouts.transformer import ATTENTION, ENDS, FIELDS, GGUF_NAMES, MLP, gguf_fields, renamed

_WEIGHTS = (
  *ENDS,
  Weight("model.layers.{}.input_layernorm.weight", "mixer_norm/scale", "D", "D"),
  *ATTENTION,
  Weight("model.layers.{}.post_attention_layernorm.weight", "mlp_norm/scale", "D", "D"),
  *MLP,
)
# llama.cpp rotates neighbours (2i, 2i + 1) by one angle, we rotate i and i + E/2: its q and k interleave our halves.
_NEIGHBOURS = {"mixer/q": ("(H pair half) D", "D H (half pair)"), "mixer/k": ("(K pair half) D", "D K (half pair)")}


def neighbours(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
  """Return weights with queries and keys whose rotary pairs are neighbours."""
  axes = lambda weight: _NEIGHBOURS.get(weight.ours, (weight.their_axes, weight.our_axes))
  return tuple(weight._replace(their_axes=axes(weight)[0], our_axes=axes(weight)[1]) for weight in weights)


_IMPLIED = {**PLAIN, "mlp": "swiglu", "rope": True, "qk_norm": False, "attention_softcap": None}

LLAMA = Layout(
  architecture="LlamaForCausalLM",
  blocks="T",
  fields={**FIELDS, "intermediate_size": "mlp_dim"},
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
  implied={"block_pattern": all_of("T", "num_hidden_layers"), **_IMPLIED},
  weights=_WEIGHTS,
)

LLAMA_GGUF = Layout(
  blocks="T",
  fields={
    **gguf_fields("llama"),
    "llama.attention.head_count_kv": "n_kv_heads",
    "llama.rope.dimension_count": "head_width",
  },
  defaults={
    "llama.attention.head_count_kv": None,
    "llama.attention.key_length": None,
    "llama.attention.value_length": None,
    "llama.rope.freq_base": 10_000.0,
    "llama.rope.dimension_count": None,
  },
  allowed={ARCHITECTURE: ("llama",), "llama.rope.scaling.type": ("none",)},
  implied={"block_pattern": all_of("T", "llama.block_count"), **_IMPLIED},
  weights=neighbours(renamed(_WEIGHTS, {**GGUF_NAMES, "post_attention_layernorm": "ffn_norm"})),
)
