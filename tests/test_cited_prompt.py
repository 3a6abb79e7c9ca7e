"""Prompts with documents: what is shown when not everything fits into the context."""

import pytest

from selfrag_jax import BM25Retriever, Document
from selfrag_jax.answers import answer
from selfrag_jax.cited_prompt import Source, make_prompt
from selfrag_jax.text.chat import CHATML, COMPACT
from tests.scripted_engine import ScriptedEngine

FOUND = [Source(n, f"Sentence one of {n}. " + f"Word {n} again. " * 10, f"Title {n}") for n in (1, 2, 3)]
TURNS = [{"role": role, "content": f"{role} {n} says " + "x" * 100} for n in range(4) for role in ("user", "assistant")]


def prompt(room, found=FOUND, history=(), question="who?", documents_as=None, template=CHATML):
  """Make a prompt in a context of `room` tokens beside an answer of 10; a token is a byte here."""
  engine = ScriptedEngine(context_tokens=room + 10, template=template)
  made = make_prompt(engine, question, history, found, 10, documents_as)
  assert len(made.ids) <= room
  return made, engine.tokenizer.decode(made.ids)


WHOLE = len(prompt(10_000)[0].ids)


def test_everything_is_shown_if_it_fits():
  made, _ = prompt(WHOLE)
  assert (made.shown, made.dropped, made.forgotten) == (FOUND, 0, 0)


def test_the_last_document_is_shown_in_part_and_told():
  made, text = prompt(WHOLE - 1)
  *first, last = made.shown
  assert first == FOUND[:2]
  assert last.is_cut
  assert last.text.endswith("Word 3 again. …")
  assert FOUND[2].text.startswith(last.text.removesuffix(" …"))
  assert last.text in text
  assert made.dropped == 0


@pytest.mark.parametrize("room", range(WHOLE, WHOLE - 450, -7))
def test_documents_are_left_out_from_the_end_in_any_context(room):
  made, text = prompt(room)
  n = len(made.shown)
  assert made.dropped == 3 - n
  assert n >= 1
  assert made.shown[: n - 1] == FOUND[: n - 1]
  assert all(source.is_cut or source in FOUND for source in made.shown)
  for source in FOUND:
    assert (f"[{source.number}] Title" in text) == (source.number <= n)
  # a document more, or a sentence more, would not have fitted
  if n < 3 and not made.shown[-1].is_cut:
    assert len(made.ids) + len(f"\n\n[{n + 1}] Title {n + 1}\nSentence one of {n + 1}. …".encode()) > room


def test_the_first_document_is_cut_within_a_sentence_if_it_has_to_be():
  for text, part in (("word " * 100, "word …"), ("x" * 500, "x …"), ("日本" * 100, "日 …")):
    least = len(prompt(10_000, [Source(1, "")])[0].ids)
    made, _ = prompt(least + len(part.encode()), [Source(1, text), *FOUND[1:]])
    [source] = made.shown
    assert source.text == part
    assert made.dropped == 2
  with pytest.raises(ValueError, match=r"no word of the documents fits into the .* tokens of the context"):
    prompt(least, FOUND)


def test_the_oldest_turns_are_left_out_first():
  made, text = prompt(WHOLE + 400, history=TURNS)
  assert made.forgotten
  assert made.forgotten % 2 == 0  # what is left begins with a turn of the user
  assert [turn["content"] in text for turn in TURNS] == [i >= made.forgotten for i in range(len(TURNS))]
  assert sum(len(turn["content"]) for turn in TURNS[made.forgotten :]) < (WHOLE + 400) / 2
  assert prompt(WHOLE + 4000, history=TURNS)[0].forgotten == 0
  alone, _ = prompt(800, found=[], history=TURNS)
  assert 0 < alone.forgotten < 4  # without documents the turns have all of the room


def test_the_system_message_of_a_history_stays():
  system = {"role": "system", "content": "Speak like a pirate."}
  made, text = prompt(WHOLE + 100, history=[system, *TURNS])
  assert made.forgotten >= 6
  assert text.startswith("<|im_start|>system\nSpeak like a pirate.\n\nAnswer the question from the numbered")
  assert prompt(9999, found=[], history=[system])[1].startswith("<|im_start|>system\nSpeak like a pirate.<|im_end|>")


def test_a_question_that_does_not_fit_is_an_error_with_the_numbers():
  with pytest.raises(
    ValueError, match=r"the question has 1,\d+ tokens .* max_new_tokens = 10 .* the 800 of the context"
  ):
    prompt(790, question="who? " * 200)


def test_a_retrieval_message_has_no_more_documents_than_tokens_for_them():
  many = [Source(n, f"text {n}") for n in range(1, 21)]
  made, text = prompt(10_000, many, template=COMPACT)
  assert len(made.shown) == 16
  assert made.dropped == 4
  assert "[DOC_16]text 16[/DOC_16][RETRIEVAL_END]<|user|>who?<|assistant|>" in text
  assert "numbered" not in text
  _, text = prompt(10_000, FOUND, documents_as="tokens")
  assert "<|im_start|>retrieval\n[RETRIEVAL_START][DOC_1]Title: Title 1\nContent: Sentence one" in text
  _, text = prompt(10_000, FOUND, documents_as="text", template=COMPACT)
  assert "[1] Title 1\nSentence one" in text


def test_an_answer_tells_what_was_left_out():
  retriever = BM25Retriever()
  retriever.add_documents([Document(str(n), content="ships " + "x " * 200) for n in range(3)])
  found = answer("ships", retriever, ScriptedEngine("Yes.", context_tokens=1200), history=TURNS, max_new_tokens=10)
  assert found.dropped + len(found.sources) == 3
  assert found.dropped
  assert found.forgotten
