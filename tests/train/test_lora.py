"""LoRA: adapted and merged models are the same, only updates are trained, and a workdir gives the merged model."""

import shutil
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import load_model
from selfrag_jax.train.loop import LoopConfig, read_ended, train
from selfrag_jax.train.lora import LoRAConfig, init_updates, join, merge
from selfrag_jax.train.losses import masked_lm_loss
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.conversations import ConversationConfig, ConversationPhase

TOKENIZER = ByteTokenizer()
LORA = LoRAConfig(rank=3, alpha=6.0)
PROJECTIONS = {"T": {"q", "k", "v", "o", "gate", "up", "down"}, "M": {"in_proj", "out_proj"}}
LOOP = LoopConfig(checkpoint_every=2)


def model(pattern, **fields):
  return ModelConfig(
    vocab_size=TOKENIZER.vocab_size, d_model=16, n_layers=len(pattern), n_heads=4, n_kv_heads=2, head_dim=4,
    block_pattern=pattern, mlp_dim=32, ssm_state=8, ssm_head_dim=8, ssm_chunk=8, init_scale=0.2, **fields,
  )  # fmt: skip


def drawn(config, seed=0):
  """Parameters and updates; `up` is drawn too, since the updates begin as zero."""
  init = partial(init_params, config)
  params, updates = nn.unbox(init(jax.random.key(seed))), init_updates(init, LORA.rank, jax.random.key(seed + 1))
  noise = iter(jax.random.split(jax.random.key(seed + 2), 1000))
  is_up = lambda path: path[-1].key == "up"
  draw = lambda path, x: jax.random.normal(next(noise), x.shape, x.dtype) * 0.3 if is_up(path) else x
  return params, jax.tree_util.tree_map_with_path(draw, updates)


def hidden(config, params):
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
  segment_ids = np.repeat([[1] * 10 + [2] * 14, [1] * 20 + [0] * 4], 1, axis=0)
  return np.asarray(LM(config).apply(params, tokens, segment_ids))


@pytest.mark.parametrize("pattern", ["TT", "MM", "TMTM"])
def test_an_adapted_model_is_the_merged_one(pattern):
  config = model(pattern)
  params, updates = drawn(config)
  plain, joined = hidden(config, params), hidden(config, join(params, updates, LORA))
  merged = merge(params, updates, LORA)
  np.testing.assert_allclose(joined, hidden(config, merged), atol=1e-4)
  assert np.abs(joined - plain).max() > 0.1
  assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, params)
  start = init_updates(partial(init_params, config), LORA.rank, jax.random.key(1))
  np.testing.assert_array_equal(hidden(config, join(params, start, LORA)), plain)


@pytest.mark.parametrize("pattern", ["TT", "MM", "TMTM"])
def test_every_projection_is_adapted_and_nothing_else(pattern):
  config = model(pattern)
  params, updates = drawn(config)
  before, after = flatten_dict(params["params"]), flatten_dict(merge(params, updates, LORA)["params"])
  changed = {path for path in before if not np.array_equal(before[path], after[path])}
  assert {path[-1] for path in changed} == set().union(*(PROJECTIONS[kind] for kind in pattern))
  assert changed == {path[:-1] for path in flatten_dict(updates)}
  factors = flatten_dict(updates)
  for path in changed:  # W + alpha / r * down up (equation 3 of the paper), in float64, layer by layer
    down, up = (np.asarray(factors[(*path, part)], np.float64) for part in ("down", "up"))
    for layer in range(len(down)):
      difference = np.asarray(after[path][layer], np.float64) - np.asarray(before[path][layer], np.float64)
      product = np.einsum("ir,ro->io", down[layer], up[layer]) * (6.0 / 3)
      np.testing.assert_allclose(difference.reshape(product.shape), product, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_are_those_through_the_merged_weights(remat):
  config = model("TM", remat=remat)
  params, updates = drawn(config)
  tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 16))
  batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "mask": np.ones(tokens.shape, bool)}
  loss = lambda variables: masked_lm_loss(config, variables, batch).loss
  ours = jax.grad(lambda updates: loss(join(params, updates, LORA)))(updates)
  through = jax.grad(lambda updates: loss(merge(params, updates, LORA)))(updates)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), ours, through)


def render(index):
  ids = TOKENIZER.encode(f"{index % 7} and {index % 7}")
  return ids, [1] * len(ids)


def phase(params, *, name="rag", lora=LORA, steps=4, mesh=None, accumulate=1):
  rates = OptimizerConfig(learning_rate=3e-2)
  config = ConversationConfig(
    steps=steps, batch_size=8, max_tokens=32, lora=lora, optimizer=rates, accumulate=accumulate
  )
  mesh = mesh or make_mesh(1, 1, 1, jax.devices()[:1])
  pad = TOKENIZER.special["<|pad|>"]
  start = {"mesh": mesh, "seed": 0, "params": params, "evaluate": lambda params: {"norm": norm(params)}}
  return ConversationPhase(name, render, None, pad, model("TM"), config, **start)


def norm(params):
  return float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(params)))


def run_steps(phase):
  state, losses = phase.initial_state(), []
  for batch in phase.batches(0):
    state, metrics = phase.step(state, batch)
    losses.append(float(metrics["loss"]))
  return state, losses


