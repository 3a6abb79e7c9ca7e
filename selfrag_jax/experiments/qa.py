"""Question answering by a chat model: the same questions beside passages of several retrievers, gold ones, or none."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from selfrag_jax.checked import Checked, Count, Seed
from selfrag_jax.experiments.base import write_report
from selfrag_jax.experiments.chat_model import ChatModel, load_chat
from selfrag_jax.experiments.retrieval import given_path, share_encoders
from selfrag_jax.generate.complete import check_new_tokens
from selfrag_jax.metrics.question_answering import QuestionScores, score_question
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.reports import figures
from selfrag_jax.reports.files import write_file
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.retrieval.base import BaseRetriever, create
from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.multi_hop import by_search
from selfrag_jax.settings import read_config, settings
from selfrag_jax.storage.arrays import npz_bytes
from selfrag_jax.tasks.audit import complete_only, with_texts
from selfrag_jax.tasks.country_wordings import UNKNOWN
from selfrag_jax.tasks.official import corpus_of
from selfrag_jax.tasks.qa import load_task
from selfrag_jax.tasks.task import Conversation

Text = tuple[str, str]  # title and content


@dataclasses.dataclass(frozen=True)
class QAData(Checked):
  """Questions of an official file, drawn by a seed; the corpus is made of all passages of the file."""

  data_set: str = "hotpotqa"
  path: str = ""
  split: str = "validation"
  questions: Count = 200
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class QAConfig(Checked):
  """How questions are asked, by greedy decoding."""

  top_k: Count = 5  # passages, of all searches of a question together
  as_text: bool = True  # passages stand in the question as text; else in the turn that our fine-tuned models know
  cite: bool = False  # ask for citations such as [1]
  max_tokens: Count = 2048  # of a prompt; passages that do not fit are left out, the last first
  max_new_tokens: Count = 32
  batch_size: Count = 4


SECTIONS = {"model": str, "data": QAData, "qa": QAConfig, "arms": Mapping, "baseline": str}
FIXED = ("none", "gold")  # arms without a retriever
EXTRA = ("prompt_tokens", "tokens", "searches", "left_out")


class Shown(NamedTuple):
  """The passages of a question, best first, and the number of searches; None in an arm that shows none."""

  passages: Sequence[Text] | None
  searches: int = 0


@dataclasses.dataclass
class Experiment:
  """A chat model, questions with their corpus, and the retrievers of the arms (None: an arm without one)."""

  config: dict[str, Any]
  settings: QAConfig
  chat: ChatModel
  examples: Sequence[Conversation]
  corpus: Judged
  arms: dict[str, BaseRetriever | None]
  audit: str
  f1: Callable[[str, Sequence[str]], float]


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config, read its questions and load its model. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  section, data = settings(QAConfig, config["qa"], "qa"), settings(QAData, config["data"], "data")
  if not config["arms"]:
    raise ValueError("config.arms is empty; name at least one")
  if config["baseline"] not in config["arms"]:
    raise ValueError(f"config.baseline is {config['baseline']!r}; one of {', '.join(config['arms'])}")
  arms = {name: _retriever(name, settings) for name, settings in config["arms"].items()}
  task = load_task(data.data_set, given_path(data.path), split=data.split)
  documents = corpus_of(task)
  if not documents:
    raise ValueError(f"{task.name} holds no passages: there is nothing to search")
  task, audit = complete_only(task, documents)
  order = np.random.default_rng(data.seed).permutation(len(task))[: data.questions]
  chat = load_chat(config["model"])
  check_new_tokens(section.max_new_tokens, chat.context_tokens)
  examples = list(with_texts(task.select(order.tolist()), documents))
  if not any(example["answers"] for example in examples):
    raise ValueError(f"none of the {len(examples)} questions that were drawn has an answer; draw more, or another seed")
  f1 = lambda said, answers: task.reward({"answers": answers}, said)
  return Experiment(config, section, chat, examples, Judged(documents, {}, {}), arms, str(audit), f1)


def _retriever(name: str, section: Mapping[str, Any]) -> BaseRetriever | None:
  options = dict(section)
  kind = options.pop("type", name)
  if kind in FIXED:
    if options:
      raise ValueError(f"config.arms.{name} shows {kind}: it has no further settings, here {', '.join(options)}")
    return None
  try:
    return create(kind, **options)
  except ValueError as error:
    raise ValueError(f"config.arms.{name}: {error}") from None


def dry_run(experiment: Experiment) -> None:
  """Print the questions, the audit of their corpus, the arms, and the first prompt."""
  print(f"model {experiment.config['model']}; {len(experiment.examples)} questions; {experiment.audit}")
  for name, retriever in experiment.arms.items():
    print(f"{name}: {retriever.settings if retriever else 'no retriever'}")
  example = experiment.examples[0]
  for message in conversation(example, [_text(d) for d in example["gold"]], experiment.settings):
    print(f"{message['role']}: {message.get('content', message.get('documents'))}")


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Ask all questions in every arm; write `qa.json`, `qa.csv`, `qa.npz` and `qa.png`, and return the report."""
  workdir, began = epath.Path(workdir), time.monotonic()
  print(f"{len(experiment.examples)} questions; {experiment.audit}", flush=True)
  share_encoders([retriever for retriever in experiment.arms.values() if retriever], experiment.corpus)
  rows: dict[str, dict[str, np.ndarray]] = {}
  for name, retriever in experiment.arms.items():
    rows[name] = ask(experiment, find(experiment, name, retriever))
    scores = {metric: float(np.nanmean(values)) for metric, values in rows[name].items() if not np.isnan(values).all()}
    print(f"{name}: " + "  ".join(f"{metric} {value:.3f}" for metric, value in scores.items()), flush=True)
  report = summarize(experiment, rows) | {"wall_seconds": round(time.monotonic() - began, 1)}
  arrays = {f"{arm}.{metric}": values for arm, of in rows.items() for metric, values in of.items()}
  write_file(workdir / "qa.npz", npz_bytes(arrays))
  figures.answer_bars(workdir / "qa.png", report)
  write_report(workdir, "qa", report, as_rows(report), experiment.config)
  return report


