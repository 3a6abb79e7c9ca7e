"""The layouts of architectures in file formats, by the names that the formats give them."""

from selfrag_jax.model.layouts.gemma3 import GEMMA3, GEMMA3_GGUF
from selfrag_jax.model.layouts.granite import GRANITE, GRANITE_GGUF, GRANITE_HYBRID_GGUF
from selfrag_jax.model.layouts.llama import LLAMA, LLAMA_GGUF
from selfrag_jax.model.layouts.mamba2 import MAMBA2

HUGGING_FACE = {"llama": LLAMA, "mamba2": MAMBA2, "granitemoehybrid": GRANITE, "gemma3_text": GEMMA3}
# an export takes the first that can express a model
GGUF = {"llama": LLAMA_GGUF, "granite": GRANITE_GGUF, "granitehybrid": GRANITE_HYBRID_GGUF, "gemma3": GEMMA3_GGUF}
