"""Config sections: they become checked dataclasses, or an error that says how to mend them."""

import dataclasses
from collections.abc import Mapping

import ml_collections
import numpy as np
import pytest

from selfrag_jax.experiments.documents import DocumentsConfig
from selfrag_jax.experiments.self_rag import FactsData, TextFiles
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.settings import full_config, read_config, settings
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.refrag import RLConfig
from selfrag_jax.train.phases.sft import SFTConfig


def test_numpy_scalars_become_python_values():
  config = SelfRAGConfig(top_k=np.int64(3), contrastive_weight=np.float32(0.5))
  assert (type(config.top_k), type(config.contrastive_weight)) == (int, float)
  assert config == SelfRAGConfig(top_k=3, contrastive_weight=0.5)
  with pytest.raises(ValueError, match="top_k is 0; it must be a whole number, at least 1"):
    SelfRAGConfig(top_k=np.int64(0))
  with pytest.raises(ValueError, match="top_k is True"):
    SelfRAGConfig(top_k=np.bool_(True))


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
    ({"accumulate": 0}, r"config\.sft\.accumulate is 0; it must be a whole number, at least 1"),
    ({"steps": 0}, r"config\.sft\.steps is 0; it must be a whole number, at least 1"),
    ({"steps": 2.5}, r"config\.sft\.steps is 2\.5; it must be a whole number"),
    ({"steps": True}, r"config\.sft\.steps is True; it must be a whole number"),
    ({"steps": None}, r"config\.sft\.steps is None; it must be a whole number"),
    ({"steps": 10**30}, r"config\.sft\.steps is 1e\+30; it must be a whole number, at least 1 and at most 2147483647"),
    ({"optimizer": 3}, r"config\.sft\.optimizer is 3; it must be a section"),
    (
      {"optimizer": {"learning_rate": float("nan")}},
      r"config\.sft\.optimizer\.learning_rate is nan; it must be a finite number, at least 0",
    ),
    ({"optimizer": {"learning_rate": 10**400}}, r"learning_rate is 1e\+300; it must be a finite number"),
    ({"optimizer": {"b1": 1.0}}, r"config\.sft\.optimizer\.b1 is 1\.0; it must be .* at least 0 and less than 1"),
  ],
)
def test_a_mistake_is_named_with_what_fits(section, message):
  with pytest.raises(ValueError, match=message):
    settings(SFTConfig, section, "sft")


def test_reinforcement_needs_siblings():
  with pytest.raises(
    ValueError, match=r"config\.rl\.rollouts_per_question is 1; it must be a whole number, at least 2"
  ):
    settings(RLConfig, {"rollouts_per_question": 1}, "rl")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"keep_checkpoints": 0}, "keep_checkpoints is 0; it must be a whole number, at least 1"),
    ({"checkpoint_every": -1}, "checkpoint_every is -1; it must be a whole number, at least 0"),
    ({"preempted_exit_code": 300}, "preempted_exit_code is 300; it must be a whole number, at least 0 and at most 255"),
  ],
)
def test_settings_made_in_python_are_checked_too(change, message):
  assert LoopConfig(checkpoint_every=0).checkpoint_every == 0
  with pytest.raises(ValueError, match=message):
    LoopConfig(**change)


def test_a_list_is_checked_item_by_item():
  with pytest.raises(ValueError, match=r"config\.documents\.n_documents is 0; it must be a whole number, at least 1"):
    settings(DocumentsConfig, {"n_documents": (5, 0)}, "documents")
  for value in ((), 5, "5"):
    with pytest.raises(ValueError, match=r"n_documents is .*; it must be a list of at least one, each a whole number"):
      settings(DocumentsConfig, {"n_documents": value}, "documents")


def test_what_no_type_says_is_still_a_number():
  config = {"seed": 1, "retrievers": {"mine": {"weights": (0.5, float("inf"))}}}
  with pytest.raises(ValueError, match=r"config\.retrievers\.mine\.weights is inf; it must be a finite number"):
    read_config(config, {"seed": int})
  with pytest.raises(ValueError, match="the config has no 'mesh'; it needs seed, mesh"):
    read_config(config, {"seed": int, "mesh": tuple})


