"""The rendering of conversations as token ids and a mask of the assistant's tokens.

Special tokens enter a sequence only here. A conversation is `{"messages": [message, ...]}`, a message one of

  {"role": "system" | "user" | "assistant", "content": text}
  {"role": "retrieval", "documents": [{"title", "content", ...}, ...]}
  {"role": "assistant", "content": [part, ...]}

and a part one of

  {"type": "text" | "search" | "answer", "text": text}
  {"type": "search", "text": text, "by_rule": True}    a query that the assistant did not write
  {"type": "retrieval", "documents": [...]}
  {"type": "retrieval", "text": notice}           a notice of the environment, such as "No more searches."
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from selfrag_jax.text.special import MAX_DOCUMENTS
from selfrag_jax.text.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "retrieval")
PART_TYPES = ("text", "search", "retrieval", "answer")


@dataclass(frozen=True)
class Special:
  """A special token by its name; a plain `str` is text, even if it spells that name."""

  name: str


Piece = Special | str


@dataclass(frozen=True)
class Turn:
  """The pieces before and after a message's content."""

  prefix: tuple[Piece, ...] = ()
  suffix: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
  """The turns of each role. The assistant writes `end_of_turn` itself after its content; `assistant.suffix` follows.

  `trims`: white space around a message's text is dropped, as the templates of Llama 3 and Gemma do. `joins_system`: a
  system message before a user's begins the turn of the user, set off by an empty line.
  """

  system: Turn
  user: Turn
  assistant: Turn
  retrieval: Turn
  end_of_turn: Special
  bos: tuple[Piece, ...] = ()
  trims: bool = False
  joins_system: bool = False


COMPACT = ChatTemplate(
  bos=(Special("<|bos|>"),),
  system=Turn((Special("<|system|>"),)),
  user=Turn((Special("<|user|>"),)),
  assistant=Turn((Special("<|assistant|>"),)),
  retrieval=Turn(),
  end_of_turn=Special("<|end|>"),
)


def _chatml(role: str) -> Turn:
  return Turn((Special("<|im_start|>"), f"{role}\n"), (Special("<|im_end|>"), "\n"))


CHATML = ChatTemplate(
  system=_chatml("system"),
  user=_chatml("user"),
  assistant=Turn(_chatml("assistant").prefix, ("\n",)),
  retrieval=_chatml("retrieval"),
  end_of_turn=Special("<|im_end|>"),
)


def _llama3(role: str) -> Turn:
  prefix = (Special("<|start_header_id|>"), role, Special("<|end_header_id|>"), "\n\n")
  return Turn(prefix, (Special("<|eot_id|>"),))


LLAMA3 = ChatTemplate(
  bos=(Special("<|begin_of_text|>"),),
  system=_llama3("system"),
  user=_llama3("user"),
  assistant=Turn(_llama3("assistant").prefix),
  retrieval=_llama3("retrieval"),
  end_of_turn=Special("<|eot_id|>"),
  trims=True,
)


def _granite(role: str) -> Turn:
  prefix = (Special("<|start_of_role|>"), role, Special("<|end_of_role|>"))
  return Turn(prefix, (Special("<|end_of_text|>"), "\n"))


# without the system message that Granite's own template puts first where a conversation has none
GRANITE = ChatTemplate(
  system=_granite("system"),
  user=_granite("user"),
  assistant=Turn(_granite("assistant").prefix, ("\n",)),
  retrieval=_granite("retrieval"),
  end_of_turn=Special("<|end_of_text|>"),
)


def _gemma(role: str) -> Turn:
  return Turn((Special("<start_of_turn>"), f"{role}\n"), (Special("<end_of_turn>"), "\n"))


GEMMA = ChatTemplate(
  bos=(Special("<bos>"),),
  system=_gemma("user"),
  user=_gemma("user"),
  assistant=Turn(_gemma("model").prefix, ("\n",)),
  retrieval=_gemma("retrieval"),
  end_of_turn=Special("<end_of_turn>"),
  trims=True,
  joins_system=True,
)
TEMPLATES = (CHATML, LLAMA3, GRANITE, GEMMA)  # of pretrained models

# A text or token ids, and whether the assistant wrote them
Segment = tuple[str | list[int], bool]


