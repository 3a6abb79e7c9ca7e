"""The config of a model, frozen and checked when it is made, with its parameter and FLOP counts."""

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

VOCAB_MULTIPLE = 128  # embedding rows are padded to whole TPU lanes
# A size that no machine holds is a mistake in the config, and is reported before anything is allocated.
MAX_SIZE = 2**31 - 1  # of an axis: JAX counts in int32
MAX_LAYERS = 1024
MAX_PARAMS = 2**40  # 4 TiB in float32
POSITIVE = (1e-30, 1e30)  # a range within float32 with room for square roots and inverses


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """One layer: `T` is attention + MLP, `M` the Mamba-2 mixer. `window` and `rope_base` apply to attention only."""

  kind: Literal["T", "M"]
  window: int | None = None
  rope_base: float | None = 10_000.0  # None: attention does not see positions


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A hybrid Transformer + Mamba-2 language model.

  `block_pattern` is None (all `T`), a string (`"TTM"`, `"T,T,M"`, `"T*8+M*12"`) or a list of `T`, `L` and `M`; its
  length must equal `n_layers`. `L` is a `T` that sees the last `window` tokens alone. Raises ValueError for a value of
  the wrong type, for sizes that do not fit together, with both numbers, and for more parameters than any machine holds.
  """

  vocab_size: int
  d_model: int = 512
  n_layers: int = 12
  n_heads: int = 8
  n_kv_heads: int | None = None  # None: n_heads
  head_dim: int | None = None  # None: d_model / n_heads
  mlp_dim: int | None = None  # None: 8/3 d_model for gated MLPs, 4 d_model for relu2, in multiples of 32
  mlp: Literal["swiglu", "geglu", "relu2"] = "swiglu"
  block_pattern: str | Sequence[str] | None = None
  window: int | None = None  # tokens that an `L` layer sees, itself included
  rope: bool = True  # rotary embedding; beside `M` layers, which tell order, attention can do without (NoPE)
  rope_base: float = 10_000.0
  window_rope_base: float | None = None  # of `L` layers; None: rope_base
  full_rope: bool = True  # in `T` layers, too; beside `L` layers, which tell order, they can do without (2501.18795)
  qk_norm: bool = False
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  # Granite's factors of what the blocks read, what they add, scores, and its divisor of logits
  embedding_multiplier: float = 1.0
  residual_multiplier: float = 1.0
  attention_multiplier: float | None = None  # None: head_dim ** -0.5
  logits_scaling: float = 1.0
  tie_embeddings: bool = True
  norm_eps: float = 1e-5
  norm_plus_one: bool = False  # scales of norms are stored less one, as Gemma does
  post_norms: bool = False  # norms behind attention and MLP too, before their sums (Gemma)
  init_scale: float = 0.02
  # Mamba-2 (arXiv 2405.21060)
  ssm_expand: int = 2
  ssm_state: int = 64
  ssm_head_dim: int = 32
  ssm_groups: int = 1
  ssm_conv: int = 4
  ssm_chunk: int = 128
  mamba_mlp: bool = False  # give `M` layers an MLP too
  query_projection: bool = False  # learn a matrix for the queries of a memory (`LM.project`)
  # Numerics and memory
  dtype: str = "float32"  # of activations and matmuls; bfloat16 on accelerators
  param_dtype: str = "float32"
  matmul_dtype: str | None = None  # of the inputs of products with weights, whose sums stay in dtype; None: dtype
  # What the backward pass computes again: nothing, all but the products with weights ("dots"), all but what
  # attention and SSD yield ("mixed"; "offload" keeps that in the memory of the host), or everything. Kernels of a TPU
  # are not run again then; without them, scores and states are computed again all the same. On a CPU "dots" is also
  # the fastest, since memory for activations that are kept must be mapped page by page.
  remat: Literal["none", "dots", "mixed", "offload", "full"] = "dots"
  kernels: Literal["auto", "xla"] = "auto"  # attention and SSD: by kernels of the platform where they fit, or by none

  def __post_init__(self):
    set_ = lambda name, value: object.__setattr__(self, name, value)
    for field in dataclasses.fields(self):
      if problem := unfit(field.name, value := getattr(self, field.name)):
        raise ValueError(f"{field.name} is {reprlib.repr(value)}; it must be {problem}")
      if KINDS[field.name].startswith("float") and value is not None:
        set_(field.name, float(value))  # files write 12 for 12.0
    if "float64" in (self.dtype, self.param_dtype):
      _require_float64()
    blocks = parse_block_pattern(self.block_pattern, self.n_layers)
    set_("block_pattern", blocks)
    attends = set(blocks) != {"M"}
    if ("L" in blocks) != (self.window is not None):
      raise ValueError(f"window is {self.window} and block_pattern {''.join(blocks)}: a window is what L layers see")
    if self.window_rope_base is not None and "L" not in blocks:
      raise ValueError(f"window_rope_base is {self.window_rope_base}, and block_pattern has no L layers")
    if not self.full_rope and not (self.rope and "L" in blocks):
      raise ValueError("full_rope is False: it leaves rotary embedding to L layers alone; set rope to False for none")
    if self.head_dim is None:
      if attends and self.d_model % self.n_heads:
        raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; set head_dim")
      set_("head_dim", max(self.d_model // self.n_heads, 1))
    if self.n_kv_heads is None:
      set_("n_kv_heads", self.n_heads)
    if self.n_heads % self.kv_heads:
      raise ValueError(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}")
    if attends and self.rope and self.head_width % 2:
      raise ValueError(f"head_dim {self.head_width} is odd; rotary embedding turns pairs")
    if self.mlp_dim is None:
      set_("mlp_dim", math.ceil((4 if self.mlp == "relu2" else 8 / 3) * self.d_model / 32) * 32)
    if "M" in blocks and self.ssm_inner % self.ssm_head_dim:
      raise ValueError(f"ssm_expand * d_model {self.ssm_inner} is not divisible by ssm_head_dim {self.ssm_head_dim}")
    if "M" in blocks and self.ssm_heads % self.ssm_groups:
      raise ValueError(f"{self.ssm_heads} SSM heads are not divisible by ssm_groups {self.ssm_groups}")
    if (total := count_params(self)["total"]) > MAX_PARAMS:
      raise ValueError(
        f"vocab_size {self.vocab_size}, d_model {self.d_model}, n_layers {self.n_layers} and the other sizes make "
        f"{total:.1e} parameters, at most {MAX_PARAMS:.1e} are allowed; is one of these sizes mistyped?"
      )

  @property
  def kv_heads(self) -> int:
    return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

  @property
  def head_width(self) -> int:
    return self.head_dim or self.d_model // self.n_heads

  @property
  def mlp_width(self) -> int:
    return self.mlp_dim or 0

  @property
  def padded_vocab(self) -> int:
    return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

  @property
  def ssm_inner(self) -> int:
    return self.ssm_expand * self.d_model

  @property
  def ssm_heads(self) -> int:
    return self.ssm_inner // self.ssm_head_dim

  @property
  def conv_channels(self) -> int:
    return self.ssm_inner + 2 * self.ssm_groups * self.ssm_state

  @property
  def layers(self) -> tuple[LayerSpec, ...]:
    base = self.rope_base if self.rope else None
    kinds = {
      "T": LayerSpec("T", None, base if self.full_rope else None),
      "L": LayerSpec("T", self.window, base and (self.window_rope_base or base)),
      "M": LayerSpec("M"),
    }
    return tuple(kinds[kind] for kind in self.block_pattern or ())

  @property
  def n_attention(self) -> int:
    """The number of layers with attention."""
    return sum(kind != "M" for kind in self.block_pattern or ())

  def to_dict(self) -> dict[str, Any]:
    """Return the fields as JSON types; `ModelConfig(**d)` gives the same model back."""
    return dataclasses.asdict(self) | {"block_pattern": "".join(self.block_pattern or ())}


HOW = ("remat", "kernels")  # how a model is computed, and not what it is


def identity(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Return what a stored model is, with the defaults of the fields that came after it, to compare it with another."""
  defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
  return {name: value for name, value in {**defaults, **stored}.items() if name not in HOW}


