"""The comparison of retrievers on judged queries: ranking quality, time of a query, and intervals of differences."""

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from tqdm import tqdm

from selfrag_jax.checked import Checked, Count, Natural, Seed
from selfrag_jax.encoders.cached import CorpusEncoder
from selfrag_jax.experiments import base
from selfrag_jax.metrics.retrieval import all_found, compute_retrieval_recall, ndcg, reciprocal_rank
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.reports import figures
from selfrag_jax.reports.files import write_file
from selfrag_jax.retrieval.base import BaseRetriever, create, import_plugins
from selfrag_jax.retrieval.beir import Judged, TitleParts, locate_beir, read_beir, split_by_title
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import FUNCTION
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.reading import dense_parts
from selfrag_jax.settings import read_config, settings
from selfrag_jax.storage.arrays import npz_bytes


@dataclasses.dataclass(frozen=True)
class JudgedSplit(Checked):
  """One split of a judged collection, a folder in the layout of BEIR."""

  path: str = ""
  split: str = "test"


@dataclasses.dataclass(frozen=True)
class JudgedTitles(Checked):
  """A judged collection whose titles are split into parts by a seed."""

  path: str = ""
  parts: TitleParts = TitleParts()
  seed: Seed = 0


SECTIONS = {
  "data": JudgedSplit,
  "plugins": tuple,
  "retrievers": Mapping,
  "baseline": str,
  "queries": Natural,
  "ks": tuple[Count, ...],
  "batch_size": Count,
}
KS = (1, 5, 10)
TIMING_BUDGET_SECONDS = 60  # queries are asked a second time, for their time alone, if that takes no longer


@dataclasses.dataclass
class Experiment:
  """A judged collection and the retrievers that will rank it, which have no documents yet."""

  config: dict[str, Any]
  data: Judged
  retrievers: dict[str, BaseRetriever]


class Scores(dict[str, np.ndarray]):
  """The values of each metric, [N] in the order of the queries, and the milliseconds that a query takes."""

  ms_per_query: float = 0.0

  @property
  def means(self) -> dict[str, float]:
    """The mean of each metric."""
    return {metric: float(values.mean()) for metric, values in self.items()}


def score(retriever: BaseRetriever, data: Judged, ks: Sequence[int] = KS, batch_size: int = 32) -> Scores:
  """Ask a retriever all queries and score its rankings.

  `ms_per_query` is the median over the batches. All are asked twice if that takes less than a minute, and the second
  time counts, since the first builds indexes and compiles programs.
  """
  texts, times = list(data.queries.values()), []

  def ask() -> list[list[Document]]:
    rankings = []
    times.clear()
    for start in tqdm(range(0, len(texts), batch_size), desc="asking", unit="batch", delay=5, leave=False):
      part = texts[start : start + batch_size]
      began = time.perf_counter()
      rankings += retriever.retrieve_batch(part, max(10, *ks))
      times.append((time.perf_counter() - began) / len(part))
    return rankings

  rankings = ask()
  if batch_size * sum(times) < TIMING_BUDGET_SECONDS:
    ask()
  rows: list[dict[str, float]] = []
  for found, relevant in zip(rankings, data.qrels.values(), strict=True):
    ids = [document.id for document in found]
    row = {f"recall@{k}": compute_retrieval_recall(ids, relevant, k) for k in ks}
    row |= {"ndcg@10": ndcg(ids, relevant, 10), "mrr@10": reciprocal_rank(ids, relevant, 10)}
    rows.append(row | {"all_gold@10": all_found(ids, relevant, 10)})
  scores = Scores({name: np.array([row[name] for row in rows]) for name in rows[0]})
  scores.ms_per_query = 1000 * float(np.median(times))
  return scores


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config, read the collection and make the retrievers. Raises ValueError with the fix."""
  config = read_config(config, SECTIONS)
  data = settings(JudgedSplit, config["data"], "data")
  path = given_path(data.path)
  import_plugins(config["plugins"])
  if not config["retrievers"]:
    raise ValueError("config.retrievers is empty; name at least one")
  if config["baseline"] not in ("", *config["retrievers"]):
    raise ValueError(f"config.baseline is {config['baseline']!r}; one of {', '.join(config['retrievers'])}")
  retrievers = {}
  for name, section in config["retrievers"].items():
    section = dict(section)
    try:
      retrievers[name] = create(section.pop("type", name), **section)
    except ValueError as error:
      raise ValueError(f"config.retrievers.{name}: {error}") from None
  judged = read_beir(path, data.split)
  if n := config["queries"]:
    judged = judged.only(list(judged.queries)[:n])
  return Experiment(config, judged, retrievers)


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  names, ks = list(experiment.retrievers), experiment.config["ks"]
  found = names_of_values(names, experiment.config["baseline"] or names[0], ks)
  return found | {f"{name}.index_seconds" for name in names} | {"documents", "queries"}


def names_of_values(names: Iterable[str], baseline: str, ks: Sequence[int] = KS) -> set[str]:
  """Return the names of the numbers that `summarize` reports for these retrievers."""
  of_each = [*(f"recall@{k}" for k in ks), "ndcg@10", "mrr@10", "all_gold@10", "ms_per_query"]
  found = {f"{name}.{value}" for name in names for value in of_each}
  return found | {f"{name}.ndcg@10_difference" for name in names if name != baseline}


def share_encoders(retrievers: Iterable[BaseRetriever], data: Judged) -> None:
  """Make dense retrievers of the same model share the model and its vectors of the collection."""
  corpus, shared = {document.text for document in data.documents}, {}
  for part in (part for retriever in retrievers for part in dense_parts(retriever)):
    name = part.settings["model_name"]
    name = part.encoder if name == FUNCTION else name
    if name not in shared:
      shared[name] = CorpusEncoder(part.encoder, corpus)
    part.encoder = shared[name]


def read_parts(section: JudgedTitles) -> dict[str, Judged]:
  """Read a collection split by its files in `qrels/`, or else by title. Raises ValueError with the fix."""
  path = locate_beir(given_path(section.path))
  if not (path / "qrels").is_dir():
    return split_by_title(read_beir(path), vars(section.parts), section.seed)
  names = {"train": "train", "valid": "dev", "test": "test"}
  return {part: read_beir(path, name) for part, name in names.items()}


def given_path(path: str, name: str = "path") -> str:
  """Return a path. Raises ValueError with the fix if it is empty."""
  if not path:
    raise ValueError(f"config.data.{name} is empty; give a BEIR folder: --config.data.{name}=FOLDER")
  return path


def bm25_scores(data: Judged) -> Scores:
  """Score BM25, with its defaults, on a part of a collection."""
  words = BM25Retriever()
  words.add_documents(data.documents)
  return score(words, data)


def sizes(parts: Mapping[str, Judged]) -> str:
  """Format the numbers of queries and documents in each part."""
  return ", ".join(f"{part} {len(d.queries):,} queries on {len(d.documents):,} documents" for part, d in parts.items())


def dry_run(experiment: Experiment) -> None:
  """Print the size of the collection, the retrievers, and the first query."""
  data = experiment.data
  print(_size(data))
  for name, retriever in experiment.retrievers.items():
    print(f"{name}: {retriever.settings}")
  print(f"first query: {next(iter(data.queries.values()))}")


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Index the collection with every retriever and ask it all queries; write `retrieval.json`, `.csv` and `.png`."""
  workdir, data, config = epath.Path(workdir), experiment.data, experiment.config
  print(_size(data), flush=True)
  scores, report = {}, {"documents": len(data.documents), "queries": len(data.queries), "config": config}
  share_encoders(experiment.retrievers.values(), data)
  for name, retriever in experiment.retrievers.items():
    began = time.perf_counter()
    retriever.add_documents(data.documents)
    report[f"{name}.index_seconds"] = round(time.perf_counter() - began, 3)
    scores[name] = score(retriever, data, config["ks"], config["batch_size"])
    print(f"{name}: {line(scores[name])}", file=sys.stderr, flush=True)
  return write_report(workdir, "retrieval", scores, report, config["baseline"])


