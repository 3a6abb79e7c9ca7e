"""The engine against one forward pass over the whole text, and texts beside each other against texts alone."""

import dataclasses
import threading

import numpy as np
import pytest

from selfrag_jax.generate import batch
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.generation import GenerationSettings
from selfrag_jax.text.chat import COMPACT, render_for_completion
from tests.generate.models import PATTERNS, TOKENIZER, full_logits, greedy_by_full_forward, tiny

PROMPTS = ["a", "The port of Avalor", "x" * 40, "Where is it, and who asked? " * 3]
END = TOKENIZER.special["<|end|>"]
KINDS = sorted(PATTERNS)


def engine(kind="hybrid", **options):
  return Engine(tiny(kind), **options)


@pytest.fixture
def tokens_read(monkeypatch):
  """The numbers of tokens that engines read in this test, without those that they wrote."""
  counts, read = [], batch.SlotBatch.read

  def counted(self, row, ids):
    counts.append(len(ids))
    return read(self, row, ids)

  monkeypatch.setattr(batch.SlotBatch, "read", counted)
  return counts


@pytest.mark.parametrize("kind", KINDS)
def test_streams_batches_and_a_full_forward_write_the_same(kind):
  model = tiny(kind)
  expected = [greedy_by_full_forward(model, TOKENIZER.encode(prompt), 24, {END}) for prompt in PROMPTS]
  ours = engine(kind)
  rows, masks = ours.generate_batch(PROMPTS, max_new_tokens=24)
  for prompt, row, mask, written in zip(PROMPTS, rows, masks, expected, strict=True):
    ids = TOKENIZER.encode(prompt)
    assert row == ids + written
    assert mask == [0] * len(ids) + [1] * len(written)
    alone = engine(kind, read_tokens=7, prefix_cache_bytes=0)
    pieces = list(alone.generate(prompt, max_new_tokens=24))
    assert [piece.token for piece in pieces] == [*written, -1]
    assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(written, skip_special=True)


def test_log_probabilities_are_those_of_a_full_forward():
  (text,) = engine().submit("The port", max_new_tokens=6, temperature=0.7, top_k=5, seed=3)
  ids = text.wait().prompt[:]
  for token, log_prob in zip(text.tokens, text.log_probs, strict=True):
    logits = full_logits(tiny("hybrid"), ids).astype(np.float64)
    assert log_prob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)
    ids.append(token)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_one_prompt_are_those_of_separate_prompts_and_read_it_once(kind, tokens_read):
  draws = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 5}
  together = engine(kind, slots=2, prefix_cache_bytes=0).submit(PROMPTS[1], num_samples=4, **draws)
  ids = [generation.wait().tokens for generation in together]
  assert sum(tokens_read) == len(PROMPTS[1])
  separate = engine(kind, prefix_cache_bytes=0)
  assert ids == [separate.submit(PROMPTS[1], num_samples=n + 1, **draws)[n].wait().tokens for n in range(4)]
  assert len({tuple(row) for row in ids}) == 4


@pytest.mark.parametrize("has_thread", [False, True])
def test_samples_that_end_at_different_times_are_all_written(has_thread):
  ours = engine(slots=2)  # of three samples, one waits for a slot
  if has_thread:
    threading.Thread(target=ours.run, daemon=True).start()
  draws = {"max_new_tokens": 60, "temperature": 1.0, "seed": 1, "stop": ("a", "e", "1")}
  pieces = list(ours.generate("hello there", num_samples=3, **draws))
  ends = [i for i, piece in enumerate(pieces) if piece.token < 0]
  assert sorted(pieces[i].sample for i in ends) == [0, 1, 2]
  assert ends[0] < ends[1] - 1  # another wrote on
  ours.close()


def test_a_text_does_not_depend_on_its_neighbours():
  settings = [GenerationSettings(max_new_tokens=5 + n, temperature=n / 4, top_k=n, seed=n) for n in range(9)]
  ours = engine(slots=4)
  together = [ours.submit(PROMPTS[n % 4], each)[0] for n, each in enumerate(settings)]
  for n, each in enumerate(settings):
    assert together[n].wait().tokens == engine().submit(PROMPTS[n % 4], each)[0].wait().tokens
  assert ours.load() == {"active": 0, "waiting": 0}