def find_template(tokenizer: Tokenizer) -> ChatTemplate | None:
  """Return the chat template of a pretrained tokenizer by its special tokens; None: it has those of no template."""
  marks = lambda template: {p.name for p in (*template.user.prefix, template.end_of_turn) if isinstance(p, Special)}
  return next((template for template in TEMPLATES if marks(template) <= tokenizer.special.keys()), None)


END_NAMES = ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>")


def end_ids(tokenizer: Tokenizer, rows: int) -> tuple[int | None, int | None, int | None]:
  """Return the ids that begin a text, end it, and end a turn, for other programs; None: there is none below `rows`.

  A text without an end of its own ends as a turn does.
  """
  template = find_template(tokenizer) or COMPACT
  known = {name: i for name, i in tokenizer.special.items() if i < rows}
  bos = next((known.get(piece.name) for piece in template.bos if isinstance(piece, Special)), None)
  turn = known.get(template.end_of_turn.name)
  return bos, next((known[name] for name in END_NAMES if name in known), turn), turn


def render_conversation(
  tokenizer: Tokenizer, conversation: Mapping[str, Any], template: ChatTemplate
) -> tuple[list[int], list[int]]:
  """Render a conversation as ids and a mask of the same length.

  The mask is 1 on the tokens that the assistant writes: its text, searches and answers with their start and end tokens,
  and its end of turn; 0 on retrieved documents, notices, prefixes and the other roles. Adjacent texts of one author are
  encoded together. Texts of different authors are encoded apart: a prompt ends between them, so the assistant's text
  must begin with a token of its own. Raises ValueError for a conversation without messages, two messages of the
  assistant in a row, an unknown role or part type, content of the wrong kind, and more than 16 documents.
  """
  return _encode(tokenizer, _conversation_segments(tokenizer, _messages(conversation), template))


def render_for_completion(tokenizer: Tokenizer, conversation: Mapping[str, Any], template: ChatTemplate) -> list[int]:
  """Render the prompt of the assistant's next turn, up to its prefix; a trailing assistant message is dropped."""
  messages = _messages(conversation)
  if messages[-1].get("role") == "assistant":
    messages = messages[:-1]
  prefix = _piece_segments(tokenizer, template.assistant.prefix)
  ids, _ = _encode(tokenizer, [*_conversation_segments(tokenizer, messages, template), *prefix])
  return ids


def document_body(tokenizer: Tokenizer, document: Mapping[str, Any]) -> list[int]:
  """Encode a document as `Title: … Content: …` on two lines, or as its content alone if it has no title."""
  title, content = document.get("title"), _text(document, "content", "a document")
  return tokenizer.encode(f"Title: {title}\nContent: {content}" if title else content)


def render_documents(tokenizer: Tokenizer, documents: Sequence[Mapping[str, Any]]) -> list[int]:
  """Render `[RETRIEVAL_START] [DOC_1] body [/DOC_1] … [RETRIEVAL_END]`, each body encoded on its own.

  A rollout joins bodies that were encoded beforehand, so no token may span two bodies. Raises ValueError for more than
  16 documents.
  """
  if len(documents) > MAX_DOCUMENTS:
    raise ValueError(f"{len(documents)} documents, but there are tokens for {MAX_DOCUMENTS}: lower top_k")
  ids = [_special_id(tokenizer, "[RETRIEVAL_START]")]
  for n, document in enumerate(documents, 1):
    body = document_body(tokenizer, document)
    ids += [_special_id(tokenizer, f"[DOC_{n}]"), *body, _special_id(tokenizer, f"[/DOC_{n}]")]
  return [*ids, _special_id(tokenizer, "[RETRIEVAL_END]")]


def render_notice(tokenizer: Tokenizer, text: str) -> list[int]:
  """Render `[RETRIEVAL_START] text [RETRIEVAL_END]`: a reply of the environment without documents."""
  start, end = _special_id(tokenizer, "[RETRIEVAL_START]"), _special_id(tokenizer, "[RETRIEVAL_END]")
  return [start, *tokenizer.encode(text), end]


