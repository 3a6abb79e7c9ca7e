"""Two-hop questions over fresh random knowledge bases: the smallest task that cannot be solved without searching twice.

A table T[e, r] -> entity is drawn anew for every question, so weights can memorise nothing: they can only learn *how*
to search. "What is the port of the capital of Avalor?" needs two documents, and the second ("The port of Brindle is
Corvane.") shares no entity with the question: its query must be written from the first document.

Documents are found by a key ("port of Brindle") that never holds the value: with the values in the index, a search for
an entity would also find the facts that end in it. Questions and documents exist as text, for chat rendering and
reports, and as token ids, for compiled rollouts.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.search_task import NOTICE, OVERRUN_RATE, SPLITS, STRATEGIES, search_turn
from selfrag_jax.text.tokenizer import Tokenizer

# fmt: off
ENTITIES = (
  "Avalor", "Brindle", "Corvane", "Dunmere", "Elstow", "Fenwick", "Galdor", "Harrow",
  "Isenby", "Jorvale", "Kestrel", "Lorien", "Marrow", "Norhaven", "Ostara", "Pelham",
  "Quillon", "Ravenna", "Selwyn", "Tamsin", "Ulverton", "Valdris", "Wexcombe", "Xanthe",
  "Yarrow", "Zephyra", "Ashford", "Belmora", "Cindral", "Draymoor", "Everlyn", "Farrowby",
)
# fmt: on
RELATIONS = ("capital", "port", "ally", "rival")

QUESTION = "What is the {second} of the {first} of {entity}?"
FACT = "The {key} is {value}."
KEY = "{relation} of {entity}"


def vocabulary() -> list[str]:
  """List the distinct words and punctuation marks of every question, document, query, answer and notice."""
  templates = re.sub(r"\{\w+\}", " ", " ".join([QUESTION, FACT, KEY, NOTICE]))
  return list(dict.fromkeys(re.findall(r"\w+|[^\w\s]", " ".join([templates, *RELATIONS, *ENTITIES]))))


@dataclass(frozen=True)
class TwoHopQuestion:
  """A question with its own table; entities and relations are indices, `text` and `answers` are words.

  `bridge = table[entity, relations[0]]` and `answer = table[bridge, relations[1]]`; entity, bridge and answer differ.
  `gold` holds the indices of the two documents in the order of the hops. `table` is int32[E, R], read-only.
  """

  id: str
  text: str
  entity: int
  relations: tuple[int, int]
  bridge: int
  answer: int
  answers: tuple[str, ...]
  gold: tuple[int, int]
  # arrays have no single truth value, and the fields above with the seed in `id` already tell questions apart
  table: np.ndarray = field(compare=False, repr=False)


class TwoHopKB:
  """Draw two-hop questions and render their knowledge bases as text and as token ids.

  Document e * n_relations + r states table[e, r]. Raises ValueError for sizes that allow no question or exceed the word
  lists.
  """

  def __init__(self, tokenizer: Tokenizer, n_entities: int = 32, n_relations: int = 4, seed: int = 0):
    if not 4 <= n_entities <= len(ENTITIES) or not 1 <= n_relations <= len(RELATIONS):
      raise ValueError(
        f"n_entities must lie in [4, {len(ENTITIES)}] and n_relations in [1, {len(RELATIONS)}], "
        f"got {n_entities} and {n_relations}"
      )
    self.entities, self.relations, self.seed = ENTITIES[:n_entities], RELATIONS[:n_relations], seed
    self.keys = tuple(KEY.format(relation=r, entity=e) for e in self.entities for r in self.relations)
    keys = [tokenizer.encode(key) for key in self.keys]
    self._key_tokens, self._key_lengths = pad_rows(keys, max(map(len, keys)))
    # the facts that any table can state are few (4,096): a table's documents are one gather, whatever the tokenizer
    facts = [tokenizer.encode(FACT.format(key=key, value=value)) for key in self.keys for value in self.entities]
    self._fact_tokens, self._fact_lengths = pad_rows(facts, max(map(len, facts)))

  @property
  def chance(self) -> float:
    """The exact match of a guess by a reader who knows the entity and the bridge, which the answer differs from."""
    return 1 / (len(self.entities) - 2)

  def question(self, split: str, index: int) -> TwoHopQuestion:
    """Draw question `index` of `split`, a pure function of (seed, split, index).

    Raises ValueError for an unknown split or a negative index.
    """
    if split not in SPLITS or index < 0:
      raise ValueError(f"split must be one of {', '.join(SPLITS)} and index >= 0, got {split!r} and {index}")
    # the counter's upper half names the question, its lower half counts the draws: streams are disjoint by construction
    rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, index, SPLITS.index(split)]))
    n_entities, n_relations = len(self.entities), len(self.relations)
    # adding 1..E-1 modulo E is uniform over the other entities: no fact points at its own entity
    table = (np.arange(n_entities)[:, None] + rng.integers(1, n_entities, (n_entities, n_relations))) % n_entities
    entity, bridge, answer = map(int, rng.permutation(n_entities)[:3])
    first, second = map(int, rng.integers(n_relations, size=2))
    # writing the path into the table keeps the three distinct without rejection and the answer uniform over the rest
    table[entity, first], table[bridge, second] = bridge, answer
    table = table.astype(np.int32)
    table.setflags(write=False)
    text = QUESTION.format(first=self.relations[first], second=self.relations[second], entity=self.entities[entity])
    return TwoHopQuestion(
      id=f"two_hop/{self.seed}/{split}/{index}",
      text=text,
      entity=entity,
      relations=(first, second),
      bridge=bridge,
      answer=answer,
      answers=(self.entities[answer],),
      gold=(entity * n_relations + first, bridge * n_relations + second),
      table=table,
    )

  def documents(self, question: TwoHopQuestion) -> list[dict]:
    """Write every fact of the question's table as {"title": "", "content": text}, in the order of `keys`."""
    facts = zip(self.keys, question.table.flat, strict=True)
    return [{"title": "", "content": FACT.format(key=key, value=self.entities[value])} for key, value in facts]

  def document_tokens(self, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode the documents of tables [Q, E, R] as (int32[Q, E * R, X], lengths int32[Q, E * R]), zeros at the end."""
    facts = np.arange(len(self.keys)) * len(self.entities) + tables.reshape(len(tables), -1)
    return self._fact_tokens[facts], self._fact_lengths[facts]

  def key_tokens(self) -> np.ndarray:
    """Return the token ids int32[E * R, Xk] of `keys`, the same for every table; zeros after `key_lengths`."""
    return self._key_tokens

  def key_lengths(self) -> np.ndarray:
    """Return the lengths int32[E * R] of the rows of `key_tokens` (all equal if every name is one token)."""
    return self._key_lengths

  def demonstration(self, question: TwoHopQuestion, strategy: str, rng: np.random.Generator, max_hops: int = 2) -> dict:
    """Write a conversation that answers the question after at most `max_hops` searches of one document each.

    "gold" searches for the two right documents and gives the right answer. "random" teaches the format and not the
    strategy, so that a strategy found later was learnt from the reward: 1..max_hops searches, each for one of the
    question's two relations, drawn uniformly, of an entity drawn uniformly from those in view (in the question or in a
    document found before), and an answer drawn uniformly from the entities in view. OVERRUN_RATE of the random
    demonstrations search once more than `max_hops` allows and get NOTICE instead of a document.

    Raises ValueError for an unknown strategy, or if max_hops is below 1 ("gold": 2).
    """
    if strategy not in STRATEGIES:
      raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if max_hops < (2 if strategy == "gold" else 1):
      raise ValueError(f"a {strategy} demonstration needs max_hops >= {2 if strategy == 'gold' else 1}, got {max_hops}")
    searches, answer = question.gold, question.answers[0]
    if strategy == "random":
      searches, answer = self._wander(question, rng, max_hops)
    documents = self.documents(question)
    queries, shown = [self.keys[i] for i in searches], [documents[i] for i in searches]
    turn = search_turn(queries, [[document] for document in shown], answer, max_hops)
    return {"messages": [{"role": "user", "content": question.text}, turn]}

  def _wander(self, question: TwoHopQuestion, rng: np.random.Generator, max_hops: int) -> tuple[list[int], str]:
    """Search for random facts about the entities in view; return the documents and an answer."""
    overrun = rng.random() < OVERRUN_RATE
    in_view, searches = [question.entity], []
    for hop in range(max_hops + 1 if overrun else rng.integers(1, max_hops, endpoint=True)):
      entity, relation = int(rng.choice(in_view)), int(rng.choice(question.relations))
      searches.append(entity * len(self.relations) + relation)
      value = int(question.table[entity, relation])
      if hop < max_hops and value not in in_view:
        in_view.append(value)
    return searches, self.entities[rng.choice(in_view)]