@pytest.mark.parametrize("name", [[], {}, [None], None, 3, "textt"])
def test_a_section_of_several_kinds_is_chosen_by_a_name(name):
  with pytest.raises(ValueError, match=r"config\.data\.name is .*; one of facts, text"):
    read_config({"data": {"name": name}}, {"data": {"facts": FactsData, "text": TextFiles}})


@pytest.mark.parametrize("kinds", [-1, 5, 1.5, True, None, "text", {4: 4}, [], [4], [(0,)]])
def test_lists_of_facts_that_are_none_are_named(kinds):
  section = {"name": "facts", "variant": "kv", "n_facts": 4, "n_questions": 1, "text": kinds, "seed": 0}
  with pytest.raises(ValueError, match=r"config\.data.*text"):
    settings(FactsData, section, "data")


def test_settings_cannot_be_changed():
  with pytest.raises(AttributeError):
    LoopConfig().log_every = 3  # type: ignore[misc]


SECTIONS = {"seed": int, "data": {"facts": FactsData, "text": TextFiles}, "loop": LoopConfig, "model": Mapping}
DIFFERENCES = {
  "experiment": "x",
  "workdir": "runs/x",
  "seed": 3,
  "data": {"name": "facts", "text": ({"n_facts": 4},)},
  "model": {"d_model": 8},
}


def test_a_full_config_has_every_key_and_what_differs():
  config = full_config(SECTIONS, {**DIFFERENCES, "loop": {"log_every": 7}}, left_out=("data.n_questions",))
  loop = {"checkpoint_every": 50, "keep_checkpoints": 2, "eval_every": 0, "log_every": 7, "preempted_exit_code": 143}
  loop |= {"profile_steps": ()}
  assert config.loop.to_dict() == loop
  assert config.model.to_dict() == {"d_model": 8}  # no dataclass: as it was given
  text = ({"n_facts": 4, "last": None, "alike": False, "variant": None},)
  assert config.data.to_dict() == {"name": "facts", "variant": "kv", "n_facts": 128, "seed": 0, "text": text}
  assert full_config(SECTIONS, DIFFERENCES).loop.to_dict() == dataclasses.asdict(LoopConfig())
  assert read_config(config.to_dict(), SECTIONS)["seed"] == 3


def test_the_steps_of_a_profile_have_a_short_name_and_one_value():
  config = full_config(SECTIONS, DIFFERENCES)
  config.profile_steps = (10, 13)
  runs = ml_collections.ConfigDict({"runs": {"one": config}}).to_dict()["runs"]  # as in a sweep
  for made in (config.to_dict(), runs["one"]):
    assert made["profile_steps"] == made["loop"]["profile_steps"] == (10, 13)
  read = read_config(config.to_dict(), SECTIONS)
  assert read["loop"]["profile_steps"] == (10, 13)
  assert "profile_steps" not in read
  without = {"seed": int}
  assert "profile_steps" not in full_config(without, {"experiment": "x", "workdir": "y", "seed": 1})


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"lop": {}}, "the config has no 'lop'; did you mean loop?"),
    ({"loop": {"log_evry": 3}}, r"config\.loop has no 'log_evry'; did you mean loop\.log_every\?"),
    ({"loop": {"log_every": -1}}, r"config\.loop\.log_every is -1"),
    ({"data": {"name": "facts"}}, r"config\.data\.text is missing"),
    ({"data": {"name": "web"}}, r"config\.data\.name is 'web'; one of facts, text"),
    ({"seed": None}, "the config has no 'seed', which has no default"),
  ],
)
def test_a_mistake_in_what_differs_is_named(change, message):
  differences = {key: value for key, value in {**DIFFERENCES, **change}.items() if value is not None}
  with pytest.raises(ValueError, match=message):
    full_config(SECTIONS, differences)