KINDS = {
  field.name: field.type.__name__ if isinstance(field.type, type) else str(field.type)
  for field in dataclasses.fields(ModelConfig)
}
CHOICES = {
  "mlp": ("swiglu", "geglu", "relu2"),
  "remat": ("none", "dots", "mixed", "offload", "full"),
  "kernels": ("auto", "xla"),
  "dtype": ("float32", "bfloat16", "float16", "float64"),
  "param_dtype": ("float32", "bfloat16", "float64"),
  "matmul_dtype": ("float32", "bfloat16", "float16", "float64"),
}


def unfit(name: str, value: Any) -> str | None:
  """Return the requirement that a field's value misses, to follow "it must be"; None if the value is valid."""
  kind = KINDS[name]
  if name == "block_pattern" or (value is None and kind.endswith("None")):
    return None
  if name in CHOICES:
    return None if value in CHOICES[name] else f"one of {', '.join(CHOICES[name])}"
  if kind == "bool":
    return None if isinstance(value, bool) else "true or false"
  if kind.startswith("int"):
    return unfit_size(value, MAX_LAYERS if name == "n_layers" else MAX_SIZE)
  low, high = (0.0, POSITIVE[1]) if name == "init_scale" else POSITIVE
  if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool) and low <= value <= high:
    return None
  return f"a number from {low} to {high}"


def _require_float64() -> None:
  """Raise ValueError where JAX would only warn and compute in float32 instead."""
  import jax  # lazily, since nothing else in this module needs JAX

  if not jax.config.jax_enable_x64:
    raise ValueError("a dtype is float64, which JAX has switched off: set JAX_ENABLE_X64=1, or take float32")


def unfit_size(value: Any, limit: int = MAX_SIZE) -> str | None:
  """Return the requirement that a size misses, to follow "it must be"; None if the size is valid."""
  if not isinstance(value, int | np.integer) or isinstance(value, bool):
    return "a whole number"
  return "at least 1" if value < 1 else f"at most {limit}" if value > limit else None


