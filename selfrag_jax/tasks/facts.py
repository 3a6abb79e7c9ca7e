"""Facts at controlled positions, with a question about one fact, to measure where in a long input a model still looks.

The design is paired: an episode is a function of (seed, split, index), and only the fact that the question is about
moves. So two depths differ in position and in nothing else. Names are pairs of words; a quarter of all pairs is held
out, so that no fact of a test episode was ever stated in training.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.search_task import Indices
from selfrag_jax.text.tokenizer import WordTokenizer


def _words(text: str) -> tuple[str, ...]:
  return tuple(text.split())


FIRST = _words("""
  Ada Alba Amos Anna Arno Asta Bela Boris Cato Celia Clara Cyril Dana Delia Dirk Dora Edgar Edith Elias Emma Erik
  Esther Felix Flora Frida Georg Greta Gustav Hanna Hector Helga Hugo Ida Igor Inga Irma Ivo Jana Jonas Judith Karl
  Kira Klaus Lena Leo Lotte Lukas Magda Marco Mila Nadia Nico Nora Olga Oscar Otto Paula Petra Ralf Rita Sven Tilda
  Vera Viktor
""")
LAST = _words("""
  Abbott Archer Baker Barlow Becker Bishop Brewer Butler Carter Castle Chandler Cooper Cross Dalton Draper Eaton
  Farmer Fisher Fletcher Forster Fowler Gardner Glover Graham Harper Hayward Hooper Hunter Jenkins Keller Knight
  Lambert Lawson Mason Mercer Miller Norris Osborn Palmer Parker Porter Potter Quigley Ranger Reeves Sawyer Shepherd
  Skinner Slater Spencer Steward Tanner Taylor Thatcher Tiller Turner Vaughan Walker Warner Weaver Webber Wheeler
  Winter Wright
""")
VALUES = _words("""
  amber anchor apple arrow barley basket beacon bell birch bottle branch bridge bronze candle canyon carpet cedar
  cherry circle clover cobalt copper coral cotton crown crystal dagger desert dragon ember falcon feather fern forest
  garnet ginger glacier granite hammer harbor hazel island ivory jasmine lantern lemon marble meadow mirror needle
  olive orchid pebble pepper pillow quartz ribbon saddle silver spiral temple thunder velvet willow
