"""The citations of answers: does every one name a document that was shown, and do the documents support the statements?

  python benchmarks/citations.py --data=FOLDER,FOLDER --answers=answers.jsonl

Each FOLDER is a judged collection in the layout of BEIR, such as 100 questions of HotpotQA or of MuSiQue with their
passages. Each question is asked over all passages of its folder by `selfrag_jax.answer`. Answers are kept in a file, if
one is named, and are not asked for again.

Prints recall and precision by ALCE's definitions (arXiv 2305.14627; `metrics.citation_scores`), the share of the cited
documents that are gold, and for comparison:

  as written          the citations that the model wrote
  checked             `Answer.text`: numbers that were not shown are out, statements without a citation are attributed
  other documents     the statements, attributed over the documents of another question
  other numbers       the checked answers, each number exchanged for another one that was shown
  quoted              the first sentence of the best document with its citation, in place of an answer

The rules that attribute a statement are also the judge, so the recall of `checked` is the share of the statements that
some document supports, by the rules, and its precision is near its recall. What no rule of ours decides is the share of
gold passages: it can be compared with that of the shown ones, which is what citations by chance would have.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from selfrag_jax.answers import stream_answer
from selfrag_jax.generate.engine import Engine
from selfrag_jax.metrics.answers import substring_match
from selfrag_jax.metrics.citations import citation_scores, extract_citations_from_response, find_support
from selfrag_jax.metrics.sentences import split_sentences
from selfrag_jax.metrics.statistics import bootstrap_interval
from selfrag_jax.retrieval.base import create
from selfrag_jax.retrieval.beir import read_beir
from selfrag_jax.text.cited_stream import CitedStream
from selfrag_jax.train.load import load_model

DATA = flags.DEFINE_list("data", None, "Judged collections in the layout of BEIR.", required=True)
MODEL = flags.DEFINE_string("model", "smollm2-135m", "A source of load_model that chats.")
RETRIEVER = flags.DEFINE_string("retriever", "bm25", "bm25, dense or hybrid.")
QUESTIONS = flags.DEFINE_integer("questions", None, "The first so many questions of each folder (default: all).")
TOP_K = flags.DEFINE_integer("top_k", 5, "Documents shown.")
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "The longest answer, in tokens.")
SLOTS = flags.DEFINE_integer("slots", 8, "Answers written at once.")
ANSWERS = flags.DEFINE_string("answers", None, "A file that keeps the answers.")

Record = dict[str, Any]
Arms = dict[str, tuple[Sequence[str], Sequence[Record]]]


def said(record: Record) -> list[str]:
  """Return the texts of the shown documents, with their titles."""
  return [f"{source['title']}\n{source['text']}" for source in record["sources"]]


def attributed(text: str, documents: Sequence[str]) -> str:
  """Return a text with its citations replaced by those that the rules find."""
  stream = CitedStream(0, lambda statement, numbers: ())
  bare = stream.add(text) + stream.end()
  stream = CitedStream(len(documents), lambda statement, numbers: find_support(statement, documents))
  return stream.add(bare) + stream.end()


def renumbered(text: str, n: int, rng: np.random.Generator) -> str:
  """Return a text whose citations are exchanged for others of the n shown documents."""
  moves = rng.integers(1, max(n, 2), n + 1)
  return "\n".join(
    statement.text + "".join(f"[{(number - 1 + moves[number]) % n + 1}]" for number in statement.citations)
    for statement in extract_citations_from_response(text)
  )


def ask(folder: str, engine: Callable[[], Engine], kept: Mapping[tuple[str, str], Record]) -> list[Record]:
  """Return the answers to the questions of a folder, those that are kept as they are."""
  data, name = read_beir(folder), Path(folder).name
  lines = (Path(folder) / "queries.jsonl").read_text(encoding="utf-8").splitlines()
  accepted = {record["_id"]: record.get("answer", "") for record in map(json.loads, lines)}
  ids = list(data.queries)[: QUESTIONS.value]
  new, retriever = [id for id in ids if (name, id) not in kept], create(RETRIEVER.value)
  if new:
    retriever.add_documents(data.documents)
  options = {"top_k": TOP_K.value, "max_new_tokens": MAX_NEW_TOKENS.value}
  asked = {"folder": name, "model": MODEL.value, "retriever": RETRIEVER.value, **options}
  if other := [record for (where, _), record in kept.items() if where == name and record["asked"] != asked]:
    raise ValueError(f"{ANSWERS.value} has answers that were asked with {other[0]['asked']}; name another file")
  streams = {id: stream_answer(data.queries[id], retriever, engine(), **options) for id in new}
  made = {}
  for n, (id, stream) in enumerate(streams.items(), 1):
    for _ in stream:
      pass
    assert stream.answer is not None
    record = {"asked": asked, "id": id, "gold": list(data.qrels[id]), "accepted": accepted[id]}
    made[id] = record | stream.answer.to_dict()
    print(f"\r{name}: {n} of {len(new)} answers", end="", file=sys.stderr, flush=True)
    if ANSWERS.value:
      with open(ANSWERS.value, "a", encoding="utf-8") as file:
        file.write(json.dumps(made[id], ensure_ascii=False) + "\n")
  print(file=sys.stderr)
  return [made.get(id) or kept[name, id] for id in ids]


def gold_share(records: Sequence[Record], numbers: Callable[[Record], Sequence[int]]) -> str:
  """Format the share of gold passages among chosen documents, over questions that have one chosen."""
  shares = []
  for record in records:
    chosen = [record["sources"][number - 1]["id"] in record["gold"] for number in set(numbers(record))]
    if chosen:
      shares.append(np.mean(chosen))
  if len(shares) < 2:
    return "-"
  low, high = bootstrap_interval(np.array(shares))
  return f"{np.mean(shares):.3f} [{low:.3f}, {high:.3f}] of {len(shares)} questions"


def cited(text: str) -> list[int]:
  return [number for statement in extract_citations_from_response(text) for number in statement.citations]


def make_arms(records: Sequence[Record]) -> Arms:
  """Return, for each arm, texts and the records whose documents are shown beside them."""
  rng, n = np.random.default_rng(0), len(records)
  others = [*records[n // 2 :], *records[: n // 2]]
  of_others = [attributed(record["written"], said(other)) for record, other in zip(records, others, strict=True)]
  quotes = [f"{split_sentences(r['sources'][0]['text'])[0]} [1]" if r["sources"] else "" for r in records]
  numbers = [renumbered(record["text"], len(record["sources"]), rng) for record in records]
  return {
    "as written": ([record["written"] for record in records], records),
    "checked": ([record["text"] for record in records], records),
    "other documents": (of_others, others),
    "other numbers": (numbers, records),
    "quoted": (quotes, records),
  }


def report(name: str, arms: Arms) -> None:
  records = arms["checked"][1]
  print(f"\n{name}: {len(records)} questions, {RETRIEVER.value}, {TOP_K.value} documents, {MODEL.value}")
  print("                      recall                  precision               statements  citations  not shown")
  for arm, (texts, shown) in arms.items():
    scores = [citation_scores(text, said(record)) for text, record in zip(texts, shown, strict=True)]
    recall, precision = (np.array([getattr(s, kind) for s in scores]) for kind in ("recall", "precision"))
    cells = [f"{np.mean(v):.3f} [{{:.3f}}, {{:.3f}}]".format(*bootstrap_interval(v)) for v in (recall, precision)]
    unknown = sum(not 1 <= k <= len(r["sources"]) for text, r in zip(texts, shown, strict=True) for k in cited(text))
    counts = sum(s.statements for s in scores), sum(s.citations for s in scores)
    print(f"{arm:20}  {cells[0]:22}  {cells[1]:22}  {counts[0]:10,}  {counts[1]:9,}  {unknown:9,}")
  print(f"gold among the shown documents: {gold_share(records, lambda r: range(1, len(r['sources']) + 1))}")
  print(f"gold among the cited documents: {gold_share(records, lambda r: cited(r['text']))}")
  answered = gold_share(
    [r for r in records if r["text"]], lambda r: cited(r["text"]) and range(1, len(r["sources"]) + 1)
  )
  print(f"gold among the shown documents of the questions with a citation: {answered}")
  right = np.mean([substring_match(record["text"], [record["accepted"]]) for record in records])
  abstained = sum(record["abstained"] for record in records)
  removed = sum(len(record["removed"]) for record in records)
  print(f"the accepted answer stands in {right:.3f} of the texts; {abstained} abstained; {removed} numbers taken out")


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  kept: dict[tuple[str, str], Record] = {}
  if ANSWERS.value and Path(ANSWERS.value).exists():
    records = map(json.loads, Path(ANSWERS.value).read_text(encoding="utf-8").splitlines())
    kept = {(record["asked"]["folder"], record["id"]): record for record in records}
  made: list[Engine] = []

  def engine() -> Engine:
    if not made:
      made.append(Engine(load_model(MODEL.value), slots=SLOTS.value))
    return made[0]

  answers = {Path(folder).name: ask(folder, engine, kept) for folder in DATA.value}
  arms = {name: make_arms(records) for name, records in answers.items()}
  for name in arms:
    report(name, arms[name])
  if len(arms) > 1:
    merged = {arm: zip(*(each[arm] for each in arms.values()), strict=True) for arm in arms[name]}
    join = lambda parts: [one for part in parts for one in part]
    report("all", {arm: (join(texts), join(shown)) for arm, (texts, shown) in merged.items()})


if __name__ == "__main__":
  app.run(main)
