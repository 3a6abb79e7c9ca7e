"""TextGrad's name for the operations: calls, functions and sums of variables."""

from selfrag_jax.textgrad.functions import (
  BackwardContext,
  FormattedLLMCall,
  Function,
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

__all__ = [
  "BackwardContext",
  "FormattedLLMCall",
  "Function",
  "LLMCall",
  "Module",
  "MultimodalLLMCall",
  "OrderedFieldsMultimodalLLMCall",
  "StringBasedFunction",
  "aggregate",
  "formatted_llm_call",
  "llm_call",
  "sum",
]
