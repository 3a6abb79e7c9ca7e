"""Questions whose passages all stand among ten, by one search and by two, and the arms that could explain the gain.

  python benchmarks/multi_hop.py --data=FOLDER                         BM25
  python benchmarks/multi_hop.py --data=FOLDER --retriever=hybrid      BM25 and all-MiniLM-L6-v2
  python benchmarks/multi_hop.py --data=FOLDER --writer=smollm2-135m   also queries that a language model writes

FOLDER is a judged collection in the layout of BEIR. Every arm returns ten passages a question. The second query is the
question and: the new names of the best passage (the rule), all of its words, its title, the new names of a random
passage (a control), or nothing, so that the second search goes on where the first ended.
"""

import sys
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from selfrag_jax.generate.engine import Engine
from selfrag_jax.metrics.retrieval import all_found
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.retrieval.base import create
from selfrag_jax.retrieval.beir import read_beir
from selfrag_jax.retrieval.multi_hop import MultiHopRetriever, add_names
from selfrag_jax.tasks.query_writer import QueryWriter
from selfrag_jax.train.load import load_model

DATA = flags.DEFINE_string("data", None, "a judged collection in the layout of BEIR", required=True)
RETRIEVER = flags.DEFINE_string("retriever", "bm25", "the retriever that is asked: bm25, dense or hybrid")
WRITER = flags.DEFINE_string("writer", None, "a chat model that writes second queries, in an arm of its own")
SEED = flags.DEFINE_integer("seed", 0, "the seed of the random passages")
TOP_K = 10


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  data = read_beir(DATA.value)
  retriever = create(RETRIEVER.value)
  retriever.add_documents(data.documents)
  rng = np.random.default_rng(SEED.value)
  anyone = lambda: data.documents[rng.integers(len(data.documents))]
  rules = {
    "names of the best passage": add_names,
    "all its words": lambda question, read: f"{question} {read[-1][0].text}" if read[-1] else None,
    "its title": lambda question, read: f"{question} {read[-1][0].title}" if read[-1] else None,
    "names of a random passage": lambda question, read: add_names(question, [[anyone()]]),
    "the question again": lambda question, read: question,
  }
  if WRITER.value:
    rules[f"what {WRITER.value} writes"] = QueryWriter(Engine(load_model(WRITER.value)))
  arms = {"one search": MultiHopRetriever(retriever, hops=1)}
  arms |= {f"two: {name}": MultiHopRetriever(retriever, rule, hops=2) for name, rule in rules.items()}
  arms["three: names of the best"] = MultiHopRetriever(retriever, hops=3)
  print(f"{len(data.documents):,} passages, {len(data.queries)} questions, {RETRIEVER.value}: all gold among {TOP_K}")
  first = None
  for name, arm in arms.items():
    found = arm.retrieve_batch(list(data.queries.values()), TOP_K)
    pairs = zip(found, data.qrels.values(), strict=True)
    hits = np.array([all_found([d.id for d in documents], gold, TOP_K) for documents, gold in pairs])
    line = "{:32}{:6.3f}  [{:.3f}, {:.3f}]".format(name, hits.mean(), *bootstrap_interval(hits))
    if first is None:
      first = hits
    else:
      line += "   {:+.3f} [{:+.3f}, {:+.3f}]".format((hits - first).mean(), *bootstrap_difference(hits, first))
    print(line, flush=True)


if __name__ == "__main__":
  app.run(main)