run = evaluate  # nothing is trained


def _size(data: Judged) -> str:
  return f"{len(data.documents):,} documents, {len(data.queries):,} queries"


def write_report(
  workdir: epath.Path, name: str, scores: Mapping[str, Scores], facts: Mapping[str, Any], baseline: str = ""
) -> dict[str, Any]:
  """Write `NAME.json` with the facts and the summary, `NAME.csv` and `NAME.png`; print the table, return the report.

  `NAME.npz` gets the values of each query, as `RETRIEVER.metric`, for paired tests over several runs.
  `baseline`: the retriever that the others are compared with (empty: the first).
  """
  baseline = baseline or next(iter(scores))
  report = {**facts, **summarize(scores, baseline)}
  arrays = {f"{retriever}.{metric}": values for retriever, found in scores.items() for metric, values in found.items()}
  write_file(workdir / f"{name}.npz", npz_bytes(arrays))
  figures.retrieval_bars(workdir / f"{name}.png", report, list(scores))
  base.write_report(workdir, name, report, as_rows(scores))
  print(table(scores, report, baseline))
  return report


def summarize(scores: Mapping[str, Scores], baseline: str) -> dict[str, Any]:
  """Return each mean as `NAME.metric`, the interval of nDCG@10, and its paired difference to the baseline's."""
  report: dict[str, Any] = {}
  first = scores[baseline]
  for name, found in scores.items():
    report |= {f"{name}.{metric}": mean for metric, mean in found.means.items()}
    report[f"{name}.ms_per_query"] = round(found.ms_per_query, 4)
    report[f"{name}.ndcg@10_interval"] = list(bootstrap_interval(found["ndcg@10"]))
    if found is not first:
      report[f"{name}.ndcg@10_difference"] = float((found["ndcg@10"] - first["ndcg@10"]).mean())
      report[f"{name}.ndcg@10_difference_interval"] = list(bootstrap_difference(found["ndcg@10"], first["ndcg@10"]))
  return report


def line(scores: Scores) -> str:
  """Format the means of one retriever."""
  values = "  ".join(f"{metric} {mean:.4f}" for metric, mean in scores.means.items())
  return f"{values}  {scores.ms_per_query:.2f} ms a query"


def as_rows(scores: Mapping[str, Scores]) -> Iterator[list[Any]]:
  """Yield the header and one row per retriever."""
  yield ["retriever", *next(iter(scores.values())), "ms_per_query"]
  for name, found in scores.items():
    yield [name, *(f"{mean:.6f}" for mean in found.means.values()), f"{found.ms_per_query:.4f}"]


def table(scores: Mapping[str, Scores], report: Mapping[str, Any], baseline: str) -> str:
  """Format all retrievers for a terminal."""
  width = max(map(len, scores)) + 2
  columns = "".join(f"{metric:>12}" for metric in next(iter(scores.values())))
  lines = [f"{'':{width}}{columns}{'ms/query':>10}   nDCG@10 against {baseline}"]
  for name, found in scores.items():
    row = f"{name:{width}}" + "".join(f"{mean:12.4f}" for mean in found.means.values())
    row += f"{found.ms_per_query:10.2f}"
    if interval := report.get(f"{name}.ndcg@10_difference_interval"):
      row += f"   {report[f'{name}.ndcg@10_difference']:+.4f} [{interval[0]:+.4f}, {interval[1]:+.4f}]"
    lines.append(row)
  return "\n".join(lines)
