"""Language models that remember, in JAX and Flax.

The names below are imported when they are first asked for: importing the package imports neither JAX nor TensorFlow.
Each package has more: `from selfrag_jax.memory import init_memory`.
"""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax import textgrad as textgrad
  from selfrag_jax.encoders.hashed_words import HashingEncoder as HashingEncoder
  from selfrag_jax.encoders.load import load_encoder as load_encoder
  from selfrag_jax.generate.rollout import RolloutConfig as RolloutConfig
  from selfrag_jax.generate.rollout import rollout as rollout
  from selfrag_jax.generate.rollout import rollout_on_host as rollout_on_host
  from selfrag_jax.generate.sampling import SamplingConfig as SamplingConfig
  from selfrag_jax.memory.records import Chunk as Chunk
  from selfrag_jax.memory.records import Recency as Recency
  from selfrag_jax.memory.store import MemoryStore as MemoryStore
  from selfrag_jax.model.config import ModelConfig as ModelConfig
  from selfrag_jax.model.lm import LM as LM
  from selfrag_jax.model.pretrained import load_pretrained as load_pretrained
  from selfrag_jax.retrieval.bm25 import BM25Retriever as BM25Retriever
  from selfrag_jax.retrieval.dense import DenseRetriever as DenseRetriever
  from selfrag_jax.retrieval.document import Document as Document
  from selfrag_jax.retrieval.hybrid import HybridRetriever as HybridRetriever
  from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base as prepare_knowledge_base
  from selfrag_jax.retrieval.manager import RetrievalManager as RetrievalManager
  from selfrag_jax.retrieval.rerank import RerankRetriever as RerankRetriever
  from selfrag_jax.retrieval.simple import SimpleRetriever as SimpleRetriever
  from selfrag_jax.self_rag import SelfRAGConfig as SelfRAGConfig
  from selfrag_jax.self_rag import SelfRAGModel as SelfRAGModel
  from selfrag_jax.text.registry import open_tokenizer as open_tokenizer
  from selfrag_jax.textgrad.gradient_store import GradientStore as GradientStore
  from selfrag_jax.train.load import load_model as load_model
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "encoders.hashed_words": ["HashingEncoder"],
      "encoders.load": ["load_encoder"],
      "generate.rollout": ["RolloutConfig", "rollout", "rollout_on_host"],
      "generate.sampling": ["SamplingConfig"],
      "memory.records": ["Chunk", "Recency"],
      "memory.store": ["MemoryStore"],
      "model.config": ["ModelConfig"],
      "model.lm": ["LM"],
      "model.pretrained": ["load_pretrained"],
      "retrieval.bm25": ["BM25Retriever"],
      "retrieval.dense": ["DenseRetriever"],
      "retrieval.document": ["Document"],
      "retrieval.hybrid": ["HybridRetriever"],
      "retrieval.knowledge_base": ["prepare_knowledge_base"],
      "retrieval.manager": ["RetrievalManager"],
      "retrieval.rerank": ["RerankRetriever"],
      "retrieval.simple": ["SimpleRetriever"],
      "self_rag": ["SelfRAGConfig", "SelfRAGModel"],
      "text.registry": ["open_tokenizer"],
      "textgrad": [],
      "textgrad.gradient_store": ["GradientStore"],
      "train.load": ["load_model"],
    },
  )

__version__ = "0.1.0"
