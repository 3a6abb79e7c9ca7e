"""Retrievers over documents, and the knowledge bases that they are built from."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.retrieval.base import BaseRetriever as BaseRetriever
  from selfrag_jax.retrieval.base import create as create
  from selfrag_jax.retrieval.base import import_plugins as import_plugins
  from selfrag_jax.retrieval.base import load as load
  from selfrag_jax.retrieval.base import register as register
  from selfrag_jax.retrieval.beir import Judged as Judged
  from selfrag_jax.retrieval.beir import read_beir as read_beir
  from selfrag_jax.retrieval.bm25 import BM25Retriever as BM25Retriever
  from selfrag_jax.retrieval.dense import DenseRetriever as DenseRetriever
  from selfrag_jax.retrieval.document import Document as Document
  from selfrag_jax.retrieval.hybrid import HybridRetriever as HybridRetriever
  from selfrag_jax.retrieval.knowledge_base import merge_knowledge_bases as merge_knowledge_bases
  from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base as prepare_knowledge_base
  from selfrag_jax.retrieval.manager import RetrievalManager as RetrievalManager
  from selfrag_jax.retrieval.rerank import RerankRetriever as RerankRetriever
  from selfrag_jax.retrieval.simple import SimpleRetriever as SimpleRetriever
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "base": ["BaseRetriever", "create", "import_plugins", "load", "register"],
      "beir": ["Judged", "read_beir"],
      "bm25": ["BM25Retriever"],
      "dense": ["DenseRetriever"],
      "document": ["Document"],
      "hybrid": ["HybridRetriever"],
      "knowledge_base": ["merge_knowledge_bases", "prepare_knowledge_base"],
      "manager": ["RetrievalManager"],
      "rerank": ["RerankRetriever"],
      "simple": ["SimpleRetriever"],
    },
  )