def test_several_steps_a_program_write_the_same():
  draws = {"max_new_tokens": 13, "temperature": 0.8, "seed": 2}
  assert engine(steps=4).generate_batch(PROMPTS, **draws) == engine().generate_batch(PROMPTS, **draws)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_there_on(kind, tokens_read):
  ours = engine(kind)
  (first,) = ours.submit(PROMPTS[3], max_new_tokens=10)
  first.wait()
  longer = first.prompt + first.tokens + TOKENIZER.encode(" And then?")
  tokens_read.clear()
  (second,) = ours.submit(longer, max_new_tokens=10)
  assert second.wait().tokens == greedy_by_full_forward(tiny(kind), longer, 10, {END})
  assert second.reused == len(first.prompt + first.tokens)
  assert sum(tokens_read) == len(longer) - second.reused


def test_only_attention_reuses_a_part_of_an_earlier_prompt():
  other = PROMPTS[3][:40] + "! but otherwise"
  for kind in KINDS:
    ours = engine(kind)
    ours.submit(PROMPTS[3], max_new_tokens=4)[0].wait()
    (second,) = ours.submit(other, max_new_tokens=10)
    assert second.wait().tokens == greedy_by_full_forward(tiny(kind), second.prompt, 10, {END})
    assert second.reused == (40 if kind == "attention" else 0)


def test_the_same_prompt_again_is_not_read_at_all(tokens_read):
  ours = engine("attention")
  first = ours.submit(PROMPTS[3], max_new_tokens=9)[0].wait()
  tokens_read.clear()
  assert ours.submit(PROMPTS[3], max_new_tokens=9)[0].wait().tokens == first.tokens
  assert sum(tokens_read) == 0


def test_prefixes_stay_within_their_room():
  ours = engine(prefix_cache_bytes=200_000)
  for n in range(12):
    ours.submit(f"{n} " * 20, max_new_tokens=2)[0].wait()
    assert 0 < ours._prefixes.nbytes <= 200_000


def test_slots_grow_with_what_is_written_and_shrink_again():
  ours = engine(slots=16, prefix_cache_bytes=0)
  many = [ours.submit("abc", max_new_tokens=20)[0] for _ in range(9)]
  ours.step()
  assert len(ours._batch.occupants) == 16
  (long,) = ours.submit("x" * 300, max_new_tokens=200)
  for generation in [*many, long]:
    generation.wait()
  assert ours._batch._room == 512
  ours.submit("abc", max_new_tokens=3)[0].wait()
  assert (len(ours._batch.occupants), ours._batch._room) == (1, 512)
  assert ours.submit("abc", max_new_tokens=20)[0].wait().tokens == many[0].tokens


def test_an_end_a_length_and_a_stop_string_end_a_text():
  (text,) = engine().submit("abc", max_new_tokens=30)
  text.wait()
  assert text.finish_reason == "length"
  assert len(text.tokens) == 30
  stop = text.text[5:8]
  (cut,) = engine().submit("abc", max_new_tokens=30, stop=(stop, "never"))
  pieces = list(cut)
  assert cut.finish_reason == "stop"
  assert "".join(pieces) == cut.text == text.text[: text.text.index(stop)]


def test_a_cancelled_text_gives_its_slot_back_and_the_others_go_on():
  ours = engine(slots=2)
  first, second, third = (ours.submit(prompt, max_new_tokens=40)[0] for prompt in PROMPTS[:3])
  ours.step()
  first.cancel()
  assert third.wait().tokens == greedy_by_full_forward(tiny("hybrid"), third.prompt, 40, {END})
  assert first.finish_reason == "cancelled"
  assert second.wait().finish_reason == "length"
  for _ in ours.generate("abc", max_new_tokens=40):
    break  # whoever stops listening cancels
  assert not ours.step()
  assert ours.load() == {"active": 0, "waiting": 0}