def visualize_tokenization(tokenizer: Tokenizer, ids: Iterable[int], mask: Iterable[int], color: bool = True) -> str:
  """Show tokens separated by `|`: the assistant's in green, others in grey (without color: in `«…»`, and bare)."""
  written, other = ("\033[32m{}\033[0m", "\033[90m{}\033[0m") if color else ("«{}»", "{}")
  # repr keeps a newline, or an escape sequence of a hostile document, visible and harmless
  tokens = [repr(tokenizer.decode([i]))[1:-1] for i in ids]
  return "|".join((written if bit else other).format(token) for token, bit in zip(tokens, mask, strict=True))


def _messages(conversation: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
  if not conversation["messages"]:
    raise ValueError("the conversation has no messages: nothing can be rendered")
  return conversation["messages"]


def _conversation_segments(
  tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> Iterator[Segment]:
  yield from _piece_segments(tokenizer, template.bos)
  joined = False  # whether the turn has begun with a system message
  for index, message in enumerate(messages):
    role = message.get("role")
    if role not in ROLES:
      raise ValueError(f"message {index} has the role {role!r}; allowed are {', '.join(ROLES)}")
    where = f"message {index} ({role})"
    if index and role == messages[index - 1].get("role") == "assistant":
      raise ValueError(f"{where} follows another message of the assistant: join them, or put the user's turn between")
    if template.trims and isinstance(message.get("content"), str):
      message = {**message, "content": message["content"].strip()}
    turn: Turn = getattr(template, role)
    if not joined:
      yield from _piece_segments(tokenizer, turn.prefix)
    joined = (
      template.joins_system and role == "system" and [m.get("role") for m in messages[index + 1 :][:1]] == ["user"]
    )
    if role == "assistant":
      yield from _assistant_segments(tokenizer, message, where)
      yield from _piece_segments(tokenizer, (template.end_of_turn,), written=True)
    elif role == "retrieval":
      yield _retrieval_ids(tokenizer, message, "content", where), False
    else:
      yield _text(message, "content", where), False
    yield from _piece_segments(tokenizer, ("\n\n",) if joined else turn.suffix)


def _assistant_segments(tokenizer: Tokenizer, message: Mapping[str, Any], where: str) -> Iterator[Segment]:
  if not isinstance(message.get("content"), list):
    yield _text(message, "content", where), True
    return
  for index, part in enumerate(message["content"]):
    part_where, kind = f"{where}, part {index}", part.get("type")
    if kind not in PART_TYPES:
      raise ValueError(f"{part_where} has the type {kind!r}; allowed are {', '.join(PART_TYPES)}")
    if kind == "retrieval":
      yield _retrieval_ids(tokenizer, part, "text", part_where), False
      continue
    text = _text(part, "text", part_where)
    pieces = (text,) if kind == "text" else (Special(f"<|{kind}_start|>"), text, Special(f"<|{kind}_end|>"))
    yield from _piece_segments(tokenizer, pieces, written=not part.get("by_rule", False))


def _retrieval_ids(tokenizer: Tokenizer, source: Mapping[str, Any], notice: str, where: str) -> list[int]:
  if "documents" in source:
    return render_documents(tokenizer, source["documents"])
  return render_notice(tokenizer, _text(source, notice, where))


def _piece_segments(tokenizer: Tokenizer, pieces: Iterable[Piece], written: bool = False) -> Iterator[Segment]:
  for piece in pieces:
    yield [_special_id(tokenizer, piece.name)] if isinstance(piece, Special) else piece, written


def _encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> tuple[list[int], list[int]]:
  ids: list[int] = []
  mask: list[int] = []
  for (is_text, written), run in groupby(segments, key=lambda segment: (isinstance(segment[0], str), segment[1])):
    contents: list[Any] = [content for content, _ in run]
    new = tokenizer.encode("".join(contents)) if is_text else [i for content in contents for i in content]
    ids += new
    mask += [int(written)] * len(new)
  return ids, mask


def _special_id(tokenizer: Tokenizer, name: str) -> int:
  if name not in tokenizer.special:
    raise ValueError(f"the {tokenizer.name} tokenizer has no token {name}; COMPACT works with every tokenizer")
  return tokenizer.special[name]


def _text(source: Mapping[str, Any], field: str, where: str) -> str:
  value = source.get(field)
  if not isinstance(value, str):
    raise ValueError(f"{where}: {field!r} must be a string, not {type(value).__name__}")
  return value
