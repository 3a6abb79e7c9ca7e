"""What the layouts of several architectures share: fields and tensors as transformers names them."""

from selfrag_jax.model.layouts.table import Weight
from selfrag_jax.model.vocabulary import HEAD

FIELDS = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_hidden_layers": "n_layers",
  "num_attention_heads": "n_heads",
  "num_key_value_heads": "n_kv_heads",
  "head_dim": "head_dim",
  "rope_theta": "rope_base",
  "rms_norm_eps": "norm_eps",
  "tie_word_embeddings": "tie_embeddings",
}
_LAYER = "model.layers.{}."
ENDS = (
  Weight("model.embed_tokens.weight", "embed", "V D", "V D"),
  Weight("model.norm.weight", "final_norm/scale", "D", "D"),
  Weight("lm_head.weight", HEAD, "V D", "V D"),
)
ATTENTION = (
  Weight(_LAYER + "self_attn.q_proj.weight", "mixer/q", "(H E) D", "D H E", "TL"),
  Weight(_LAYER + "self_attn.k_proj.weight", "mixer/k", "(K E) D", "D K E", "TL"),
  Weight(_LAYER + "self_attn.v_proj.weight", "mixer/v", "(K E) D", "D K E", "TL"),
  Weight(_LAYER + "self_attn.o_proj.weight", "mixer/o", "D (H E)", "H E D", "TL"),
)
MLP = (
  Weight(_LAYER + "mlp.gate_proj.weight", "mlp/gate", "F D", "D F"),
  Weight(_LAYER + "mlp.up_proj.weight", "mlp/up", "F D", "D F"),
  Weight(_LAYER + "mlp.down_proj.weight", "mlp/down", "D F", "F D"),
)


def mamba(prefix: str) -> tuple[Weight, ...]:
  """Return the tensors of a Mamba-2 mixer, whose names begin with `prefix`."""
  return (
    Weight(prefix + "in_proj.weight", "mixer/in_proj", "projected D", "D projected", "M"),
    Weight(prefix + "conv1d.weight", "mixer/conv_kernel", "C 1 W", "W C", "M"),
    Weight(prefix + "conv1d.bias", "mixer/conv_bias", "C", "C", "M"),
    Weight(prefix + "dt_bias", "mixer/dt_bias", "heads", "heads", "M"),
    Weight(prefix + "A_log", "mixer/A_log", "heads", "heads", "M"),
    Weight(prefix + "D", "mixer/D", "heads", "heads", "M"),
    Weight(prefix + "norm.weight", "mixer/norm/scale", "inner", "inner", "M"),
    Weight(prefix + "out_proj.weight", "mixer/out_proj", "D inner", "inner D", "M"),
  )


def renamed(weights: tuple[Weight, ...], names: dict[str, str]) -> tuple[Weight, ...]:
  """Return weights under the names of GGUF: those of a layer by what stands between `model.layers.N.` and `.weight`."""

  def name(weight: Weight) -> str:
    if not weight.stacked:
      return names[weight.theirs]
    return f"blk.{{}}.{names[weight.theirs.removeprefix(_LAYER).removesuffix('.weight')]}.weight"

  return tuple(weight._replace(theirs=name(weight)) for weight in weights)


def gguf_fields(kind: str) -> dict[str, str]:
  """Return the fields of GGUF that the architectures here share, under the name of one of them."""
  return {
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_embeddings",
    f"{kind}.embedding_length": "d_model",
    f"{kind}.block_count": "n_layers",
    f"{kind}.attention.head_count": "n_heads",
    f"{kind}.attention.key_length": "head_dim",
    f"{kind}.attention.value_length": "head_width",
    f"{kind}.attention.layer_norm_rms_epsilon": "norm_eps",
    f"{kind}.feed_forward_length": "mlp_dim",
    f"{kind}.rope.freq_base": "rope_base",
  }


# llama.cpp's names
GGUF_NAMES = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}
