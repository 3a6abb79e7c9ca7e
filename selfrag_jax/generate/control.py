"""The tokens that steer a rollout: they open and close searches, documents and answers."""

from typing import Any, NamedTuple

from selfrag_jax.text.special import MAX_DOCUMENTS


class ControlTokens(NamedTuple):
  """The ids that steer a rollout; `notice` is the text of the "no more searches" document, `newline` a line break."""

  pad: int
  end: int
  search_start: int
  search_end: int
  answer_start: int
  answer_end: int
  retrieval_start: int
  retrieval_end: int
  doc_start: tuple[int, ...]
  doc_end: tuple[int, ...]
  notice: tuple[int, ...]
  newline: tuple[int, ...]


def control_tokens(tokenizer: Any, notice: str, end: str = "<|end|>") -> ControlTokens:
  """Look the control ids up in a tokenizer; `end` is the end-of-turn token of the chat template."""
  special = tokenizer.special
  documents = range(1, MAX_DOCUMENTS + 1)
  return ControlTokens(
    pad=special["<|pad|>"],
    end=special[end],
    search_start=special["<|search_start|>"],
    search_end=special["<|search_end|>"],
    answer_start=special["<|answer_start|>"],
    answer_end=special["<|answer_end|>"],
    retrieval_start=special["[RETRIEVAL_START]"],
    retrieval_end=special["[RETRIEVAL_END]"],
    doc_start=tuple(special[f"[DOC_{i}]"] for i in documents),
    doc_end=tuple(special[f"[/DOC_{i}]"] for i in documents),
    notice=tuple(tokenizer.encode(notice)),
    newline=tuple(tokenizer.encode("\n")),
  )
