"""The operations on variables (calls, functions and sums) under TextGrad's module name."""

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