run = evaluate


def find(experiment: Experiment, name: str, retriever: BaseRetriever | None) -> list[Shown]:
  """Return the passages of each question in an arm."""
  if retriever is None:
    kind = experiment.config["arms"][name].get("type", name)
    return [Shown([_text(d) for d in example["gold"]] if kind == "gold" else None) for example in experiment.examples]
  if not len(retriever):
    retriever.add_documents(experiment.corpus.documents)
  asked = [example["question"] for example in experiment.examples]
  found = retriever.retrieve_batch(asked, experiment.settings.top_k)
  # a search that finds nothing is one, too
  return [Shown([(d.title, d.content) for d in documents], max(len(by_search(documents)), 1)) for documents in found]


def ask(experiment: Experiment, shown: Sequence[Shown]) -> dict[str, np.ndarray]:
  """Ask all questions beside their passages, and score the answers: values of each metric, [N], NaN where none is."""
  section, chat, prompts, kept = experiment.settings, experiment.chat, [], []
  room = (chat.context_tokens or section.max_tokens + section.max_new_tokens) - section.max_new_tokens
  limit = min(section.max_tokens, room)
  for example, found in zip(experiment.examples, shown, strict=True):
    passages = fitting(found.passages or (), lambda some, e=example: chat.count(conversation(e, some, section)), limit)
    kept.append(passages)
    prompts.append(conversation(example, passages, section))
  answers = chat.answer(prompts, max_new_tokens=section.max_new_tokens, batch_size=section.batch_size)
  rows = []
  for example, found, passages, answer in zip(experiment.examples, shown, kept, answers, strict=True):
    gold = [_text(document) for document in example["gold"]]
    read = None if found.passages is None else passages
    scores = score_question(answer.text, example["answers"], read, gold, UNKNOWN, experiment.f1)
    extra = answer.prompt_tokens, answer.tokens, found.searches, len(found.passages or ()) - len(passages)
    rows.append([*scores, *extra])
  has_answer = [float(bool(example["answers"])) for example in experiment.examples]
  columns = np.array(rows, np.float64).T
  return {**dict(zip((*QuestionScores._fields, *EXTRA), columns, strict=True)), "has_answer": np.array(has_answer)}


