"""What the RAG experiment reads: sections of its config, and the questions beside documents that they stand for."""

import dataclasses
from typing import Annotated, ClassVar, Protocol

from selfrag_jax.checked import Checked, Count, Natural, Range, Seed, Share
from selfrag_jax.retrieval.beir import TitleParts
from selfrag_jax.tasks.articles import Articles
from selfrag_jax.tasks.conversations import Conversations
from selfrag_jax.tasks.countries import Countries
from selfrag_jax.tasks.qa import load_task
from selfrag_jax.tasks.rag import Shown
from selfrag_jax.tasks.task import Task


class Reading(Protocol):
  """Questions beside documents. `conditions` are the ways to show documents; a task's reward is a softer score."""

  conditions: ClassVar[tuple[str, ...]]

  def of_phase(self, name: str) -> "Reading":
    """Return what a phase reads: a fresh model learns to copy, and to choose a document, from simpler forms."""
    ...

  def size(self, split: str) -> int | None:
    """Return the number of questions of a split; None if they never end."""
    ...

  def questions(self, split: str, n: int, condition: str) -> Task: ...

  def training(self, shown: Shown, unanswerable: float) -> Task:
    """Return an endless task; the share `unanswerable` of its questions lacks the document that answers."""
    ...


@dataclasses.dataclass(frozen=True)
class CountriesData(Checked):
  """The embedded task: countries that do not exist, each question beside the documents found in its own world."""

  name: str
  n_countries: Annotated[int, Range(2, 200)] = 12
  retriever: str = "bm25"
  top_k: Count = 5
  further: Natural = 9  # questions after the first one of a conversation of training
  near: Share = 0.0  # of these conversations: documents of the same relation or country
  noise: Share = 0.0  # in phase `rag`: of words that tell no relation, left out or replaced; of sentences, turned round
  reversed: Share = 0.0  # of the further questions: give a value and ask for its country
  alike: Share = 0.0  # of the worlds of a training: have names that share their words
  authors: Share = 0.0  # in phase `rag`: of statements and questions, those that authors wrote
  repeats: Count = 1  # how often the content of a document is shown, one copy after the other
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class ArticlesData(Checked):
  """A data set of `load_task` whose questions name their passages, split by article."""

  name: str
  data_set: str = "squad_v2"
  path: str = ""
  split: str = "validation"  # of the official files; the experiment makes its own parts
  retriever: str = ""  # empty: bm25, or that of the knowledge base
  knowledge_base: str = ""  # a folder that holds one; empty: the passages of the file
  top_k: Count = 3
  further: Natural = 0  # questions about the same passage after the first one of a conversation of training
  parts: TitleParts = TitleParts()
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class ConversationsData(Checked):
  """Conversations whose documents were retrieved beforehand: train.jsonl, valid.jsonl and test.jsonl in a folder."""

  name: str
  path: str = ""
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class PlainConfig(Checked):
  """Conversations of a data set of `load_task`, without documents, in place of a share of the others."""

  share: Share = 0.0
  data_set: str = "smoltalk"
  path: str = ""
  split: str = "train"


DATA = {"countries": CountriesData, "articles": ArticlesData, "conversations": ConversationsData}


def read_data(section: CountriesData | ArticlesData | ConversationsData) -> Countries | Articles | Conversations:
  """Make the questions that a section names. Raises ValueError with the fix."""
  if isinstance(section, CountriesData):
    names = "n_countries", "retriever", "top_k", "further", "near", "noise", "reversed", "alike", "authors", "seed"
    return Countries(**{name: getattr(section, name) for name in names})
  if not section.path:
    kind = "folder" if isinstance(section, ConversationsData) else "official files of config.data.data_set"
    raise ValueError(f"config.data.path is empty; give the {kind}: --data=PATH")
  if isinstance(section, ConversationsData):
    conversations = Conversations(section.path, section.seed)
    print(conversations, flush=True)
    return conversations
  task = load_task(section.data_set, section.path, split=section.split)
  names = "retriever", "knowledge_base", "top_k", "further", "parts", "seed"
  articles = Articles(task, **{name: getattr(section, name) for name in names})
  print(articles.audit, flush=True)
  return articles


def read_plain(section: PlainConfig, is_of_files: bool) -> Task | None:
  """Load the conversations without documents; None if they have no share. Raises ValueError with the fix."""
  if not section.share:
    return None
  if not is_of_files:
    raise ValueError(f"rag.plain.share = {section.share} is for questions of files: invented countries fill short rows")
  if not section.path:
    raise ValueError(f"rag.plain.share = {section.share} needs the files of {section.data_set}: set rag.plain.path")
  return load_task(section.data_set, section.path, split=section.split)