def test_a_text_that_is_cancelled_alone_ends():
  (text,) = engine().submit("abc", max_new_tokens=40)
  text.cancel()
  assert text.wait().finish_reason == "cancelled"
  assert not text.tokens


def test_a_listener_that_fails_ends_its_text_alone():
  ours = engine(slots=2)
  (deaf,) = ours.submit("abc", max_new_tokens=40, listener=lambda piece: 1 / 0)
  (other,) = ours.submit(PROMPTS[0], max_new_tokens=40)
  assert other.wait().tokens == greedy_by_full_forward(tiny("hybrid"), other.prompt, 40, {END})
  assert (deaf.finish_reason, type(deaf.error), len(deaf.tokens)) == ("cancelled", ZeroDivisionError, 1)
  assert ours.load() == {"active": 0, "waiting": 0}


def test_a_conversation_is_the_prompt_of_its_template():
  conversation = {"messages": [{"role": "user", "content": "Who <|end|> asked?"}]}
  ours = engine()
  ids = render_for_completion(TOKENIZER, conversation, COMPACT)
  assert ids.count(END) == 0
  text = ours.generate_from_conversation(conversation, max_new_tokens=12)
  assert text == TOKENIZER.decode(greedy_by_full_forward(tiny("hybrid"), ids, 12, {END}), skip_special=True)


def test_threads_share_an_engine():
  ours, found = engine(slots=4), {}

  def write(n):
    found[n] = ours.submit(PROMPTS[n % 4], max_new_tokens=6 + n)[0].wait().tokens

  threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for n in range(8):
    assert found[n] == greedy_by_full_forward(tiny("hybrid"), TOKENIZER.encode(PROMPTS[n % 4]), 6 + n, {END})


def test_a_thread_of_its_own_serves_listeners():
  ours, pieces, done = engine(), [], threading.Event()
  thread = threading.Thread(target=ours.run)
  thread.start()

  def listen(piece):
    pieces.append(piece)
    if piece.token < 0:
      done.set()

  ours.submit("abc", max_new_tokens=5, listener=listen)
  assert done.wait(60)
  ours.close()
  thread.join(10)
  assert not thread.is_alive()
  assert [piece.token for piece in pieces[:-1]] == greedy_by_full_forward(tiny("hybrid"), TOKENIZER.encode("abc"), 5)
  with pytest.raises(RuntimeError, match="closed"):
    ours.submit("abc")


def test_an_error_of_the_device_ends_what_is_written_and_the_engine_goes_on(monkeypatch):
  ours = engine(slots=1)
  running, waiting = (ours.submit(prompt, max_new_tokens=5)[0] for prompt in PROMPTS[:2])
  with monkeypatch.context() as patch:
    patch.setattr(batch, "_write", lambda *_, **__: 1 / 0)
    ours.step()
  with pytest.raises(ZeroDivisionError):
    running.wait()
  assert waiting.wait().tokens == greedy_by_full_forward(tiny("hybrid"), waiting.prompt, 5, {END})


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"prompt": ""}, "empty"),
    ({"prompt": "x" * 500, "max_new_tokens": 13}, "500 tokens and max_new_tokens = 13 .* 512"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"num_samples": 0}, "num_samples"),
    ({"stop": ("",)}, "stop is"),
    ({"stop": "end"}, "list of texts"),
    ({"tools": ["search"]}, "tools"),
    ({"schema": {"type": "nonsense"}}, "schema"),
    ({"prompt": [1, 10**6]}, "token id"),
  ],
)
def test_wrong_requests_are_refused_before_the_work(options, message):
  with pytest.raises(ValueError, match=message):
    engine().submit(**{"prompt": "abc", **options})


def test_a_model_without_a_tokenizer_is_refused():
  with pytest.raises(ValueError, match="tokenizer"):
    Engine(dataclasses.replace(tiny("hybrid"), tokenizer=None))
