"""Which sentences say that there is no answer."""

import time

import pytest

from selfrag_jax.metrics.abstention import says_unknown


@pytest.mark.parametrize(
  "sentence",
  [
    "I do not know.",
    "I don’t know the answer.",
    "Sorry, I do not know.",
    "I'm sorry, but I cannot find the answer in the documents.",
    "I do not have enough information to answer.",
    "We don't know.",
    "I couldn't find it.",
    "The documents do not mention Ada.",
    "The provided documents do not contain information about this.",
    "The text does not say.",
    "None of the documents says where.",
    "No document mentions it.",
    "There is no information about the king.",
    "Based on the documents, I cannot answer.",
    "The birthplace of Ada is not mentioned in the documents.",
    "The answer is not stated.",
    "Not mentioned.",
    "Unknown.",
  ],
)
def test_sentences_without_an_answer(sentence):
  assert says_unknown(sentence)


@pytest.mark.parametrize(
  "sentence",
  [
    "",
    "Paris.",
    "No.",
    "The documents say that Paris is large.",
    "I know that Paris is large.",
    "He said 'I do not know'.",
    "The king did not answer the letter.",
    "The unknown soldier lies in Paris.",
    "Unknown Pleasures is an album.",
    "The document was not signed.",
    "The text is not long.",
    "She is not known for her films.",
    "The song is not included on the album.",
    "I do not like Paris.",
  ],
)
def test_sentences_that_answer(sentence):
  assert not says_unknown(sentence)


@pytest.mark.parametrize("text", ["the ", "a", "Based on x ", "is not ", "the documents "])
def test_long_texts_take_little_time(text):
  begin = time.process_time()
  says_unknown(text * 50_000)
  assert time.process_time() - begin < 2
