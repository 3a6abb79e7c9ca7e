"""A drawing of the graph of variables, through the package graphviz."""

import html
import textwrap
from collections.abc import Sequence
from typing import Any

from selfrag_jax.textgrad.checks import clip

WIDTH, LONGEST = 40, 600  # characters of a line, and of a text


def draw(nodes: Sequence[Any], print_gradients: bool = False) -> Any:
  """Return a `graphviz.Digraph` of variables, latest first. Raises ImportError where the package is missing."""
  try:
    from graphviz import Digraph
  except ImportError:
    raise ImportError("drawing the graph needs the package graphviz: pip install graphviz") from None
  graph = Digraph(comment=f"what leads to {nodes[0].role_description}")
  graph.attr("node", shape="box", style="filled", fillcolor="lavender", fontname="Arial", fontsize="8")
  names = {v: f"v{i}" for i, v in enumerate(nodes)}
  for v in nodes:
    rows = [("Role", v.role_description), ("Value", f"{len(v.value)} bytes" if isinstance(v.value, bytes) else v.value)]
    if v.grad_fn is not None:
      rows.append(("Backward", getattr(v.grad_fn, "__qualname__", type(v.grad_fn).__name__)))
    if print_gradients and v.gradients:
      rows.append(("Gradients", v.get_gradient_text()))
    label = "<br align='left'/>".join(f"<b>{name}:</b> {_wrapped(text)}" for name, text in rows)
    graph.node(names[v], label=f"<{label}<br align='left'/>>")
    for predecessor in v.predecessors:
      graph.edge(names[predecessor], names[v])
  return graph


def _wrapped(text: str) -> str:
  # Graphviz refuses control characters, escaped or not
  plain = "".join(c if c.isprintable() else " " for c in clip(text, LONGEST))
  return "<br align='left'/>".join(html.escape(line) for line in textwrap.wrap(plain, WIDTH)) or " "
