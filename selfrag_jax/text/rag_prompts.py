"""Retrieved documents in prompts: as plain text, as conversations, and as token ids that fit into a context.

The plain texts are for models that do not have this package's special tokens. Where a text is tokenized, marks that a
document spells stay text: only `render_rag_conversation_for_tokenizer` writes control tokens, by their ids.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from selfrag_jax.text.chat import COMPACT, ChatTemplate, render_conversation, render_for_completion
from selfrag_jax.text.tokenizer import Tokenizer

Documents = Sequence[Mapping[str, Any]]


class PromptText(NamedTuple):
  """A text for a prompt, and the number of documents whose contents were cut."""

  text: str
  truncated: int


class RenderedConversation(NamedTuple):
  """Token ids, the mask of the assistant's tokens, and the number of documents that did not fit."""

  ids: list[int]
  mask: list[int]
  dropped_documents: int


def format_documents_for_prompt(documents: Documents, max_doc_length: int | None = None) -> PromptText:
  """Write documents as text between marks; of each content at most `max_doc_length` words are kept (None: all).

  Raises ValueError for a length below 1 and for a document without content.
  """
  if max_doc_length is not None and max_doc_length < 1:
    raise ValueError(f"max_doc_length is {max_doc_length}; it must be at least 1")
  lines, truncated = ["[RETRIEVAL_START]"], 0
  for number, document in enumerate(documents, 1):
    title, content = document.get("title"), document.get("content")
    if not isinstance(content, str):
      raise ValueError(f"document {number}: 'content' must be a string, not {type(content).__name__}")
    words = content.split(maxsplit=max_doc_length) if max_doc_length else []
    if max_doc_length and len(words) > max_doc_length:
      content, truncated = content[: len(content) - len(words[-1])].rstrip() + " …", truncated + 1
    lines += [f"[DOC_{number}]", *([f"Title: {title}"] if title else []), f"Content: {content}", f"[/DOC_{number}]"]
  return PromptText("\n".join([*lines, "[RETRIEVAL_END]"]), truncated)


def format_multihop_documents(hops: Sequence[Mapping[str, Any]], max_doc_length: int | None = None) -> PromptText:
  """Write the hops `{"query", "documents"}` one after the other: `Search n: query`, then what was found.

  Raises like `format_documents_for_prompt`, and ValueError for a hop without a query.
  """
  parts, truncated = [], 0
  for number, hop in enumerate(hops, 1):
    if not isinstance(hop.get("query"), str):
      raise ValueError(f"hop {number}: 'query' must be a string, not {type(hop.get('query')).__name__}")
    found = format_documents_for_prompt(hop.get("documents", ()), max_doc_length)
    parts.append(f"Search {number}: {hop['query']}\n{found.text}")
    truncated += found.truncated
  return PromptText("\n\n".join(parts), truncated)


def create_rag_training_example(
  question: str, answer: str, documents: Documents, *, system: str | None = None, id: str | None = None
) -> dict[str, Any]:
  """Make the conversation of a question, the retrieved documents before it, and its answer; no documents: no message.

  Documents are mappings with `title` and `content` as in `Document.to_dict`. Scores and other fields are kept.
  """
  messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
  if documents:
    messages.append({"role": "retrieval", "documents": [dict(document) for document in documents]})
  messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
  return {"messages": messages} if id is None else {"id": id, "messages": messages}


def repeat_documents(messages: Sequence[Mapping[str, Any]], times: int) -> list[Mapping[str, Any]]:
  """Return messages in which those of role `retrieval` show the content of each document `times` times in a row.

  A causal model knows at no word what follows it; in the second copy it has read the whole document before
  ("just read twice", arXiv 2407.05483).
  """

  def repeated(message: Mapping[str, Any]) -> Mapping[str, Any]:
    documents = [{**one, "content": " ".join([one["content"]] * times)} for one in message.get("documents", ())]
    return {**message, "documents": documents} if documents else message

  return [repeated(message) for message in messages]


def render_rag_conversation_for_tokenizer(
  tokenizer: Tokenizer,
  conversation: Mapping[str, Any],
  template: ChatTemplate = COMPACT,
  max_tokens: int | None = None,
  *,
  for_completion: bool = False,
) -> RenderedConversation:
  """Render a conversation in at most `max_tokens` tokens (None: any number), without documents where they do not fit.

  Documents are dropped whole, the last of the last retrieval first; nothing else is cut. `for_completion`: render the
  prompt of the assistant's next turn instead, whose mask is all 0. Raises ValueError for a conversation that does not
  fit without any document, and like `render_conversation`.
  """
  conversation = copy.deepcopy(dict(conversation))
  retrievals = list(_retrievals(conversation["messages"]))
  ids: list[int] = []
  for dropped, documents in enumerate([None, *(found for found in reversed(retrievals) for _ in list(found))]):
    if documents is not None:
      documents.pop()
    if for_completion:
      ids = render_for_completion(tokenizer, conversation, template)
      mask = [0] * len(ids)
    else:
      ids, mask = render_conversation(tokenizer, conversation, template)
    if max_tokens is None or len(ids) <= max_tokens:
      return RenderedConversation(ids, mask, dropped)
  raise ValueError(
    f"the conversation has {len(ids)} tokens without its documents, which does not fit into {max_tokens}: shorten the "
    "question, or leave it more tokens"
  )


def _retrievals(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
  """Yield the lists of documents of a conversation, in its order."""
  for message in messages:
    content = message.get("content")
    for part in [message, *(content if isinstance(content, list) else [])]:
      if isinstance(part.get("documents"), list):
        yield part["documents"]