def parse_block_pattern(pattern: str | Sequence[str] | None, n_layers: int) -> tuple[str, ...]:
  """Return the pattern as a tuple of `T`, `L` and `M`. Raises ValueError, with both numbers, if its length is wrong."""
  if pattern is None:
    blocks = ["T"] * n_layers
  elif isinstance(pattern, str):
    blocks = []
    for term in pattern.replace(",", "+").split("+"):
      unit, _, times = (part.strip() for part in term.partition("*"))
      if times and not (times.isascii() and times.isdigit()):
        raise ValueError(f"block_pattern {pattern!r}: {times!r} is not a number of repeats; write e.g. 'T*8+M*12'")
      if len(times) > 9 or len(unit) * int(times or 1) > MAX_LAYERS:
        raise ValueError(
          f"block_pattern {reprlib.repr(pattern)}: more than {MAX_LAYERS} blocks; n_layers is {n_layers}"
        )
      blocks += list(unit) * int(times or 1)
  elif isinstance(pattern, list | tuple):
    blocks = list(pattern)
  else:
    raise ValueError(f"block_pattern is {reprlib.repr(pattern)}; write e.g. 'T*8+M*12', or a list of T, L and M")
  if unknown := [block for block in blocks if block not in ("T", "L", "M")]:
    raise ValueError(
      f"block_pattern has {reprlib.repr(unknown[0])}; the blocks are T (attention + MLP), L (the same in a window) and "
      "M (Mamba-2)"
    )
  if len(blocks) != n_layers:
    raise ValueError(f"block_pattern has {len(blocks)} blocks, n_layers is {n_layers}")
  return tuple(blocks)


def segments(layers: Sequence[LayerSpec]) -> tuple[tuple[tuple[LayerSpec, ...], int], ...]:
  """Split the stack into `(unit, repeats)` pairs that minimise the sum of unit lengths, the code to compile.

  `T*8+M*12` is `((T,), 8), ((M,), 12)`; `TMTMTM` is `((T, M), 3)`.
  """
  n = len(layers)
  # best[i]: (layers compiled, number of scans, the segments) for the first i layers
  best: list[tuple[int, int, tuple]] = [(0, 0, ())]
  for end in range(1, n + 1):
    options = []
    for start in range(end):
      span = layers[start:end]
      unit = next(
        u for u in range(1, len(span) + 1) if len(span) % u == 0 and list(span) == list(span[:u]) * (len(span) // u)
      )
      compiled, scans, parts = best[start]
      options.append((compiled + unit, scans + 1, (*parts, (tuple(span[:unit]), len(span) // unit))))
    best.append(min(options, key=lambda option: option[:2]))
  return best[n][2]


def count_params(config: ModelConfig) -> dict[str, int]:
  """Count the parameters of each part (embedding with its padded rows), and their `total`."""
  c = config
  norms = c.d_model * (2 if c.post_norms else 1)
  mlp = c.d_model * c.mlp_width * (2 if c.mlp == "relu2" else 3) + norms
  attention = (
    c.d_model * c.head_width * (2 * c.n_heads + 2 * c.kv_heads) + norms + (2 * c.head_width if c.qk_norm else 0)
  )
  in_proj = c.d_model * (c.ssm_inner + c.conv_channels + c.ssm_heads)
  mamba = in_proj + c.conv_channels * (c.ssm_conv + 1) + 3 * c.ssm_heads + c.ssm_inner + c.ssm_inner * c.d_model + norms
  n_mamba = c.n_layers - c.n_attention
  parts = {
    "embedding": c.padded_vocab * c.d_model * (1 if c.tie_embeddings else 2),
    "attention": c.n_attention * attention,
    "mamba": n_mamba * mamba,
    "mlp": (c.n_attention + (n_mamba if c.mamba_mlp else 0)) * mlp,
    "final_norm": c.d_model,
    "query_projection": c.d_model**2 if c.query_projection else 0,
  }
  return parts | {"total": sum(parts.values())}


class StepWork(NamedTuple):
  """The tokens that a step of a training reads, padding included, and the FLOPs of the model, forward and backward."""

  tokens: int
  flops: float


def flops_per_token(config: ModelConfig, context: int) -> float:
  """Return the forward FLOPs (2 x multiply-adds) of one token after `context` others; training costs 3 times that."""
  c, parts = config, count_params(config)
  matmuls = parts["attention"] + parts["mamba"] + parts["mlp"] + c.padded_vocab * c.d_model
  attended = sum(min(context, layer.window or context) for layer in c.layers if layer.kind == "T")
  attention = 2 * c.n_heads * c.head_width * attended
  # within a chunk: scores C B^T and their product with x; between chunks: state in and out
  ssd = (
    (c.n_layers - c.n_attention) * c.ssm_inner * (2 * c.ssm_state + c.ssm_chunk * (1 + c.ssm_state / c.ssm_head_dim))
  )
  return 2.0 * (matmuls + attention + ssd)
