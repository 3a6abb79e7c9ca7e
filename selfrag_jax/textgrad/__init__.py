"""Textual automatic differentiation (TextGrad, arXiv 2406.07496) and Gradient-RAG, an optimizer with a memory.

  import selfrag_jax.textgrad as tg

Names, argument order and semantics are TextGrad's; docs/textgrad.md says where they differ, and why. The import does
not import JAX.
"""

from selfrag_jax.textgrad import autograd, tasks
from selfrag_jax.textgrad.accept import Accept, HeldOut, Verdict
from selfrag_jax.textgrad.autograd import (
  BlackboxLLM,
  FormattedLLMCall,
  LLMCall,
  Module,
  MultimodalLLMCall,
  OrderedFieldsMultimodalLLMCall,
  StringBasedFunction,
  aggregate,
  formatted_llm_call,
  llm_call,
  sum,
)
from selfrag_jax.textgrad.endpoint import ChatExternalClient, OpenAIEngine
from selfrag_jax.textgrad.engine import CallableEngine, EngineLM, MeteredEngine
from selfrag_jax.textgrad.gradient_rag import RagConfig
from selfrag_jax.textgrad.gradient_store import Critique, GradientStore, GradientStoreError
from selfrag_jax.textgrad.limits import Account, BudgetError, ContextBudgetError, EngineCache, EngineError
from selfrag_jax.textgrad.loss import (
  ImageQALoss,
  MultiChoiceTestTime,
  MultiFieldEvaluation,
  MultiFieldTokenParsedEvaluation,
  TextLoss,
)
from selfrag_jax.textgrad.names import get_engine
from selfrag_jax.textgrad.optimizer import (
  TGD,
  NoGradientError,
  Optimizer,
  TextualGradientDescent,
  TextualGradientDescentwithMomentum,
)
from selfrag_jax.textgrad.providers import LiteLLMEngine
from selfrag_jax.textgrad.replies import ReplyError
from selfrag_jax.textgrad.resolve import SingletonBackwardEngine, backward_engine, set_backward_engine
from selfrag_jax.textgrad.variable import GraphError, Variable

__all__ = [
  "TGD",
  "Accept",
  "Account",
  "BlackboxLLM",
  "BudgetError",
  "CallableEngine",
  "ChatExternalClient",
  "ContextBudgetError",
  "Critique",
  "EngineCache",
  "EngineError",
  "EngineLM",
  "FormattedLLMCall",
  "GradientStore",
  "GradientStoreError",
  "GraphError",
  "HeldOut",
  "ImageQALoss",
  "LLMCall",
  "LiteLLMEngine",
  "MeteredEngine",
  "Module",
  "MultiChoiceTestTime",
  "MultiFieldEvaluation",
  "MultiFieldTokenParsedEvaluation",
  "MultimodalLLMCall",
  "NoGradientError",
  "OpenAIEngine",
  "Optimizer",
  "OrderedFieldsMultimodalLLMCall",
  "RagConfig",
  "ReplyError",
  "SingletonBackwardEngine",
  "StringBasedFunction",
  "TextLoss",
  "TextualGradientDescent",
  "TextualGradientDescentwithMomentum",
  "Variable",
  "Verdict",
  "aggregate",
  "autograd",
  "backward_engine",
  "formatted_llm_call",
  "get_engine",
  "llm_call",
  "set_backward_engine",
  "sum",
  "tasks",
]