def test_only_updates_are_trained():
  params, _ = drawn(model("TM"))
  before = jax.tree.map(np.array, params)
  tuned = phase(params, steps=30)
  state, losses = run_steps(tuned)
  jax.tree.map(np.testing.assert_array_equal, params, before)
  sizes = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  assert sizes(state.params) < sizes(params) / 2
  assert sizes(state.opt_state) < 2.1 * sizes(state.params)
  assert losses[-1] < 0.7 * losses[0]
  merged = tuned.model_params(state.params)
  assert tuned.evaluate(state) == {"norm": norm(merged)}
  batch = jax.tree.map(jnp.asarray, tuned.batch(0))
  loss = lambda params: float(masked_lm_loss(model("TM"), params, batch).loss / batch["mask"].sum())
  assert loss(merged) < 0.8 * loss(params)


def test_micro_batches_and_eight_devices_give_the_same_updates():
  params, _ = drawn(model("TM"))
  one = run_steps(phase(params))
  for other in (phase(params, accumulate=2), phase(params, mesh=make_mesh(2, 2, 2))):
    state, losses = run_steps(other)
    np.testing.assert_allclose(losses, one[1], rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), state.params, one[0].params)
  assert "update" in phase(None, mesh=make_mesh(2, 2, 2)).trace()  # a plan needs no model


def test_a_workdir_gives_the_merged_model(tmp_path):
  said = {"model": model("TM").to_dict(), "tokenizer": {"name": "bytes", "fingerprint": TOKENIZER.fingerprint}}
  first = phase(None, name="pretrain", lora=LoRAConfig())
  params = train(first, tmp_path, LOOP, said).params
  tuned, metadata = phase(params), {**said, "origin": {"phase": "pretrain", "steps": 4}}
  merged = tuned.model_params(train(tuned, tmp_path, LOOP, metadata).params)
  for found in (load_model(tmp_path).params, read_ended(phase(params), tmp_path, metadata)):
    jax.tree.map(np.testing.assert_array_equal, found, merged)
  assert norm(merged) != norm(params)
  with pytest.raises(ValueError, match="another lora"):
    train(phase(params, lora=LoRAConfig(rank=3, alpha=7.0), steps=6), tmp_path, LOOP, metadata)
  other, _ = drawn(model("TM"), seed=7)
  for refused in (
    lambda: train(phase(other, steps=6), tmp_path, LOOP, metadata),
    lambda: read_ended(phase(other), tmp_path, metadata),
  ):
    with pytest.raises(ValueError, match="another lora"):
      refused()
  with pytest.raises(ValueError, match="use another workdir"):
    read_ended(phase(params, lora=LoRAConfig()), tmp_path, metadata)


def test_a_workdir_whose_first_model_has_changed_is_refused(tmp_path):
  said = {"model": model("TM").to_dict(), "tokenizer": {"name": "bytes", "fingerprint": TOKENIZER.fingerprint}}
  params = train(phase(None, name="pretrain", lora=LoRAConfig()), tmp_path, LOOP, said).params
  train(phase(params), tmp_path, LOOP, {**said, "origin": {"phase": "pretrain", "steps": 4}})
  shutil.rmtree(tmp_path / "checkpoints" / "pretrain")
  train(phase(drawn(model("TM"), seed=7)[0], name="pretrain", lora=LoRAConfig()), tmp_path, LOOP, said)
  with pytest.raises(ValueError, match="holds updates of another model"):
    load_model(tmp_path)


def test_updates_whose_first_model_is_gone_name_it(tmp_path):
  said = {"model": model("TM").to_dict(), "tokenizer": {"name": "bytes", "fingerprint": TOKENIZER.fingerprint}}
  params, _ = drawn(model("TM"))
  train(phase(params), tmp_path / "run", LOOP, {**said, "config": {"init": str(tmp_path / "gone")}})
  with pytest.raises(FileNotFoundError, match=r"run holds updates of the model .*gone, which is not found"):
    load_model(tmp_path / "run")


def test_there_must_be_a_model_to_adapt():
  with pytest.raises(ValueError, match=r"rag\.lora\.rank = 3 needs a model to adapt"):
    run_steps(phase(None))


def layers_of(modules, which):
  return np.stack([getattr(module, which)["default"].weight.detach().numpy().T for module in modules])


def test_updates_are_those_of_peft(tmp_path):
  """The same adapters in a Llama of transformers and in ours give the same logits."""
  torch.manual_seed(0)
  sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
  llama = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **sizes))
  llama.save_pretrained(tmp_path)
  names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj"}
  names["down"] = "down_proj"
  theirs = get_peft_model(llama, LoraConfig(r=3, lora_alpha=6, target_modules=list(names.values())))
  with torch.no_grad():
    for name, parameter in theirs.named_parameters():
      if "lora_" in name:
        parameter.normal_(0, 0.2)
  loaded = load_pretrained(tmp_path)
  layer = loaded.params["params"]["segments_0"]["layer_0"]
  updates = {"mixer": {}, "mlp": {}}
  for part, block in (("mixer", "self_attn"), ("mlp", "mlp")):
    for ours in layer[part].keys() & names.keys():
      factors = [getattr(each, block).get_submodule(names[ours]) for each in theirs.model.model.layers]
      updates[part][ours] = {"down": layers_of(factors, "lora_A"), "up": layers_of(factors, "lora_B")}
  variables = join(loaded.params, {"segments_0": {"layer_0": updates}}, LORA)
  tokens = np.random.default_rng(0).integers(0, 61, (2, 12))
  apply = LM(loaded.config).apply
  ours = np.asarray(apply(variables, apply(variables, tokens), method="logits"))[..., :61]
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  np.testing.assert_allclose(ours, expected, atol=1e-4)