def fitting(passages: Sequence[Text], count: Callable[[Sequence[Text]], int], limit: int) -> Sequence[Text]:
  """Return the first passages with which the prompt fits. Raises ValueError if the question alone does not."""
  for n in range(len(passages), -1, -1):
    if count(passages[:n]) <= limit:
      return passages[:n]
  raise ValueError(f"a question without any passage has {count(())} tokens, more than the {limit} of a prompt")


def conversation(example: Conversation, passages: Sequence[Text], section: QAConfig) -> list[dict[str, Any]]:
  """Return the messages that ask a question beside passages."""
  question, cited = f"Question: {example['question']}", " and cite them, as in [1]" if section.cite else ""
  if not passages:
    asked = f"Answer the question in a few words. If you do not know it: {UNKNOWN}"
    return [{"role": "user", "content": f"{asked}\n\n{question}"}]
  asked = f"Answer the question in a few words with what the documents say{cited}. If they do not say it: {UNKNOWN}"
  if section.as_text:
    listed = "\n".join(f"[{number}] (Title: {title}) {text}" for number, (title, text) in enumerate(passages, 1))
    return [{"role": "user", "content": f"{asked}\n\n{listed}\n\n{question}"}]
  documents = [{"title": title, "content": text} for title, text in passages]
  return [
    {"role": "system", "content": asked},
    {"role": "retrieval", "documents": documents},
    {"role": "user", "content": example["question"]},
  ]


def _text(document: Mapping[str, str]) -> Text:
  return document["title"], document.get("content", "")


def summarize(experiment: Experiment, rows: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
  """Return the mean of each metric in each arm, EM and F1 with intervals and paired differences to the baseline.

  EM, F1 and the other scores of answers count questions that have one; `no_answer` is the share of the others that were
  not answered.
  """
  report: dict[str, Any] = {"arms": {}}
  first = rows[experiment.config["baseline"]]
  for name, of in rows.items():
    answered = of["has_answer"] > 0
    of_answers = ("em", "f1", "contains", "joint_f1")
    chosen = {key: of[key][answered] if key in of_answers else of[key] for key in of if key != "has_answer"}
    found: dict[str, Any] = {
      key: float(np.nanmean(values)) for key, values in chosen.items() if not np.isnan(values).all()
    }
    for key in ("em", "f1"):
      found[f"{key}_interval"] = list(bootstrap_interval(chosen[key]))
      if of is not first:
        other = first[key][answered]
        found[f"{key}_difference"] = float((chosen[key] - other).mean())
        found[f"{key}_difference_interval"] = list(bootstrap_difference(chosen[key], other))
    if not answered.all():
      found["no_answer"] = float(of["em"][~answered].mean())
    report["arms"][name] = found
  return report | {
    "questions": len(experiment.examples),
    "with_answer": int((first["has_answer"] > 0).sum()),
    "baseline": experiment.config["baseline"],
    "audit": experiment.audit,
    "config": experiment.config,
  }


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report may have."""
  has_answer = np.array([float(bool(example["answers"])) for example in experiment.examples])
  zeros = {key: np.zeros(len(has_answer)) for key in (*QuestionScores._fields, *EXTRA)} | {"has_answer": has_answer}
  made = summarize(experiment, {name: dict(zeros) for name in experiment.arms})
  return set(numbers(made)) | {"wall_seconds"}


def as_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per arm."""
  names = list(
    dict.fromkeys(key for found in report["arms"].values() for key, x in found.items() if isinstance(x, float))
  )
  yield ["arm", *names]
  for arm, found in report["arms"].items():
    yield [arm, *(f"{found[name]:.4f}" if name in found else "" for name in names)]
