"""Queries that are made of passages: a sentence asks for the passage that it was taken from.

So an encoder learns the passages of a collection that has no questions, by a variant of the inverse cloze task of ORQA
(arXiv 1906.00300): half of the queries have the title in front, and no passage keeps its sentence.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.cloze import has_query_length, split_sentences

TITLE_RATE = 0.5  # of the queries: a question names what it asks about, where a sentence says "it"


def inverse_cloze(documents: Sequence[Document], seed: int = 0) -> Judged:
  """Take a sentence out of each document that has two of the length of a query; what is left is relevant to it.

  Other documents stay whole, and nothing asks for them. What is made of a document is a function of the seed, its place
  and its text.
  """
  remaining, queries = [], {}
  for place, document in enumerate(documents):
    rng, sentences = np.random.default_rng([seed, place]), split_sentences(document.content.strip())
    usable = [i for i, sentence in enumerate(sentences) if has_query_length(sentence)]
    if len(usable) > 1:
      sentence = sentences.pop(int(rng.choice(usable)))
      queries[document.id] = f"{document.title} {sentence}".strip() if rng.random() < TITLE_RATE else sentence
      document = dataclasses.replace(document, content=" ".join(sentences))
    remaining.append(document)
  return Judged(remaining, queries, {id: {id: 1.0} for id in queries})
