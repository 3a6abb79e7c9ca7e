"""The language model: a hybrid of attention and Mamba-2 layers with one cache entry point."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.model.cache import Cache as Cache
  from selfrag_jax.model.cache import init_cache as init_cache
  from selfrag_jax.model.config import LayerSpec as LayerSpec
  from selfrag_jax.model.config import ModelConfig as ModelConfig
  from selfrag_jax.model.config import count_params as count_params
  from selfrag_jax.model.config import flops_per_token as flops_per_token
  from selfrag_jax.model.lm import LM as LM
  from selfrag_jax.model.lm import init_params as init_params
  from selfrag_jax.model.lm import stack as stack
  from selfrag_jax.model.lm import unstack as unstack
  from selfrag_jax.model.pretrained import Pretrained as Pretrained
  from selfrag_jax.model.pretrained import export_safetensors as export_safetensors
  from selfrag_jax.model.pretrained import load_pretrained as load_pretrained
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "cache": ["Cache", "init_cache"],
      "config": ["LayerSpec", "ModelConfig", "count_params", "flops_per_token"],
      "lm": ["LM", "init_params", "stack", "unstack"],
      "pretrained": ["Pretrained", "export_safetensors", "load_pretrained"],
    },
  )
