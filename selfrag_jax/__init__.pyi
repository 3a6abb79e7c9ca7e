from . import textgrad as textgrad
from .encoders.hashed_words import HashingEncoder as HashingEncoder
from .encoders.load import load_encoder as load_encoder
from .generate.host_rollout import rollout_on_host as rollout_on_host
from .generate.rollout import RolloutConfig as RolloutConfig
from .generate.rollout import rollout as rollout
from .generate.sampling import SamplingConfig as SamplingConfig
from .memory.records import Chunk as Chunk
from .memory.records import Recency as Recency
from .memory.store import MemoryStore as MemoryStore
from .model.config import ModelConfig as ModelConfig
from .model.lm import LM as LM
from .model.pretrained import load_pretrained as load_pretrained
from .retrieval.bm25 import BM25Retriever as BM25Retriever
from .retrieval.dense import DenseRetriever as DenseRetriever
from .retrieval.document import Document as Document
from .retrieval.hybrid import HybridRetriever as HybridRetriever
from .retrieval.knowledge_base import prepare_knowledge_base as prepare_knowledge_base
from .retrieval.manager import RetrievalManager as RetrievalManager
from .retrieval.rerank import RerankRetriever as RerankRetriever
from .retrieval.simple import SimpleRetriever as SimpleRetriever
from .self_rag import SelfRAGConfig as SelfRAGConfig
from .self_rag import SelfRAGModel as SelfRAGModel
from .text.registry import open_tokenizer as open_tokenizer
from .textgrad.gradient_store import GradientStore as GradientStore
from .train.load import load_model as load_model

__version__: str
