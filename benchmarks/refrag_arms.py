"""REFRAG on real questions: ways to reinforce, from the same demonstrations, beside single searches for the questions.

  python benchmarks/refrag_arms.py --config.data.path=FOLDER,FOLDER --config.data.parts.test=0.5 … --folds=2
    [--arm=outcome --arm=evidence --arm=experts --arm=mimic] [--workdir=runs/refrag_arms]

Takes the config of `configs/refrag.py:smollm2_135m`. In each fold one policy is trained on demonstrations, and every
arm starts from it. The reward of `outcome` is for the answer and for few searches, that of `evidence` also for found
gold documents; `experts` is evidence with a demonstration in each group and near misses that go on behind the policy's
first search; `mimic` is evidence with rollouts without a right answer pulled to the demonstrations' policy. An arm
whose scores are in the workdir is not run again, and one that was interrupted goes on from its checkpoint; other
settings need another workdir.

The peers are asked the questions alone, and find as many documents as a policy may see: one search of the rollouts' own
memory, BM25, an encoder (`--dense`), both fused, and a second search of the memory, of BM25 and of both by a rule.
Every policy is scored twice: with the memory inside its compiled rollouts, and with its queries answered by both fused,
around them. A question counts as found if all of its gold passages are.

Prints recall, exact match and F1 of every arm over all folds, with 95 % intervals, its searches and the share that kept
the format; paired differences to the one search of the same retriever; and, of exact match and F1, the differences
between after and before the reinforcement with the smallest effect that these questions would show with a power of .8.
The intervals are over questions: an arm is trained once in a fold.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from selfrag_jax.encoders.base import MINILM, TextFunction
from selfrag_jax.experiments import refrag
from selfrag_jax.experiments.base import by_training
from selfrag_jax.experiments.rollout_examples import write_examples
from selfrag_jax.mesh import configure_xla
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.retrieval.base import BaseRetriever
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.hybrid import HybridRetriever
from selfrag_jax.retrieval.multi_hop import MultiHopRetriever
from selfrag_jax.storage.arrays import npz_bytes, read_npz
from selfrag_jax.storage.atomic import write_bytes_atomic, write_json
from selfrag_jax.train.alarm import CollapseError
from selfrag_jax.train.phases.refrag import RLConfig
from selfrag_jax.train.rollouts import Scores
from selfrag_jax.train.workdir import open_workdir
from selfrag_jax.typing import Params

CONFIG = config_flags.DEFINE_config_file("config", "configs/refrag.py:smollm2_135m", "The config of all arms.")
WORKDIR = flags.DEFINE_string("workdir", "runs/refrag_arms", "The folder of checkpoints and scores.")
FOLDS = flags.DEFINE_integer(
  "folds", 1, "The folds of the questions that are tested, from the first on.", lower_bound=1
)
ARMS = flags.DEFINE_multi_enum("arm", None, ["outcome", "evidence", "experts", "mimic"], "An arm. Default: all.")
DENSE = flags.DEFINE_string("dense", MINILM, "The encoder of the dense peer.")
POWER = 1.96 + 0.84  # standard errors between no effect and one that is seen with a probability of .8
LEAST_CHANGED = 0.05  # of the answers, at least, in the spread of a difference
MEMORY, BEFORE, FUSED = "one search of the memory", "demonstrations only", "both fused"
BY_FUSED = " by both fused"  # scores of a policy whose queries these have answered
ANSWERS, BEHAVIOUR = ("exact_match", "f1"), ("searches", "valid")
FIELDS = ("all_gold", *ANSWERS, *BEHAVIOUR)

Found = dict[str, np.ndarray]  # the scores of each question, by field


def arms(rl: RLConfig) -> dict[str, RLConfig]:
  """Return the settings of each arm."""
  reward = dataclasses.replace(rl.reward, terms="weighted")
  evidence = dataclasses.replace(rl, reward=reward)
  answers = dataclasses.replace(reward, weights=dataclasses.replace(reward.weights, relevance=0.0))
  return {
    "outcome": dataclasses.replace(evidence, reward=answers),
    "evidence": evidence,
    "experts": dataclasses.replace(evidence, experts=True, resample=4),
    "mimic": dataclasses.replace(evidence, kl_on="wrong", kl_weight=rl.kl_weight or 0.1),
  }


def run_fold(experiment: refrag.Experiment, workdir: Path, chosen: Sequence[str]) -> None:
  """Run the arms of a fold whose scores are not there yet, and the peers."""
  keep = lambda name, arrays: write_bytes_atomic(workdir / f"{name}.npz", npz_bytes(arrays))
  final = experiment.evaluation.final
  score = lambda params, kind: scores_of(experiment.evaluate(params, "test", final, kind))
  n = min(experiment.task.size("test") or 0, final)
  if not (todo := [name for name in ("memory", "peers", "before", *chosen) if not (workdir / f"{name}.npz").exists()]):
    return
  others = retrievers(experiment)  # first: the encoder may be missing, which should not come after the training
  if "memory" in todo:
    keep("memory", {"all_gold": refrag.single_searches(experiment)["memory"][:n]})
  if "peers" in todo:
    keep("peers", peers(experiment, others, n))
  alone = {MEMORY: read_npz(workdir / "memory.npz")["all_gold"], **read_npz(workdir / "peers.npz")}
  for name, found in alone.items():  # now, and not only in the table that comes after hours of training
    print(f"{name:48}{found.mean():.3f} all gold found, without a policy", flush=True)
  take = by_training(workdir, experiment.loop, experiment.metadata)
  sft = take(experiment.sft_phase("sft", experiment.sft))
  fused = refrag.answered_by(experiment, others[FUSED])
  for name in [name for name in ("before", *chosen) if name in todo]:
    if (workdir / "before.npz").exists():  # what is known so far: the next arm may take hours
      print(f"\n{table([workdir], chosen)}\n", flush=True)
    try:
      params = sft if name == "before" else reinforce(experiment, workdir, name, sft)
    except CollapseError as error:
      print(f"{name}, fold {experiment.config['data']['fold']}: {error}", file=sys.stderr, flush=True)
      continue
    by_fused = {f"{field}{BY_FUSED}": values for field, values in score(params, fused).items()}
    keep(name, {**score(params, "memory"), **by_fused})


def reinforce(experiment: refrag.Experiment, workdir: Path, name: str, sft: Params) -> Params:
  """Train an arm, and write a page with rollouts before and after."""
  rl, metadata = arms(experiment.rl)[name], {**experiment.metadata, "arm": name}
  (workdir / name).mkdir(exist_ok=True)
  after = by_training(workdir / name, experiment.loop, metadata)(experiment.rl_phase(sft, rl=rl))
  shown, page = {"before": sft, "after": after}, workdir / name / "report.html"
  write_examples(page, experiment.runner, shown, experiment.rollout, rl, experiment.evaluation.batch_size)
  write_json(workdir / name / "config.json", experiment.config)  # last, as of a run of configs/refrag.py
  return after


def check_same(workdir: Path, config: Mapping[str, Any]) -> None:
  """Note the settings of a workdir. Raises ValueError if it has others, whose scores would stand in the same table."""
  path, given = workdir / "config.json", json.loads(json.dumps({**config, "dense": DENSE.value}))
  if not path.exists():
    write_json(path, given)
  elif json.loads(path.read_text()) != given:
    raise ValueError(f"{path} has other settings than this run: use another --workdir, or the same settings")


def scores_of(scores: Scores) -> Found:
  """Return the fields that are reported."""
  return {field: getattr(scores, field) for field in FIELDS}


def peers(experiment: refrag.Experiment, single: Mapping[str, BaseRetriever], n: int) -> Found:
  """Return whether each single search, and each by a rule, finds all gold passages of the first n test questions."""
  task: Any = experiment.task
  indices, budget = np.arange(n), experiment.document_budget
  questions, gold = task.texts("test", indices), task.batch("test", indices).gold
  documents = refrag.passages(experiment)
  memory = DenseRetriever(encoder=as_in_memory(experiment, documents))
  memory.add_documents(documents)
  twice = {MEMORY: memory, "BM25": single["BM25"], FUSED: single[FUSED]}
  by_rule = {f"{name}, second query by rule": MultiHopRetriever(retriever) for name, retriever in twice.items()}
  found = {}
  for name, retriever in {**single, **by_rule}.items():
    slots = [{int(document.id) for document in row} for row in retriever.retrieve_batch(questions, budget)]
    found[name] = np.array([set(g[g >= 0].tolist()) <= f for g, f in zip(gold, slots, strict=True)], np.float32)
  return found


def retrievers(experiment: refrag.Experiment) -> dict[str, BaseRetriever]:
  """Return the retrievers beside the memory, over its passages."""
  bm25, dense = BM25Retriever(), DenseRetriever(DENSE.value)
  for retriever in (bm25, dense):
    retriever.add_documents(refrag.passages(experiment))
  return {"BM25": bm25, DENSE.value: dense, FUSED: HybridRetriever([bm25, dense])}


def as_in_memory(experiment: refrag.Experiment, documents: Sequence[Document]) -> TextFunction:
  """Return the function that embeds texts as the rollouts do; what is in their memory is not embedded again."""
  task: Any = experiment.task
  vectors, ask = np.asarray(experiment.runner.memory(task.corpus).embeddings), experiment.runner.encoder.for_queries
  stored = {document.text: vector for document, vector in zip(documents, vectors, strict=False)}

  def embed(texts: Sequence[str]) -> np.ndarray:
    asked = list(dict.fromkeys(text for text in texts if text not in stored))
    known = stored | dict(zip(asked, ask(asked) if asked else [], strict=True))
    return np.stack([known[text] for text in texts])

  return embed


def row(name: str, scores: Found, first: np.ndarray) -> str:
  """Format the recall of an arm, its difference to the first one's, and the scores of its answers."""
  found = scores["all_gold"]
  line = "{:48}{:.3f} [{:.3f}, {:.3f}]".format(name, found.mean(), *bootstrap_interval(found))
  line += "  {:+.3f} [{:+.3f}, {:+.3f}]".format((found - first).mean(), *bootstrap_difference(found, first))
  for field in ANSWERS:
    if field in scores:
      line += "  {:.3f} [{:.3f}, {:.3f}]".format(scores[field].mean(), *bootstrap_interval(scores[field]))
  return line + "".join(f"  {scores[field].mean():6.2f}" for field in BEHAVIOUR if field in scores)


