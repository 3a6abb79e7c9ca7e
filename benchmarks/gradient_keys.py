"""The keys and encoders of the search for past critiques, compared by precision@8 on labelled sets of short texts.

  python benchmarks/gradient_keys.py --data=FOLDER

FOLDER holds `ir_squad_dev_half` (SQuAD's questions, labelled by article, with the critiques of the router's critic),
`multihop_hotpotqa` (by type), `textgrad_bbh` (date_understanding by the day that is asked for, object_counting by the
things that are counted) and `textgrad_gsm8k`, which has no labels of its own: it is one label in a set of three tasks,
with the two of BIG-Bench-Hard. The Latent Rulebook needs no file. A quarter of the cases of a set are queries, the
others are the records; a record is right if it has the label of the query.

Each set is halved, by its labels if it has more than three, else by its cases. The default encoder is the narrowest
hashed encoder whose mean over the sets is within 0.02 of the best hashed encoder's on the first half, and the second
half confirms it; the kinds of hashing themselves were designed after a look at questions of both halves. A set counts
once: as the mean over its keys (the sample, the critique and both, where it has critiques). Encoders: hashed words as
`HashingEncoder(width, copies, pair_weight)`, also with the inverse document frequency of each dimension, which a store
could count; exact TF-IDF vectors (scikit-learn, where it is installed) of words, and of words and pairs; BM25 over
stems. Prints a line for each encoder, and the precision of each key with the default one. Takes six minutes on two busy
cores.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import selfrag_jax.textgrad as tg
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.tasks.router import Router, read_questions
from selfrag_jax.tasks.rulebook import Rulebook
from selfrag_jax.textgrad.gradient_store import FEW, GradientStore

DATA = flags.DEFINE_string("data", None, "Folder with the sets.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.")
K, MOST = 8, 800  # retrieved records; most cases of a half
KEYS = {"sample": 1.0, "critique": 0.0, "both": 0.5}  # weight of the sample
WIDTHS = (256, 1024, 4096, 16_384)
KINDS = {"4 copies, pairs": (4, 1.0), "2 copies, half pairs": (2, 0.5), "2 copies, no pairs": (2, 0.0)}
HALVES = ("chosen", "confirmed")


class Labelled(NamedTuple):
  """A case, its critique (empty if it has none) and its label."""

  sample: str
  critique: str
  label: str


Similarity = Callable[
  [Sequence[Labelled], Sequence[Labelled], float], np.ndarray
]  # of cases, records, weight of the samples


class WithIDF(GradientStore):
  """A store that weighs dimensions by their rarity among its records (Sparck Jones 1972), even with few records."""

  def _centred(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = self._memory.embeddings
    queries, _ = super()._centred(rows)
    queries *= np.log((len(kept) + FEW) / (np.count_nonzero(kept, axis=0) + 1)).astype(np.float32)
    halves = queries.reshape(len(rows), 2, -1)
    halves /= np.maximum(np.linalg.norm(halves, axis=2, keepdims=True), 1e-12)
    halves *= np.array([self._sample_weight, 1 - self._sample_weight], np.float32)[:, None]
    return queries, queries @ (self._total / (len(kept) + FEW)).astype(np.float32)


def read_sets(folder: Path) -> dict[str, list[Labelled]]:
  """Return the cases of each set."""
  router, book = Router(), Rulebook(seed=0)
  said = lambda q: router.criticise(f"<OUTPUT_OF_FUNCTION> {q.text}\nThe right answer is {q.label}, this was", None)
  cases = book.cases(np.random.default_rng(0), range(60), 2 * MOST)
  bbh = {
    name: [
      example["input"] for example in json.loads((folder / "textgrad_bbh" / f"{name}.json").read_text())["examples"]
    ]
    for name in ("date_understanding", "object_counting")
  }
  lines = next((folder / "textgrad_gsm8k").glob("*.jsonl")).read_text("utf-8").splitlines()
  tasks = {**bbh, "gsm8k": [json.loads(line)["question"] for line in lines[:250]]}
  hotpot = json.loads((folder / "multihop_hotpotqa" / "questions.json").read_text("utf-8"))
  asked = {"date_understanding": r"What is the date (.*?) in MM", "object_counting": r"How many (.*?) do I have"}
  return {
    "rulebook": [Labelled(case.text, book.criticise(case.text, None), str(case.topic)) for case in cases],
    "router": [Labelled(q.text, said(q), q.label) for q in read_questions(folder / "ir_squad_dev_half")],
    "hotpotqa": [Labelled(record["question"], "", record["type"]) for record in hotpot],
    "tasks": [Labelled(text, "", name) for name, texts in tasks.items() for text in texts],
  } | {
    name: [Labelled(text.split("\nOptions")[0], "", m[1]) for text in bbh[name] if (m := re.search(pattern, text))]
    for name, pattern in asked.items()
  }


def halves(cases: Sequence[Labelled]) -> tuple[list[Labelled], list[Labelled]]:
  """Split a set into halves, by its labels if it has more than three; each half is in a fixed random order."""
  labels = sorted({case.label for case in cases})
  shuffled = [cases[i] for i in np.random.default_rng(0).permutation(len(cases))]
  if len(labels) <= 3:
    return shuffled[::2][:MOST], shuffled[1::2][:MOST]
  first, second = ([case for case in shuffled if labels.index(case.label) % 2 == half] for half in (0, 1))
  return first[:MOST], second[:MOST]


def hashed(encoder: HashingEncoder, kind: type[GradientStore]) -> Similarity:
  """Return the similarity of cases and records, [cases, records], by the search of a store."""

  def similarity(cases: Sequence[Labelled], records: Sequence[Labelled], weight: float) -> np.ndarray:
    store = kind(encoder=encoder, dedupe_threshold=None, sample_weight=weight)
    ids = store.add([tg.Critique("", record.critique, record.sample) for record in records])
    rows = store.embed([tg.Critique("", case.critique, case.sample) for case in cases])
    place, found = {id: i for i, id in enumerate(ids)}, np.full((len(cases), len(records)), -np.inf)
    for row, past in zip(found, store.search(rows, K, min_score=-1.0), strict=True):
      row[[place[critique.id] for critique in past]] = [critique.similarity for critique in past]
    return found

  return similarity


def weighed(one: Callable[[Sequence[str], Sequence[str]], np.ndarray]) -> Similarity:
  """Return the weighted sum of `one`, a similarity of two lists of texts, over the samples and the critiques."""

  def similarity(cases: Sequence[Labelled], records: Sequence[Labelled], weight: float) -> np.ndarray:
    found = np.zeros((len(cases), len(records)))
    for part, share in (("sample", weight), ("critique", 1 - weight)):
      if share:
        asked, kept = ([getattr(case, part) for case in of] for of in (cases, records))
        found += share * one(asked, kept)
    return found

  return similarity


def tfidf(words: int) -> Similarity:
  """Return the cosine of exact TF-IDF vectors of n-grams of words."""
  from sklearn.feature_extraction.text import TfidfVectorizer

  def one(asked: Sequence[str], kept: Sequence[str]) -> np.ndarray:
    model = TfidfVectorizer(token_pattern=r"\w+", sublinear_tf=True, ngram_range=(1, words))
    rows = model.fit_transform(kept)
    return (model.transform(asked) @ rows.T).toarray()

  return weighed(one)


def bm25(asked: Sequence[str], kept: Sequence[str]) -> np.ndarray:
  """Return the scores of BM25, scaled so that the best score of each query is 1."""
  from selfrag_jax.retrieval.bm25 import BM25Retriever
  from selfrag_jax.retrieval.document import Document

  retriever = BM25Retriever()
  retriever.add_documents([Document(str(i), "", text) for i, text in enumerate(kept)])
  found = np.zeros((len(asked), len(kept)))
  for row, hits in zip(found, retriever.retrieve_batch(list(asked), top_k=min(100, len(kept))), strict=True):
    for hit in hits:
      row[int(hit.id)] = hit.score / hits[0].score
  return found


def precision(similarity: Similarity, cases: Sequence[Labelled]) -> dict[str, float]:
  """Return precision@8 for each key."""
  n = len(cases) // 4
  asked, records = cases[:n], cases[n:]
  right = np.array([[case.label == record.label for record in records] for case in asked])
  found = {}
  for key, weight in KEYS.items() if cases[0].critique else [("sample", 1.0)]:
    best = np.argsort(-similarity(asked, records, weight), axis=1, kind="stable")[:, :K]
    found[key] = float(np.take_along_axis(right, best, axis=1).mean())
  return found


def main(_: list[str]) -> None:
  """Measure every encoder on both halves of every set."""
  sets = {name: halves(cases) for name, cases in read_sets(Path(DATA.value)).items()}
  encoders: dict[str, Similarity] = {}
  for kind, (copies, pairs) in KINDS.items():
    for width in WIDTHS:
      encoder = HashingEncoder(width, copies, pairs)
      encoders[f"{width}, {kind}"] = hashed(encoder, GradientStore)
      encoders[f"{width}, {kind}, IDF"] = hashed(encoder, WithIDF)
  if importlib.util.find_spec("sklearn"):
    encoders |= {"exact TF-IDF, words": tfidf(1), "exact TF-IDF, words and pairs": tfidf(2)}
  encoders["BM25, stems"] = weighed(bm25)
  print(f"{'':36}" + "".join(f"{half:>10}" for half in HALVES) + "   the first half: " + ", ".join(sets))
  report: dict[str, Any] = {}
  for name, similarity in encoders.items():
    found = {set_: [precision(similarity, half) for half in parts] for set_, parts in sets.items()}
    of_sets = {set_: [float(np.mean([*half.values()])) for half in parts] for set_, parts in found.items()}
    means = [float(np.mean([parts[half] for parts in of_sets.values()])) for half in range(2)]
    report[name] = {"means": dict(zip(HALVES, means, strict=True)), "sets": found}
    first = " ".join(f"{parts[0]:.3f}" for parts in of_sets.values())
    print(f"{name:36}" + "".join(f"{mean:10.3f}" for mean in means) + f"   {first}", flush=True)
  show_keys(report)
  if OUTPUT.value:
    Path(OUTPUT.value).write_text(json.dumps(report, indent=1) + "\n")


def show_keys(report: Mapping[str, Any]) -> None:
  """Print the encoder that the rule chooses, and the precision of each key with it, on both halves."""
  hashing = {name: row["means"]["chosen"] for name, row in report.items() if name[0].isdigit()}
  enough = [name for name, mean in hashing.items() if mean >= max(hashing.values()) - 0.02]
  chosen = min(enough, key=lambda name: (int(name.partition(",")[0]), -hashing[name]))
  print(f"chosen: {chosen}")
  for name, parts in report[chosen]["sets"].items():
    if len(parts[0]) > 1:
      shown = "; ".join(f"{key} {parts[0][key]:.3f}, {parts[1][key]:.3f}" for key in parts[0])
      print(f"  {name}, precision@{K} by key on both halves: {shown}")


if __name__ == "__main__":
  app.run(main)
