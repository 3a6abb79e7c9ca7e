"""Examples of rollouts for a page: greedy ones before and after reinforcement, and sampled ones with advantages."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.reports.rollouts_page import write_rollouts
from selfrag_jax.tasks.search_task import SearchBatch
from selfrag_jax.train.losses import advantages
from selfrag_jax.train.phases.refrag import RLConfig
from selfrag_jax.train.rewards import RolloutRewards
from selfrag_jax.train.rollouts import Episodes, RolloutRunner
from selfrag_jax.typing import Params

QUESTIONS, SAMPLED = 24, 4  # most questions of the page, and sampled rollouts of each


def write_examples(
  path: epath.PathLike,
  runner: RolloutRunner,
  policies: Mapping[str, Params],
  config: RolloutConfig,
  rl: RLConfig,
  batch: int,
) -> None:
  """Write a page with the first validation questions, rolled out with each policy and sampled with the last one.

  A question has changed if the greedy rollouts of the first and the last policy differ in a query, a document or the
  answer. `batch` questions are rolled out greedily and those of a step are sampled, as in evaluation and training: so
  nothing is compiled again.
  """
  split = "valid"
  asked = _first(runner, split, batch)
  n = min(QUESTIONS, batch, rl.questions_per_step, runner.task.size(split) or QUESTIONS)
  shown: list[dict[str, Any]] = [
    {"question": _decoded(runner, prompt[:length]), "right": list(right), "rollouts": []}
    for prompt, length, right in zip(asked.prompts[:n], asked.lengths, asked.answers, strict=False)
  ]
  score_rewards = RolloutRewards(runner, rl.reward, config.max_hops)
  greedy = dataclasses.replace(config, sampling=SamplingConfig(temperature=0.0))
  described = functools.partial(_described, runner, config, score_rewards)
  for name, params in policies.items():
    episodes = runner.run(params, asked, greedy, jax.random.key(0))
    for question, row in zip(shown, described(episodes, name), strict=False):
      question["rollouts"].append(row)
  for question in shown:
    first, *_, last = question["rollouts"]
    question["changed"] = any(first[key] != last[key] for key in ("hops", "answer"))
  name, params = list(policies.items())[-1]
  repeats = rl.rollouts_per_question
  sampled = runner.run(
    params, _first(runner, split, rl.questions_per_step), config, jax.random.key(1), repeats=repeats, kind=rl.retriever
  )
  rows = described(sampled, f"{name}, sampled")
  gained, _ = advantages(np.array([row["reward"] for row in rows]).reshape(-1, repeats), rl.advantage)
  for i, question in enumerate(shown):
    for j in range(min(SAMPLED, repeats)):
      question["rollouts"].append({**rows[i * repeats + j], "advantage": float(gained[i, j])})
  write_rollouts(path, "Rollouts before and after reinforcement", shown)


def _first(runner: RolloutRunner, split: str, n: int) -> SearchBatch:
  """Return the first n questions of a split, the last one again and again if there are fewer."""
  size = runner.task.size(split)
  return runner.questions(split, np.minimum(np.arange(n), n if size is None else size - 1))


def _described(
  runner: RolloutRunner, config: RolloutConfig, score_rewards: RolloutRewards, episodes: Episodes, policy: str
) -> list[dict[str, Any]]:
  scores, batch, corpus = runner.score(episodes), episodes.batch, episodes.batch.corpus
  reward = score_rewards(episodes, scores)
  rows = []
  for i, transcript in enumerate(episodes.transcripts):
    question = i // episodes.repeats
    gold, hops = set(batch.gold[question].tolist()), []
    written = batch.questions[question, : batch.question_lengths[question]].tolist()
    for hop, (query, slots) in enumerate(zip(transcript.queries, episodes.host.slots[i], strict=False)):
      found = [int(slot) for slot in slots if slot >= 0]
      by_policy = hop or config.first_query == "policy"
      beside = [*written, *runner.control.newline] if by_policy and config.search_for == "question_and_query" else []
      scored = zip(found, _similarities(runner, [*beside, *query] if query else [], corpus, found), strict=True)
      documents = [
        {"text": _decoded(runner, corpus.tokens[slot, : corpus.lengths[slot]]), "score": score, "gold": slot in gold}
        for slot, score in scored
      ]
      hops.append({"query": _decoded(runner, query), "documents": documents})
    answer = None if transcript.answer is None else _decoded(runner, transcript.answer)
    exact, valid = bool(scores.exact_match[i]), transcript.valid
    rows.append(
      {"policy": policy, "hops": hops, "answer": answer, "reward": float(reward[i]), "advantage": None}
      | {"exact": exact, "valid": valid}
    )
  return rows


def _similarities(runner: RolloutRunner, query: Any, corpus: Any, slots: list[int]) -> list[float]:
  """Return the cosines of a query and the keys of documents, by the rollout's own encoder."""
  if not slots or not query:
    return [0.0] * len(slots)
  encoder = runner.encoder
  asked = encoder.apply(encoder.query_params(encoder.params), np.array([query], np.int32), np.array([len(query)]))
  found = encoder.apply(encoder.params, corpus.keys[slots], corpus.key_lengths[slots])
  rows = np.concatenate([asked, found]).astype(np.float64)
  rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
  return (rows[1:] @ rows[0]).tolist()


def _decoded(runner: RolloutRunner, ids: Any) -> str:
  return runner.task.tokenizer.decode([int(i) for i in ids], skip_special=True)