def gain(name: str, before: Found, after: Found) -> str:
  """Format the paired gains of the answers, each with the smallest effect that would have been seen.

  The differences tell how large it is; where hardly any answer has changed they tell too little, and a change of one
  answer of twenty is assumed.
  """
  parts = []
  for field in ANSWERS:
    gained = after[field] - before[field]
    smallest = POWER * max(gained.std(ddof=1), LEAST_CHANGED**0.5) / len(gained) ** 0.5
    interval = bootstrap_difference(after[field], before[field])
    parts.append("{} {:+.3f} [{:+.3f}, {:+.3f}], smallest {:.3f}".format(field, gained.mean(), *interval, smallest))
  return f"{name}: {'; '.join(parts)}"


def table(folds: Sequence[Path], chosen: Sequence[str]) -> str:
  """Format what the folds hold: all of them for each peer and arm; an arm that one of them lacks is left out."""
  joined = lambda parts: {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}
  read = lambda name: joined([read_npz(fold / f"{name}.npz") for fold in folds])
  done = [name for name in chosen if all((fold / f"{name}.npz").exists() for fold in folds)]
  files = {BEFORE: "before", **{name: name for name in done}}
  peers = {name: {"all_gold": found} for name, found in read("peers").items()} | {MEMORY: read("memory")}
  in_memory = {name: read(file) for name, file in files.items()}
  fused = {name: {field: scores[f"{field}{BY_FUSED}"] for field in FIELDS} for name, scores in in_memory.items()}
  n = len(peers[MEMORY]["all_gold"])
  lines = [f"{n} questions of {len(folds)} folds"]
  of_answers = f"{'exact match':22}{'F1':20}{'searches':>10}{'valid':>8}"
  for scored, one in (({**peers, **in_memory}, MEMORY), (fused, FUSED)):
    said = "policies whose queries both fused answer" if one == FUSED else ""
    lines += ["", f"{said:48}{'all gold found':22}{'to the one search':25}{of_answers}"]
    lines += [row(name, scores, peers[one]["all_gold"]) for name, scores in scored.items()]
  lines += ["", "after - before the reinforcement, and the smallest effect that would be seen with a power of .8"]
  return "\n".join(lines + [gain(name, in_memory[BEFORE], in_memory[name]) for name in done])


def main(argv: list[str]) -> None:
  """Run what is missing, fold by fold, and print the table."""
  if argv[1:]:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  logging.set_verbosity(logging.WARNING)
  configure_xla()
  config = CONFIG.value.to_dict()
  chosen = ARMS.value or list(arms(RLConfig()))
  with open_workdir(WORKDIR.value, "refrag") as workdir:
    folds = [Path(workdir) / f"fold{fold}" for fold in range(FOLDS.value)]
    for fold, folder in enumerate(folds):
      experiment = refrag.build({**config, "data": {**config["data"], "fold": fold}})
      check_same(Path(workdir), config)
      folder.mkdir(exist_ok=True)
      counts = {name: getattr(experiment.task, name) for name in refrag.COUNTS}
      print(f"fold {fold}: {counts}", flush=True)
      with jax.set_mesh(experiment.mesh):
        run_fold(experiment, folder, chosen)
    print(f"\n{table(folds, chosen)}")


if __name__ == "__main__":
  app.run(main)
