"""Tools that answer the queries of a model: a calculator, and a search for documents."""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

Reply = Sequence[Mapping[str, Any]] | str | None
LARGEST = 10**30  # of whole numbers: the digits of larger ones fill a context, and powers take all the time there is


@runtime_checkable
class Tool(Protocol):
  """The protocol of a tool: it answers a query by documents with `content`, or by a text; None: ask the next tool."""

  def __call__(self, query: str) -> Reply: ...


class Search:
  """Answer a query by the best documents of a retriever, or of anything with `retrieve(query, top_k)`."""

  def __init__(self, retriever: Any, top_k: int = 3):
    self._retriever, self._top_k = retriever, top_k

  def __call__(self, query: str) -> Reply:
    return [document.to_dict() for document in self._retriever.retrieve(query, self._top_k)]


_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}


class Calculator:
  """Answer a query that is arithmetic: + - * / // % ** and parentheses over numbers. Other queries are not for it."""

  def __call__(self, query: str) -> Reply:
    try:
      tree = ast.parse(query.strip().rstrip("=").replace(",", "").replace("×", "*").replace("÷", "/"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
      return None
    if isinstance(tree, ast.Constant):
      return None  # a number alone asks for nothing
    try:
      value = _value(tree)
    except _NotArithmeticError:
      return None
    except (ArithmeticError, RecursionError) as error:
      return f"No result: {error}"
    return f"{query.strip().rstrip('=').rstrip()} = {_shown(value)}"


class _NotArithmeticError(Exception):
  pass


def _value(node: ast.expr) -> int | float:
  match node:
    case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
      result = value
    case ast.UnaryOp(op=ast.USub(), operand=operand):
      result = -_value(operand)
    case ast.UnaryOp(op=ast.UAdd(), operand=operand):
      result = _value(operand)
    case ast.BinOp(left=left, op=ast.Pow(), right=right):
      base, exponent = _value(left), _value(right)
      if abs(exponent) > 100:
        raise ArithmeticError("the exponent is too large")
      result = base**exponent
    case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
      result = _BINARY[type(op)](_value(left), _value(right))
    case _:
      raise _NotArithmeticError
  if isinstance(result, complex) or not math.isfinite(result) or abs(result) > LARGEST:
    raise ArithmeticError("the number is too large, or not real")
  return result


def _shown(value: int | float) -> str:
  return str(int(value)) if value == int(value) else f"{value:.10g}"