""")
HEX = tuple(f"{byte:02x}" for byte in range(256))


class Wording(NamedTuple):
  """The statements of a variant's facts, and its question.

  A fact has eight words: the key `a b c d` and the value `v w x y`. The question is about a fact that is written with
  the first statement, or in `paraphrase` with any.
  """

  statements: tuple[str, ...]
  question: str


CODE, ASK = "The code of {a} {b} is {v}.", "What is the code of {a} {b}?"
FILLER = (
  "{a} {b} met {c} {d} at the market.",
  "Nobody in the village knew why {a} {b} laughed.",
  "At noon {a} {b} and {c} {d} walked home.",
)
STONE = "The {c} stone of {a} {b} is {v}."
WORDINGS = {
  "kv": Wording(("{a} {b}: {v}",), "{a} {b}:"),
  "kv_uuid": Wording(("{a} {b} {c} {d}: {v} {w} {x} {y}",), "{a} {b} {c} {d}:"),
  "sentence": Wording((CODE,), ASK),
  "needle": Wording((CODE, *FILLER), ASK),
  "needle_multi_key": Wording((CODE, *FILLER), ASK),
  "needle_multi_value": Wording((STONE, *FILLER), "What is the {c} stone of {a} {b}?"),
  "paraphrase": Wording(
    (CODE, "{a} {b} answers to the code {v}.", "Say {v} to enter the house of {a} {b}."),
    "Which word opens the door of {a} {b}?",
  ),
  "two_fact": Wording(("The guard of {a} {b} is {c} {d}.", CODE), "What is the code of the guard of {a} {b}?"),
  "conflict": Wording((CODE,), ASK),
}
ASKABLE = ("kv", "kv_uuid", "sentence", "paraphrase")  # variants in which any fact of a list can be asked for
ORDINALS = ("first", "second")
WORDS, VALUE = "abcdvwxy", 4  # the words of a fact, and the index of the first word of its value
SPLITS = ("train", "valid", "test")
Demand = Literal["even", "recent"]  # which facts are asked for: all evenly, or more often those read last
HELD_OUT = 4  # one pair of words in HELD_OUT is for valid and test
OTHER_KEYS = 0.25  # share of the sentences of needle_multi_key that state facts about other names


def vocabulary() -> list[str]:
  """List the distinct words and marks of every variant."""
  wordings = [text for wording in WORDINGS.values() for text in (*wording.statements, wording.question)]
  templates = " ".join(wordings)
  pieces = re.findall(r"\w+|[^\w\s]", re.sub(r"\{\w\}", " ", templates))
  return list(dict.fromkeys([*pieces, *ORDINALS, *FIRST, *LAST, *VALUES, *HEX]))


class Episodes(NamedTuple):
  """A batch of inputs, each a list of facts and a question about one of the facts.

  `facts` int32 [B, n, F] in reading order, right-padded, `lengths` [B, n]; `questions` [B, Q]; `answers` [B, A];
  `needed` [B, g]: the positions of the facts that the answer needs, that of the moving fact first.
  """

  facts: np.ndarray
  lengths: np.ndarray
  questions: np.ndarray
  answers: np.ndarray
  needed: np.ndarray


class Facts:
  """Episodes of one variant, a pure function of (seed, split, index).

  kv, kv_uuid, sentence: any fact can be asked for. needle: one fact among sentences that state no fact.
  needle_multi_key: also facts about other names. needle_multi_value: also a second value of the same name. paraphrase:
  a fact has one of three wordings, the question a fourth. two_fact: the question names one fact, which names the other.
  conflict: the name also has an older value, read anywhere before the newest, which is right; as the newest moves, the
  older one moves with it.

  `chance` is the accuracy of a guess among all values. Raises ValueError for an unknown variant, for fewer facts than
  an episode needs, and for more facts than there are held-out names.
  """

  def __init__(self, variant: str = "kv", n_facts: int = 64, seed: int = 0):
    most = len(FIRST) * len(LAST) // HELD_OUT
    if variant not in WORDINGS:
      raise ValueError(f"variant is {variant!r}; one of {', '.join(WORDINGS)}")
    if not 4 <= n_facts <= most:
      raise ValueError(f"n_facts = {n_facts} must lie in [4, {most}], the number of names that are held out")
    self.variant, self.n_facts, self.seed = variant, n_facts, seed
    self.tokenizer = WordTokenizer(vocabulary())
    wording = WORDINGS[variant]
    statements = [self._template(text) for text in wording.statements]
    self._statements, self._lengths = pad_rows(statements, max(map(len, statements)), self.tokenizer.special["<|pad|>"])
    self._question = np.array(self._template(wording.question), np.int32)
    # the first token of a question with its answer that the facts and the tokens before it determine
    self.first_determined = self._question.tolist().index(~WORDS.index("a")) + 1
    ids = lambda words: np.array([self.tokenizer.encode(word)[0] for word in words], np.int32)
    first, last = (HEX, HEX) if variant == "kv_uuid" else (FIRST, LAST)
    # the grid of all pairs; one diagonal in HELD_OUT is held out, so that all words are held out equally often
    pairs = np.stack(np.meshgrid(ids(first), ids(last), indexing="ij"), axis=-1).reshape(-1, 2)
    held_out = np.add(*np.divmod(np.arange(len(pairs)), len(last))) % HELD_OUT == 0
    self._names = {"train": pairs[~held_out], "valid": pairs[held_out], "test": pairs[held_out]}
    self._first_depth = 1 if variant == "conflict" else 0  # the older value comes before it
    self._values, self._ordinals = ids(HEX if variant == "kv_uuid" else VALUES), ids(ORDINALS)
    self._n_values = 4 if variant == "kv_uuid" else 1
    self.chance = float(len(self._values)) ** -self._n_values

  def depths(self, n_bins: int) -> np.ndarray:
    """Return the positions int [n_bins] of the moving fact, evenly spaced from the first to the last."""
    return np.linspace(self._first_depth, self.n_facts - 1, n_bins).round().astype(int)

  def episodes(self, split: str, indices: Indices, depths: Indices, *, changed: bool = False) -> Episodes:
    """Return the episodes with the moving fact at position `depths` [B] of the input.

    `changed` gives another value to the fact that states the answer, and changes nothing else.
    Raises ValueError for an unknown split, a negative index and a depth outside the input.
    """
    if split not in SPLITS:
      raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    lowest = self._first_depth
    for index, depth in zip(indices, depths, strict=True):
      if index < 0 or not lowest <= depth < self.n_facts:
        raise ValueError(f"need an index >= 0 and a depth in [{lowest}, {self.n_facts}), got {index} and {depth}")
    drawn, names = [], self._names[split]
    for index in indices:
      rng = self._rng(split, index)
      drawn.append(self._draw(rng, names[rng.choice(len(names), self.n_facts, replace=False)], changed))
    return self._moved(drawn, np.asarray(depths))

  def lists(
    self, split: str, indices: Indices, n_questions: int = 1, demand: Demand = "even", *, alike: bool = False
  ) -> Episodes:
    """Return lists with several questions each, for training.

    questions [B, q, Q], answers [B, q, A], needed [B, q, g]. With an `even` demand, question i is about a fact drawn
    from part i of the list, cut into q parts; variants that are not ASKABLE have one question, about every depth in
    turn. A `recent` demand prefers the facts read last, as text does: the density grows with depth squared. If the
    names suffice for c lists, lists `j c, …, j c + c - 1` share no name: in a batch of these lists no question is
    answered by two. With `alike`, the names of a list are made of few words instead, so that most names share a word
    with several others. Raises ValueError for more questions than can be asked.
    """
    most = self.n_facts if self.variant in ASKABLE else 1
    if not 1 <= n_questions <= most:
      raise ValueError(
        f"n_questions = {n_questions} must lie in [1, {most}] for {self.n_facts} facts of {self.variant}"
      )
    drawn, together = [], len(self._names[split]) // self.n_facts
    for index in map(int, indices):
      if alike:
        names = self._alike(self._rng(split, index, "names"), self._names[split])
      else:
        block, part = divmod(index, together)
        names = self._rng(split, block, "names").permutation(self._names[split])
        names = names[part * self.n_facts : (part + 1) * self.n_facts]
      drawn.append(self._draw(self._rng(split, index, "list"), names))
    recent = [self._rng(split, index, "asked").random(n_questions) ** (1 / 3) for index in indices]
    if self.variant not in ASKABLE:
      room = self.n_facts - self._first_depth
      turns = np.asarray(indices) % room if demand == "even" else (np.concatenate(recent) * room).astype(int)
      moved = self._moved(drawn, self._first_depth + turns)
      one = lambda column: column[:, None]
      return Episodes(moved.facts, moved.lengths, one(moved.questions), one(moved.answers), one(moved.needed))
    words, kinds, _ = (np.stack(column) for column in zip(*drawn, strict=True))
    edges = np.linspace(0, self.n_facts, n_questions + 1).astype(int)
    evenly = lambda index: self._rng(split, index, "asked").integers(edges[:-1], edges[1:])
    asked = (
      np.stack([evenly(i) for i in indices]) if demand == "even" else (np.stack(recent) * self.n_facts).astype(int)
    )
    about = words[np.arange(len(words))[:, None], asked]
    return Episodes(
      _fill(self._statements[kinds], words),
      self._lengths[kinds],
      _fill(self._question, about),
      about[..., VALUE : VALUE + self._n_values],
      asked[..., None],
    )

  def _alike(self, rng: np.random.Generator, names: np.ndarray) -> np.ndarray:
    """Draw `n_facts` of `names` [N, 2] from the smallest grid of randomly ranked words that holds this many names."""
    ranks = [rng.permutation(len(words))[at] for words, at in (np.unique(c, return_inverse=True) for c in names.T)]
    return rng.permutation(names[np.argsort(np.max(ranks, axis=0), kind="stable")[: self.n_facts]])

  def _rng(self, split: str, index: int, *stream: str) -> np.random.Generator:
    streams = [("names", "list", "asked").index(name) + 1 for name in stream]
    variant = list(WORDINGS).index(self.variant)
    return np.random.default_rng([self.seed, SPLITS.index(split), variant, int(index), *streams])

  def _moved(self, drawn: Sequence[tuple[np.ndarray, np.ndarray, int]], depths: np.ndarray) -> Episodes:
    """Write drawn facts as episodes, fact 0 at its depth and the others around it in their order."""
    words, kinds, partners = (np.stack(column) for column in zip(*drawn, strict=True))
    two_facts = self.variant == "two_fact"
    rows = np.arange(len(drawn))
    answers = words[rows, partners if two_facts else 0][:, VALUE : VALUE + self._n_values]
    # the other facts keep their order: fact i stands at place i - 1 before fact 0, and at place i after it
    place = np.arange(self.n_facts)[None, :]
    depths_Bx1 = depths[:, None]
    order = np.where(place == depths_Bx1, 0, place + (place < depths_Bx1))
    if self.variant == "conflict":  # fact 1 at any place before fact 0: at a fixed one, no ages would be compared
      older = ((partners - 1) * depths // (self.n_facts - 1))[:, None]
      order = np.where(place < older, place + 2, np.where(place == older, 1, order))
    facts = _fill(self._statements[kinds], words)[rows[:, None], order]
    moved = partners - (partners <= depths_Bx1[:, 0])
    needed = np.stack([depths_Bx1[:, 0], moved], axis=1) if two_facts else depths_Bx1
    return Episodes(
      facts, self._lengths[kinds][rows[:, None], order], _fill(self._question[None], words[:, 0]), answers, needed
    )

  def _draw(
    self, rng: np.random.Generator, names: np.ndarray, changed: bool = False
  ) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw the words [n, 8] and the statements [n] of facts about `names` [n, 2], and the partner of fact 0."""
    variant, n = self.variant, self.n_facts
    partner = int(rng.integers(1, n))
    others = names[rng.permutation(n)]
    values = rng.integers(len(self._values), size=(n, 4))
    kinds = np.zeros(n, int)
    if variant == "kv_uuid":
      others = self._values[rng.integers(len(self._values), size=(n, 2))]
    elif variant == "paraphrase":
      kinds = rng.integers(len(self._statements), size=n)
    elif variant == "two_fact":
      kinds = (rng.permutation(n) < n // 2).astype(int)
      kinds[[0, partner]] = 0, 1
      others = names[rng.choice(np.flatnonzero(kinds), n)]
      others[0] = names[partner]
    elif variant.startswith("needle"):
      kinds[1:] = rng.integers(1, len(self._statements), size=n - 1)
      if variant == "needle_multi_key":
        kinds[1:][rng.random(n - 1) < OTHER_KEYS] = 0
      elif variant == "needle_multi_value":
        kinds[partner], others[[0, partner], 0] = 0, rng.permutation(self._ordinals)
    if variant in ("conflict", "needle_multi_value"):
      other = 1 if variant == "conflict" else partner
      names[other] = names[0]
      values[other] = values[0] + rng.integers(2, len(self._values))  # unlike fact 0, also if changed
    if changed:
      values[partner if variant == "two_fact" else 0] += 1
    return np.concatenate([names, others, self._values[values % len(self._values)]], axis=1), kinds, partner

  def _template(self, text: str) -> list[int]:
    """Encode a template: token ids, and ~i for word i of a fact."""
    pieces = re.findall(r"\{\w\}|[^{}]+", text)
    return [
      token
      for piece in pieces
      for token in ([~WORDS.index(piece[1])] if piece[0] == "{" else self.tokenizer.encode(piece))
    ]


def _fill(templates: np.ndarray, words: np.ndarray) -> np.ndarray:
  """Put words int32 [..., 8] into the places of templates int32 [..., F]."""
  templates = np.broadcast_to(templates, (*words.shape[:-1], templates.shape[-1]))
  return np.where(templates < 0, np.take_along_axis(words, np.maximum(~templates, 0), axis=-1), templates)
