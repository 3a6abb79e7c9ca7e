"""Tasks: what a model is asked, what it may look up, and what counts as right."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.tasks.datasets import QAFolder as QAFolder
  from selfrag_jax.tasks.datasets import read_qa_folder as read_qa_folder
  from selfrag_jax.tasks.facts import Facts as Facts
  from selfrag_jax.tasks.passages import PassageSearch as PassageSearch
  from selfrag_jax.tasks.programs import isolation as isolation
  from selfrag_jax.tasks.prompt_tasks import PromptTask as PromptTask
  from selfrag_jax.tasks.prompt_tasks import Sample as Sample
  from selfrag_jax.tasks.prompt_tasks import make_task as make_task
  from selfrag_jax.tasks.rewards import RewardConfig as RewardConfig
  from selfrag_jax.tasks.rewards import search_reward as search_reward
  from selfrag_jax.tasks.rulebook import Rulebook as Rulebook
  from selfrag_jax.tasks.search_task import SearchTask as SearchTask
  from selfrag_jax.tasks.two_hop import TwoHopKB as TwoHopKB
  from selfrag_jax.tasks.two_hop_search import TwoHopSearch as TwoHopSearch
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "datasets": ["QAFolder", "read_qa_folder"],
      "facts": ["Facts"],
      "passages": ["PassageSearch"],
      "programs": ["isolation"],
      "prompt_tasks": ["PromptTask", "Sample", "make_task"],
      "rewards": ["RewardConfig", "search_reward"],
      "rulebook": ["Rulebook"],
      "search_task": ["SearchTask"],
      "two_hop": ["TwoHopKB"],
      "two_hop_search": ["TwoHopSearch"],
    },
  )
