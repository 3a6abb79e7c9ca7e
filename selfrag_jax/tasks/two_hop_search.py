"""The two-hop search task: each question has a fresh knowledge base, a group of the memory that a batch shares."""

from typing import Any

import numpy as np

from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.search_task import NOTICE, Corpus, Indices, SearchBatch
from selfrag_jax.tasks.two_hop import TwoHopKB, vocabulary
from selfrag_jax.text.chat import COMPACT, render_for_completion
from selfrag_jax.text.tokenizer import WordTokenizer

DEMONSTRATION_STREAM = 7  # keeps the random numbers of demonstrations apart from those of tables


class TwoHopSearch:
  """`TwoHopKB` as a search task. Group i of a batch is the knowledge base of its i-th question."""

  notice = NOTICE
  template = COMPACT

  def __init__(self, n_entities: int = 32, n_relations: int = 4, seed: int = 0):
    self.tokenizer = WordTokenizer(vocabulary())
    self.kb = TwoHopKB(self.tokenizer, n_entities, n_relations, seed)
    self.chance = self.kb.chance
    example = self.kb.question("train", 0)
    # every name is one token, so all prompts and all documents have the same length
    self.prompt_tokens = len(self._prompt(example.text))
    self.question_tokens = len(self.tokenizer.encode(example.text))
    self.document_tokens = self.kb.document_tokens(example.table[None])[0].shape[-1]

  def size(self, split: str) -> None:
    """Return None, since questions never end."""

  def batch(self, split: str, indices: Indices) -> SearchBatch:
    """Draw the questions, and write the table of each as the documents of its group."""
    drawn = [self.kb.question(split, int(index)) for index in indices]
    prompts, lengths = pad_rows([self._prompt(question.text) for question in drawn], self.prompt_tokens)
    asked = [self.tokenizer.encode(question.text) for question in drawn]
    questions, question_lengths = pad_rows(asked, self.question_tokens)
    groups = np.arange(len(drawn), dtype=np.int32)
    first = groups * len(self.kb.keys)
    return SearchBatch(
      indices=np.asarray(indices),
      prompts=prompts,
      lengths=lengths,
      questions=questions,
      question_lengths=question_lengths,
      gold=np.array([question.gold for question in drawn], np.int32) + first[:, None],
      group_ids=groups,
      first_slots=first,
      answers=[question.answers for question in drawn],
      corpus=self._corpus(np.stack([question.table for question in drawn])),
    )

  def demonstration(self, split: str, index: int, strategy: str, max_hops: int) -> dict[str, Any]:
    """Demonstrate question `index` of `split` by `strategy`; a pure function of its arguments and the seed."""
    rng = np.random.default_rng([self.kb.seed, index, DEMONSTRATION_STREAM])
    return self.kb.demonstration(self.kb.question(split, index), strategy, rng, max_hops)

  def _corpus(self, tables: np.ndarray) -> Corpus:
    n, per_group = len(tables), len(self.kb.keys)
    tokens, lengths = self.kb.document_tokens(tables)
    return Corpus(
      np.tile(self.kb.key_tokens(), (n, 1)),
      np.tile(self.kb.key_lengths(), n),
      tokens.reshape(n * per_group, -1),
      lengths.reshape(-1),
      np.repeat(np.arange(n, dtype=np.int32), per_group),
    )

  def _prompt(self, text: str) -> list[int]:
    conversation = {"messages": [{"role": "user", "content": text}]}
    return render_for_completion(self.tokenizer, conversation, self.template)
