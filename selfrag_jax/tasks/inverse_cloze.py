"""Queries that are made of passages: a sentence asks for the passage that it was taken from, and for those it names.

Nobody has to write them, so an encoder can learn the passages of a collection that has no questions (the inverse cloze
task of ORQA, arXiv 1906.00300).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.cloze import bridges, fits, naming, sentences

TITLED = 0.5  # of the queries begin with the title: a question names what it asks about, a sentence says "it"


def inverse_cloze(documents: Sequence[Document], seed: int = 0) -> Judged:
  """Take a sentence out of each document that has others; the sentence is a query.

  The rest of its document is relevant to it, and every document whose title the sentence holds. A document of which no
  sentence can ask stays whole.
  """
  names, texts = [document.title for document in documents], [document.content for document in documents]
  named_by: dict[int, list[int]] = {}
  for first, second in bridges(names, texts):
    named_by.setdefault(first, []).append(second)
  rests, queries, qrels = [], {}, {}
  for place, document in enumerate(documents):
    rng, said = np.random.default_rng([seed, place]), sentences(document.content)
    usable = [i for i, sentence in enumerate(said) if fits(sentence)] if len(said) > 1 else []
    if not usable:
      rests.append(document)
      continue
    chosen = int(rng.choice(usable))
    sentence = said[chosen]
    rests.append(dataclasses.replace(document, content=" ".join(said[:chosen] + said[chosen + 1 :])))
    queries[document.id] = f"{document.title} {sentence}".strip() if rng.random() < TITLED else sentence
    others = [other for other in named_by.get(place, ()) if naming(names[other], sentence)]
    qrels[document.id] = dict.fromkeys([document.id, *(documents[other].id for other in others)], 1.0)
  return Judged(rests, queries, qrels)
