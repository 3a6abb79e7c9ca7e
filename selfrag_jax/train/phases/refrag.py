"""REFRAG: reinforcement learning of *how to search*, on rollouts whose retrieval runs inside the compiled decode loop.

A step rolls every question out several times, rewards the answers, and moves the probability of the sampled tokens by
the advantage of their rollout over its siblings. Prompt, retrieved and forced tokens carry no loss.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.checked import Checked, Count, Natural, Range, Share, Weight
from selfrag_jax.generate.rollout import Queries, Rollout, RolloutConfig, searches_width
from selfrag_jax.mesh import check_batch, gathered, own_rows, spread
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.lm import init_params
from selfrag_jax.tasks.rewards import RewardConfig
from selfrag_jax.tasks.search_task import SearchBatch, permuted
from selfrag_jax.train.alarm import AlarmConfig, CollapseAlarm
from selfrag_jax.train.experts import Experts, demonstrations
from selfrag_jax.train.losses import Advantage, advantages, policy_loss
from selfrag_jax.train.near_misses import as_whole, behind_searches, near_misses, searches_kept
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.base import GradientPhase, Start, check_split
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
    check_split(self.rows, self.accumulate, "the number of rollouts")
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
    if self.experts:
      check_split(self.questions_per_step, self.accumulate, "with experts, questions_per_step")

  @property
  def rows(self) -> int:
    """The number of rollouts of a step."""
    return self.questions_per_step * (self.rollouts_per_question + self.resample)


class Experience(NamedTuple):
  """Rollouts as the update reads them: `advantages` float32 [B], the other arrays as in `Rollout`.

  `kept` bool [B]: the rewards of its group differ. `pulled` bool [B]: the KL acts on it; None: on what is kept.
  """

  advantages: Array
  kept: Array
  pulled: Array | None
  lengths: Array
  log_probs: Array
  sampled: Array
  tokens: Array
  experts: Experts | None = None


class Refrag(GradientPhase):
  """The phase. It starts from `params`, a policy that knows the format; `evaluate_policy(params)` scores rollouts."""

  best_metric = "exact_match"

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
    check_batch(start["mesh"], config.rows // config.accumulate, "rollouts of a step / rl.accumulate")
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
    if config.resample:
      again, of_again, missed = self._try_again(state.params, episodes, scores, key)
      experience = _stacked(_experience(episodes.host, *columns), _experience(again, *of_again))._replace(experts=shown)
      told["near_misses"] = missed
    else:
      experience = _experience(episodes.rollout, *columns, shown)
    rows = spread(experience, self._mesh)
    state, metrics = self._update(state, rows, *self._reference)
    told, right = gathered((told, _right_tokens(episodes.host, scores.exact_match)), self._mesh)
    means = {name: float(values.mean()) for name, values in told.items()} | _likelihood(*right)
    return state, {**metrics, **means, "tokens": self._count(rows)}

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
    of_rows = lambda dtype, *shape: jax.ShapeDtypeStruct((config.rows, *shape), dtype)
    columns: list[Any] = [of_rows(np.float32), of_rows(np.bool_), None if config.kl_on == "all" else of_rows(np.bool_)]
    if config.experts:
      columns.append(self._demonstrations(batch, done.tokens.shape[1])[0])
    reference = (state.params,) if config.kl_weight else ()
    rows = jax.tree.map(lambda x: of_rows(x.dtype, *x.shape[1:]), done)
    return programs | {"update": self._trace_update(_experience(rows, *columns), *reference)}

  def _demonstrations(self, batch: SearchBatch, width: int) -> tuple[Experts, np.ndarray]:
    return demonstrations(self._runner.task, batch, self._rollout.max_hops, width, self._score_rewards)

  def _count_tokens(self, batch: Experience) -> Array:
    return batch.lengths.sum()

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
    tokens = batch.tokens
    temperature = self._rollout.sampling.temperature
    log_probs = lambda p: sequence_log_probs(
      self._model, p, tokens, lengths_B=jnp.asarray(batch.lengths), temperature=temperature
    )
    sums = policy_loss(
      log_probs(params),
      batch.log_probs,
      batch.advantages,
      batch.sampled & batch.kept[:, None],
      clip_low=self._config.clip_low,
      clip_high=self._config.clip_high,
      kl_weight=self._config.kl_weight,
      reference_log_probs_BxT=log_probs(reference[0]) if reference else None,
      kl_mask_BxT=None if batch.pulled is None else batch.sampled & batch.pulled[:, None],
    )
    return sums if batch.experts is None else _added(sums, self._loss_of_experts(params, batch.experts))

  def _loss_of_experts(self, params: Params, batch: Experts) -> LossSums:
    """Move the probability of the demonstrations by their advantage.

    The policy did not write them: there is no old probability, and the ratio stays at 1.
    """
    config, (advantage, kept, lengths, sampled, tokens) = self._config, map(jnp.asarray, batch)
    temperature = self._rollout.sampling.temperature
    log_probs = sequence_log_probs(self._model, params, tokens, lengths_B=lengths, temperature=temperature)
    old, mask = jax.lax.stop_gradient(log_probs), sampled & kept[:, None]
    return policy_loss(log_probs, old, advantage, mask, clip_low=config.clip_low, clip_high=config.clip_high)


def _stacked(one: Any, other: Any) -> Any:
  """Join trees of host arrays along their rows."""
  return jax.tree.map(lambda *rows: np.concatenate(rows), one, other)


def _right_tokens(rollout: Rollout, exact_match: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Sum the log-probabilities of each rollout's sampled tokens, and count them, if it answers right; [B] each."""
  counted = rollout.sampled & (exact_match > 0)[:, None]
  return np.where(counted, np.asarray(rollout.log_probs), 0).sum(axis=1), np.asarray(counted.sum(axis=1))


def _likelihood(sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
  """Return the mean log-probability of a sampled token of the rollouts that answer right; nothing if none does."""
  return {"right_log_prob": float(sums.sum() / counts.sum())} if counts.any() else {}


def _added(sums: LossSums, others: LossSums) -> LossSums:
  """Add losses; the metrics are those of the first."""
  return LossSums(sums.loss + others.loss, sums.weight + others.weight, sums.metrics)


def _experience(rollout: Rollout, advantages: Any, kept: Any, pulled: Any, experts: Any = None) -> Experience:
  columns = rollout.lengths, rollout.log_probs, rollout.sampled, rollout.tokens
  return Experience(advantages, kept, pulled, *columns, experts)
