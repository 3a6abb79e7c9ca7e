"""Tasks whose conversations hold retrieved documents: found as they are needed, in several hops, or beforehand."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from etils import epath

from selfrag_jax.checked import suggestion
from selfrag_jax.retrieval.base import BaseRetriever
from selfrag_jax.retrieval.manager import POSITIONS, RetrievalManager
from selfrag_jax.retrieval.multi_hop import MultiHopRetriever, WriteQuery
from selfrag_jax.storage.atomic import write_bytes_atomic
from selfrag_jax.storage.json_lines import read_jsonl
from selfrag_jax.tasks.task import Conversation, Score, Task
from selfrag_jax.text.chat import ROLES

ALARM = 10  # questions in a row, from the first on, for which nothing is found: the knowledge base is the wrong one
KnowledgeBase = str | os.PathLike | BaseRetriever | RetrievalManager


class RAGTask(Task):
  """Another task's conversations with the documents that are retrieved for their last question.

  Each has one more message, of the role `retrieval`; a conversation for which nothing is found stays as it is. The
  scores are those of the other task.
  """

  def __init__(
    self,
    base_task: Task,
    knowledge_base_path: KnowledgeBase,
    retriever_type: str | None = None,
    top_k: int = 5,
    insert_position: Literal["before_user", "after_system"] = "before_user",
  ):
    """Take a folder with a knowledge base, or a retriever that holds documents.

    Raises like `RetrievalManager` for the folder; ValueError for a wrong position and a knowledge base without
    documents. A conversation raises ValueError if nothing was found for any of the first 10 questions.
    """
    self.manager = _manager(knowledge_base_path, retriever_type)
    if insert_position not in POSITIONS:
      raise ValueError(f"insert_position is {insert_position!r}; one of {', '.join(POSITIONS)}")
    if not len(self.manager.retriever):
      raise ValueError("the knowledge base has no documents: nothing can be found there")
    self._top_k, self._position = top_k, insert_position
    self._asked, self._found = 0, False
    super().__init__(f"rag_{base_task.name}", base_task, self._augment, base_task.evaluate, base_task.reward)

  def _augment(self, conversation: Conversation) -> Conversation:
    augmented = self.manager.augment_conversation(conversation, top_k=self._top_k, insert_position=self._position)
    self._asked += 1
    self._found |= len(augmented["messages"]) > len(conversation["messages"])
    if self._asked >= ALARM and not self._found:
      raise ValueError(
        f"nothing was found for any of {self._asked} questions of {self.name}, in "
        f"{len(self.manager.retriever):,} documents: is it the right knowledge base?"
      )
    return augmented


class MultiHopRAGTask(RAGTask):
  """Another task's conversations with the documents of several searches, one message of `retrieval` for each.

  The query of a later search comes from what the earlier ones found (`MultiHopRetriever`): by a rule, or by a function
  such as a language model. A message has its `query`.
  """

  def __init__(
    self,
    base_task: Task,
    knowledge_base_path: KnowledgeBase,
    retriever_type: str | None = None,
    max_hops: int = 3,
    top_k_per_hop: int = 3,
    write_query: WriteQuery | str = "add_names",
  ):
    """Raises like `RAGTask`, and ValueError for fewer than one hop."""
    searched = _manager(knowledge_base_path, retriever_type).retriever
    searcher = MultiHopRetriever(searched, write_query, hops=max_hops)
    super().__init__(base_task, searcher, top_k=max_hops * top_k_per_hop)
    self.name = f"multi_hop_{self.name}"


class StaticRAGTask(Task):
  """Conversations whose documents were retrieved beforehand, as `save_conversations` writes them."""

  def __init__(self, path: epath.PathLike, split: str | None = None, evaluate: Score | None = None):
    """Read lines of `{"messages": [...]}`.

    `path` is a file; a folder that holds `SPLIT.jsonl`; or a file with `{split}` in its name. Raises FileNotFoundError
    for a missing file, and ValueError, with file and line, for a line that is no conversation.
    """
    file = _split_file(path, split)
    super().__init__(f"static_rag_{file.stem}", _read_conversations(file), lambda conversation: conversation, evaluate)


Shown = Literal["retrieved", "none", "shuffled"]


def show(task: Task, shown: Shown, apart: int | Callable[[int], int] = 1) -> Task:
  """Return a task with other documents in its conversations: those `retrieved`, `none`, or those of another question.

  `shuffled` gives each conversation the documents of the one `apart` places further on, and the last ones those of the
  first: a control with prompts of the same length that do not help. `apart` passes over questions with the same
  documents; a function of the index returns that of the other conversation. Raises ValueError for a task that is not
  longer than that.
  """
  if shown == "retrieved":
    return task
  if shown == "shuffled" and isinstance(apart, int) and not 0 < apart < len(task):
    raise ValueError(f"{len(task)} questions cannot get the documents of the question {apart} places further on")
  other = (lambda index: (index + apart) % len(task)) if isinstance(apart, int) else apart
  is_found = lambda message: message["role"] == "retrieval" and "documents" in message  # a notice stays

  def changed(index: int) -> Conversation:
    conversation = task[index]
    others = [] if shown == "none" else list(filter(is_found, task[other(index)]["messages"]))
    messages = conversation["messages"]
    at = next((i for i, message in enumerate(messages) if is_found(message)), 0)
    kept = [message for message in messages if not is_found(message)]
    return {**conversation, "messages": [*kept[:at], *others, *kept[at:]]}

  return Task(f"{shown}_{task.name}", range(len(task)), changed, task.evaluate, task.reward)


KINDS = {"rag": RAGTask, "multi_hop": MultiHopRAGTask}


def create_rag_task(base_task: Task, knowledge_base_path: KnowledgeBase, kind: str = "rag", **options: Any) -> RAGTask:
  """Give a task documents, by one search (`rag`) or several (`multi_hop`). Raises ValueError for another kind."""
  if kind not in KINDS:
    raise ValueError(f"no RAG task is of the kind {kind!r}; {suggestion(kind, KINDS)}")
  return KINDS[kind](base_task, knowledge_base_path, **options)


def save_conversations(path: epath.PathLike, conversations: Iterable[Conversation]) -> int:
  """Write conversations as JSON lines, all or none, for `StaticRAGTask`; return how many."""
  lines = [json.dumps(conversation, ensure_ascii=False) + "\n" for conversation in conversations]
  write_bytes_atomic(path, "".join(lines).encode())
  return len(lines)


def _manager(knowledge_base: KnowledgeBase, retriever_type: str | None) -> RetrievalManager:
  if isinstance(knowledge_base, RetrievalManager):
    return knowledge_base
  if isinstance(knowledge_base, BaseRetriever):
    return RetrievalManager(knowledge_base)
  return RetrievalManager(retriever_type, knowledge_base)


def _split_file(path: epath.PathLike, split: str | None) -> epath.Path:
  if "{split}" in os.fspath(path):
    if split is None:
      raise ValueError(f"{path} needs a split")
    path = os.fspath(path).replace("{split}", split)
  file = epath.Path(path)
  if file.is_dir():
    if split is None:
      raise ValueError(f"{path} is a folder: give a split, such as train")
    file = file / f"{split}.jsonl"
  if not file.exists():
    raise FileNotFoundError(f"{file} does not exist; save_conversations writes such a file")
  return file


def _read_conversations(file: epath.Path) -> list[Mapping[str, Any]]:
  conversations = []
  for number, record in read_jsonl(file):
    messages = record.get("messages")
    where = f"{file}, line {number}"
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
      raise ValueError(f"{where}: 'messages' must be a list of at least one message")
    for place, message in enumerate(messages):
      if message.get("role") not in ROLES:
        raise ValueError(
          f"{where}: message {place} has the role {message.get('role')!r}; allowed are {', '.join(ROLES)}"
        )
    conversations.append(record)
  if not conversations:
    raise ValueError(f"{file} holds no conversation")
  return conversations
