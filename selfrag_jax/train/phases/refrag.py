"""REFRAG: reinforcement learning of *how to search*, on rollouts whose retrieval runs inside the compiled decode loop.

A step rolls every question out several times, rewards the answers, and moves the probability of the sampled tokens by
the advantage of their rollout over its siblings. Prompt, retrieved and forced tokens carry no loss.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import jax
import numpy as np

from selfrag_jax.checked import Checked, Count, Natural, Range, Share, Weight
from selfrag_jax.generate.rollout import Queries, Rollout, RolloutConfig, searches_width
from selfrag_jax.mesh import batch_shards, check_batch, gathered, own_rows, spread
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.lm import init_params
from selfrag_jax.ragged import round_up
from selfrag_jax.tasks.rewards import RewardConfig
from selfrag_jax.tasks.search_task import SearchBatch, permuted
from selfrag_jax.train.alarm import AlarmConfig, CollapseAlarm
from selfrag_jax.train.experience import Experience, Trajectories, packed
from selfrag_jax.train.experts import demonstrations
from selfrag_jax.train.losses import Advantage, advantages, policy_loss
from selfrag_jax.train.near_misses import as_whole, behind_searches, near_misses, searches_kept
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.base import GradientPhase, Start
from selfrag_jax.train.rewards import RolloutRewards
from selfrag_jax.train.rollouts import Episodes, RolloutRunner, Scores
from selfrag_jax.train.state import LossSums, TrainState
from selfrag_jax.typing import Array, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class RLConfig(Checked):
  """Reinforcement of whole rollouts by their reward."""

  steps: Count = 100
  questions_per_step: Count = 32
  rollouts_per_question: Annotated[int, Range(2, 2**20)] = 8  # advantages need a spread within the group
  advantage: Advantage = "mean"
  clip_low: Share = 0.2
  clip_high: Weight = 0.28
  kl_weight: Weight = 0.0  # of the KL to the policy that the phase started from
  kl_on: Literal["all", "wrong"] = "all"  # wrong: rollouts without a right answer alone (DGPO, arXiv 2508.20324)
  resample: Natural = 0  # rollouts of each question that go on behind the policy's first search in a near miss
  experts: bool = False  # a demonstration of each question joins its group, and earns what such a rollout would
  accumulate: Count = 1
  retriever: Literal["memory", "empty", "random"] = "memory"
  reward: RewardConfig = RewardConfig()
  alarm: AlarmConfig = AlarmConfig()
  # causal controls: the reward is drawn at random, or computed from the answers of another question
  control: Literal["none", "random_reward", "permuted"] = "none"
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    if self.kl_on == "wrong" and not self.kl_weight:
      raise ValueError("kl_on = 'wrong' says on which rollouts the KL acts, but kl_weight is 0: set it, too")
    if self.resample == 1:
      raise ValueError("resample = 1: a rollout alone has no other one to be better than; give 2 or more, or 0")
    if self.control != "none" and (self.experts or self.kl_on == "wrong"):
      raise ValueError(f"the control {self.control} hides the right answers: experts and kl_on = 'wrong' show them")
    if self.control == "permuted" and self.reward.model:
      raise ValueError(
        "the control permuted takes the answers of another question: reward.model sees the question's own"
      )
    if self.experts and self.reward.model:
      raise ValueError("experts earn as right answers, which a reward model may score lower: set one or the other")

  @property
  def trajectories(self) -> int:
    """The rollouts and demonstrations of a step, from which its update learns."""
    return self.questions_per_step * (self.rollouts_per_question + self.resample + self.experts)


class Refrag(GradientPhase):
  """The phase. It starts from `params`, a policy that knows the format; `evaluate_policy(params)` scores rollouts."""

  best_metric = "exact_match"
  may_be_empty = True

  def __init__(
    self,
    name: str,
    runner: RolloutRunner,
    model: ModelConfig,
    config: RLConfig,
    rollout: RolloutConfig,
    **start: Unpack[Start],
  ):
    check_batch(start["mesh"], config.questions_per_step, "rl.questions_per_step")
    self._kept = searches_kept(rollout)
    if config.resample and rollout.max_hops <= self._kept:
      raise ValueError(
        f"rl.resample = {config.resample} goes on behind search {self._kept}: set rollout.max_hops to "
        f"{self._kept + 1} or more"
      )
    sampling = rollout.sampling
    if sampling.temperature == 0 or sampling.top_k or sampling.top_p < 1:
      raise ValueError(
        f"reinforcement needs samples of the whole distribution, whose probabilities it moves; {sampling} cuts it: "
        "set temperature > 0, top_k 0 and top_p 1"
      )
    if config.control == "permuted" and len(own_rows(start["mesh"], config.questions_per_step)) < 2:
      raise ValueError(
        "the control permuted takes the answers of another question: each process needs two; set "
        "rl.questions_per_step >= 2 for one process"
      )
    super().__init__(name, partial(init_params, model), config, **start)
    self._model = model
    # a row for each trajectory, if none fits beside another, and as many in each micro-batch on each device
    self._n_rows = round_up(config.trajectories, config.accumulate * batch_shards(self._mesh))
    self._runner, self._config, self._rollout = runner, config, rollout
    self._alarm = CollapseAlarm(config.alarm)
    self._score_rewards = RolloutRewards(runner, config.reward, rollout.max_hops)
    self._reference = (start["params"],) if config.kl_weight else ()

  def batch(self, step: int) -> SearchBatch:
    """Return the questions of a step that this process asks, with the documents of all."""
    n = self._config.questions_per_step
    return self._runner.questions("train", np.arange(step * n, (step + 1) * n))

  def step(self, state: TrainState, batch: SearchBatch) -> tuple[TrainState, Mapping[str, Any]]:
    """Roll the questions out, reward the rollouts, and update the state with them."""
    config = self._config
    key, repeats = jax.random.fold_in(state.key, state.step), config.rollouts_per_question
    episodes = self._runner.run(state.params, batch, self._rollout, key, repeats=repeats, kind=config.retriever)
    scores = self._runner.score(episodes)
    rewards = self._rewards(episodes, scores)
    groups, shown = rewards.reshape(-1, repeats), None
    advantage, kept = self._advantages(groups)
    if config.experts:
      shown, earned = self._demonstrations(batch, episodes.host.tokens.shape[1])
      with_one, differs = self._advantages(np.append(groups, earned[:, None], axis=1))
      advantage = np.where(shown.kept[:, None], with_one[:, :repeats], advantage)
      kept = np.where(shown.kept, differs, kept)
      # one that is worse than the rollouts is left alone: its ratio is 1, and no clipping would bound its fall
      shown = shown._replace(advantages=np.maximum(with_one[:, -1], 0), kept=shown.kept & differs)
    told: dict[str, np.ndarray] = {"reward": rewards, "groups_kept": kept, **scores._asdict()}
    columns = advantage.reshape(-1), np.repeat(kept, repeats), self._pulled(scores)
    parts = [Trajectories.of(episodes.host, *columns), *([shown] if shown else [])]
    if config.resample:
      again, of_again, missed = self._try_again(state.params, episodes, scores, key)
      parts.append(Trajectories.of(again, *of_again))
      told["near_misses"] = missed
    rows = packed(parts, len(own_rows(self._mesh, self._n_rows)), config.accumulate)
    state, metrics = self._update(state, spread(rows, self._mesh), *self._reference)
    lengths = np.concatenate([part.lengths for part in parts if part.log_probs is not None])
    right = _right_tokens(episodes.host, scores.exact_match)
    told, right, lengths = gathered((told, right, lengths), self._mesh)
    means = {name: float(values.mean()) for name, values in told.items()} | _likelihood(*right)
    return state, {**metrics, **means, "tokens": float(lengths.sum())}  # of rollouts, which take longer than the update

  def _advantages(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute those of this process's questions; the mean that `reinforce` subtracts is of all processes' rollouts."""
    every = gathered(groups, self._mesh)
    own = own_rows(self._mesh, len(every))
    advantage, kept = advantages(every, self._config.advantage)
    return advantage[own], kept[own]

  def _pulled(self, scores: Scores) -> np.ndarray | None:
    return None if self._config.kl_on == "all" else scores.exact_match == 0

  def _try_again(
    self, params: Params, episodes: Episodes, scores: Scores, key: PRNGKey
  ) -> tuple[Rollout, tuple[Any, ...], np.ndarray]:
    """Let near misses go on behind the policy's first search, as groups of their own.

    Returns the rollouts, in host arrays; their advantages, whether they are kept, and whether they are pulled; and the
    questions with a near miss, bool [Q]. The other questions are only there for the shapes.
    """
    runner, config = self._runner, self._config
    rows, missed = near_misses(episodes, scores.exact_match, self._kept)
    prompts = behind_searches(episodes, rows, self._kept, self._width_behind(episodes.batch), runner.control)
    again = runner.run(
      params,
      prompts,
      self._bounds_behind,
      jax.random.fold_in(key, 1),
      repeats=config.resample,
      kind=config.retriever,
      seen=np.asarray(episodes.host.slots)[rows, : self._kept].reshape(len(rows), -1),
    )
    whole = as_whole(episodes, rows, self._kept, again, runner.control)
    scored = runner.score(whole)
    advantage, kept = self._advantages(self._rewards(whole, scored).reshape(-1, config.resample))
    columns = advantage.reshape(-1), np.repeat(kept & missed, config.resample), self._pulled(scored)
    return again.host, columns, missed

  @property
  def _bounds_behind(self) -> RolloutConfig:
    """The bounds of a rollout that goes on behind the policy's first search."""
    return dataclasses.replace(self._rollout, max_hops=self._rollout.max_hops - self._kept, first_query="policy")

  def _width_behind(self, batch: SearchBatch) -> int:
    """Return the tokens of a prompt that holds a rollout up to what the policy's first search found."""
    questions = Queries(batch.questions, batch.question_lengths)
    searches = searches_width(self._rollout, batch.corpus.tokens.shape[1], questions, self._kept)
    return batch.prompts.shape[1] + searches

  def watch(self, step: int, metrics: Mapping[str, float | None]) -> None:
    """Raise CollapseError if the policy has collapsed."""
    self._alarm.watch(step, metrics)

  def trace(self) -> dict[str, jax.stages.Traced]:
    """Trace the programs of a step, rollout and update, for the devices of the mesh, which need not exist."""
    config, state = self._config, self.abstract_state()
    batch, trace = self.batch(0), partial(self._runner.trace, state.params, kind=config.retriever)
    programs = {"rollout": trace(batch, self._rollout, repeats=config.rollouts_per_question)}
    done = programs["rollout"].out_info
    if config.resample:
      behind = batch._replace(prompts=np.zeros((len(batch.lengths), self._width_behind(batch)), np.int32))
      seen = np.zeros((len(batch.lengths), self._kept * self._rollout.documents_per_hop), np.int32)
      programs["again"] = trace(behind, self._bounds_behind, repeats=config.resample, seen=seen)
    shape, optional = (self._n_rows, done.tokens.shape[1]), {"pulled": config.kl_on == "wrong", "shown": config.experts}
    rows = Experience.empty(shape, done.log_probs.dtype, **optional)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    reference = (state.params,) if config.kl_weight else ()
    return programs | {"update": self._trace_update(rows, *reference)}

  def _demonstrations(self, batch: SearchBatch, width: int) -> tuple[Trajectories, np.ndarray]:
    return demonstrations(self._runner.task, batch, self._rollout.max_hops, width, self._score_rewards)

  def _count_tokens(self, batch: Experience) -> Array:
    return (batch.segment_ids > 0).sum()

  def _rewards(self, episodes: Episodes, scores: Scores) -> np.ndarray:
    config = self._config
    if config.control == "random_reward":
      drawn = [
        np.random.default_rng([self._seed, int(index)]).integers(2, size=episodes.repeats)
        for index in episodes.batch.indices
      ]
      return np.concatenate(drawn).astype(np.float32)
    if config.control == "permuted":
      order = np.roll(np.arange(len(episodes.batch.answers)), 1)
      scores = self._runner.score(episodes._replace(batch=permuted(episodes.batch, order)))
    return self._score_rewards(episodes, scores)

  def _loss(self, params: Params, batch: Experience, *reference: Params) -> LossSums:
    config, temperature = self._config, self._rollout.sampling.temperature
    log_probs_of = lambda p: sequence_log_probs(
      self._model, p, batch.tokens, batch.segment_ids, temperature=temperature
    )
    log_probs = log_probs_of(params)
    loss = partial(policy_loss, log_probs, clip_low=config.clip_low, clip_high=config.clip_high)
    sums = loss(
      batch.log_probs,
      batch.advantages,
      batch.rewarded,
      kl_weight=config.kl_weight,
      reference_log_probs_BxT=log_probs_of(reference[0]) if reference else None,
      kl_mask_BxT=batch.pulled,
    )
    if batch.shown is None:
      return sums
    # the policy did not write the demonstrations: there is no old probability, and the ratio stays at 1
    of_shown = loss(jax.lax.stop_gradient(log_probs), batch.advantages, batch.shown)
    return LossSums(sums.loss + of_shown.loss, sums.weight + of_shown.weight, sums.metrics)


def _right_tokens(rollout: Rollout, exact_match: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Sum the log-probabilities of each rollout's sampled tokens, and count them, if it answers right; [B] each."""
  counted = rollout.sampled & (exact_match > 0)[:, None]
  return np.where(counted, np.asarray(rollout.log_probs), 0).sum(axis=1), np.asarray(counted.sum(axis=1))


def _likelihood(sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
  """Return the mean log-probability of a sampled token of the rollouts that answer right; nothing if none does."""
  return {"right_log_prob": float(sums.sum() / counts.sum())} if counts.any() else {}
