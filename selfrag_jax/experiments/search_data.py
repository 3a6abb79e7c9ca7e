"""The questions that `config.data` names for experiments that search: the built-in task, or folders of passages."""

import dataclasses
from typing import Annotated, Literal

from selfrag_jax.checked import Checked, Count, Natural, Range, Seed, Share
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.model.pretrained import Pretrained
from selfrag_jax.tasks.datasets import QAFolder, joined, read_qa_folder
from selfrag_jax.tasks.passages import Parts, PassageSearch
from selfrag_jax.tasks.search_task import SearchTask
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import CHATML


@dataclasses.dataclass(frozen=True)
class TwoHopData(Checked):
  """The built-in task: questions over a fresh random table of facts."""

  name: str
  n_entities: Annotated[int, Range(4, 2**16)] = 32
  n_relations: Annotated[int, Range(1, 2**16)] = 4
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class PassagesData(Checked):
  """Questions over a folder of passages, or over several, with commas between their paths."""

  name: str
  path: str = ""
  document_tokens: Count = 128
  prompt_tokens: Count = 128
  index: Literal["title_text", "title"] = "title_text"
  parts: Parts = Parts()
  fold: Natural = 0  # which of the test parts, one behind the other
  cloze: Share = 0.5  # share of the demonstrations that are about sentences of the passages
  bridge: Share = 0.0  # share of the demonstrations that are about a passage which another one names
  queries: Literal["name", "names"] = (
    "name"  # of the demonstrations' later searches: what the next passage is called, or all names
  )
  seed: Seed = 0


DATA = {"two_hop": TwoHopData, "passages": PassagesData}


def read_folder(section: TwoHopData | PassagesData, init: str) -> QAFolder | None:
  """Read the questions and passages that `config.data` names; None for the built-in task, which makes its own."""
  if isinstance(section, TwoHopData):
    return None
  if not section.path:
    raise ValueError("config.data.path is empty; give the folder of passages and questions: --config.data.path=FOLDER")
  if not init:
    raise ValueError("passages need the tokenizer of a pretrained model: set config.init, e.g. smollm2-135m")
  return joined([read_qa_folder(path) for path in section.path.split(",")])


def make_task(
  section: TwoHopData | PassagesData, folder: QAFolder | None, pretrained: Pretrained | None, rollout: RolloutConfig
) -> SearchTask:
  """Build the task over `folder`, or the built-in one, with the other keys of `config.data`."""
  options = {key: value for key, value in vars(section).items() if key not in ("name", "path")}
  if folder is None or pretrained is None:
    if rollout.first_query != "policy":
      raise ValueError("rollout.first_query = 'question' is for passages: those demonstrations search at random")
    return TwoHopSearch(**options)
  if pretrained.tokenizer is None:
    raise ValueError("the model of config.init comes without a tokenizer; passages need one")
  template = pretrained.chat_template or CHATML
  options |= {"max_query_tokens": rollout.max_query_tokens, "first_query": rollout.first_query}
  options |= {"documents_per_search": rollout.documents_per_hop}
  return PassageSearch(folder, pretrained.tokenizer, template, **options)
