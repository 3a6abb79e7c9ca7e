"""Config sections become checked dataclasses, or an error that says what to write instead."""

import pytest

from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.settings import LoopConfig, RLConfig, SFTConfig, settings


def test_sections_nest_and_defaults_fill_up():
  got = settings(SFTConfig, {"steps": 3, "optimizer": {"name": "muon", "learning_rate": 0.1}}, "sft")
  assert got == SFTConfig(steps=3, optimizer=OptimizerConfig(name="muon", learning_rate=0.1))


@pytest.mark.parametrize(
  ("section", "message"),
  [
    ({"stepz": 3}, r"config\.sft has no 'stepz'; did you mean sft\.steps\?"),
    ({"wumbo": 3}, r"config\.sft has no 'wumbo'; it has steps, batch_size"),
    (
      {"optimizer": {"warmup": 3}},
      r"config\.sft\.optimizer has no 'warmup'; did you mean sft\.optimizer\.warmup_steps\?",
    ),
    ({"demonstrations": "golden"}, r"config\.sft\.demonstrations is 'golden'; one of random, gold"),
    ({"optimizer": {"name": "lion"}}, r"config\.sft\.optimizer\.name is 'lion'; one of adamw, muon"),
    ({"batch_size": 6, "accumulate": 4}, "batch_size 6 is not divisible by accumulate 4"),
    ({"accumulate": 0}, "batch_size 64 is not divisible by accumulate 0"),
  ],
)
def test_a_mistake_is_named_with_what_fits(section, message):
  with pytest.raises(ValueError, match=message):
    settings(SFTConfig, section, "sft")


def test_reinforcement_needs_siblings_and_whole_micro_batches():
  with pytest.raises(ValueError, match="rollouts_per_question is 1; comparing them takes at least 2"):
    settings(RLConfig, {"rollouts_per_question": 1}, "rl")
  with pytest.raises(ValueError, match="the number of rollouts 6 is not divisible by accumulate 4"):
    settings(RLConfig, {"questions_per_step": 3, "rollouts_per_question": 2, "accumulate": 4}, "rl")


def test_settings_cannot_be_changed():
  with pytest.raises(AttributeError):
    LoopConfig().log_every = 3  # type: ignore[misc]
