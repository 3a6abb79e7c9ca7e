"""Questions to a model with a memory: each answer comes with the retrieved texts, their sources and similarities."""

import collections
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from etils import epath

from selfrag_jax.answers import Answer
from selfrag_jax.apps.assistant import Assistant, ChatAssistant
from selfrag_jax.apps.memory import RELATED, holds, open_store
from selfrag_jax.cited_prompt import Source
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.encoders.load import load_encoder
from selfrag_jax.experiments.self_rag import last_phase, make_tokenizer
from selfrag_jax.generate.complete import check_new_tokens
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.generation import GenerationSettings
from selfrag_jax.generate.sampling import GREEDY, SamplingConfig
from selfrag_jax.memory.journal import is_free
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.reports.page import write_answers
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.self_rag import SelfRAGConfig, SelfRAGModel
from selfrag_jax.settings import settings
from selfrag_jax.storage.atomic import is_local, write_bytes_atomic
from selfrag_jax.tasks.text import read_passages, text_files
from selfrag_jax.text.chat import find_template
from selfrag_jax.text.printable import printable
from selfrag_jax.train.load import LoadedModel, load_model


def open_model(source: str, phase: str | None = None, max_new_tokens: int = 1) -> tuple[LoadedModel, SelfRAGConfig]:
  """Load a run of the Self-RAG phases with its settings, or pretrained weights with the default settings.

  Raises ValueError for a run of another experiment and for more new tokens than a model can write, and
  FileNotFoundError if there is nothing at `source`.
  """
  check_new_tokens(max_new_tokens)
  loaded = load_model(source, phase or last_phase(source))
  check_new_tokens(max_new_tokens, loaded.context_tokens)
  if not loaded.metadata:
    return loaded, SelfRAGConfig()
  config = loaded.metadata["config"]
  if "self_rag" not in config:
    raise ValueError(f"{source} holds a model of experiment {config['experiment']!r}, which learned no memory")
  tokenizer = make_tokenizer(config["data"])
  if tokenizer.fingerprint != loaded.metadata["tokenizer"]["fingerprint"]:
    raise ValueError(f"{source} was trained with another tokenizer than {tokenizer.name} is now")
  return dataclasses.replace(loaded, tokenizer=tokenizer), settings(SelfRAGConfig, config["self_rag"], "self_rag")


def open_rag(
  model: LoadedModel, config: SelfRAGConfig, memory: str | None = None, top_k: int | None = None
) -> SelfRAGModel:
  """Give a model the memory in a folder, which is created if it is missing; None: a memory that is not kept.

  Raises ValueError for a memory that another model has written, or the same model with other parameters.
  """
  width = model.config.d_model
  if memory and not is_free(memory):
    store = MemoryStore.load(memory)
    sizes = {name: store.settings[name] for name in ("max_chunks", "chunk_size")}
    config = dataclasses.replace(config, **sizes)
  else:
    store = MemoryStore(width, config.max_chunks, chunk_size=config.chunk_size, metric=config.metric, path=memory)
  if top_k is not None:
    config = dataclasses.replace(config, top_k=top_k)
  try:
    rag = SelfRAGModel(model, store, config)
    newest = store.token_ids[-1].tolist() if store.size else []
    if newest and not holds(store, store.ids[-1], rag.embed([newest])[0]):
      raise ValueError(f"{memory} was not written by this model, which embeds the newest chunk there otherwise")
  except BaseException:
    store.close()  # gives the folder back
    raise
  return rag


def open_assistant(
  model: LoadedModel,
  config: SelfRAGConfig,
  memory: str | None = None,
  top_k: int | None = None,
  encoder: str | None = None,
  knowledge_base: str | None = None,
) -> SelfRAGModel | ChatAssistant:
  """Give a model the memory in a folder, which is created if it is missing; None: a memory that is not kept.

  A pretrained model that chats gets a memory of texts, which an `encoder` of `load_encoder` finds (None: hashed words),
  and may search a knowledge base in a folder; any other model finds chunks by its own states. Raises ValueError for a
  memory that another encoder or model has written, and for what only chat models have.
  """
  if not chats(model):
    if encoder or knowledge_base:
      flag = f"--encoder={encoder}" if encoder else f"--knowledge_base={knowledge_base}"
      raise ValueError(f"{flag}: this model finds chunks by its own states; only pretrained models that chat have that")
    return open_rag(model, config, memory, top_k)
  engine, base = Engine(model), RetrievalManager(None, knowledge_base) if knowledge_base else None
  store = open_store(memory, load_encoder(encoder) if encoder else HashingEncoder(), min_score=RELATED)
  return ChatAssistant(engine, store, top_k or config.top_k, base)


def chats(model: LoadedModel) -> bool:
  """Tell whether a model is a pretrained one whose tokenizer has the marks of a chat template."""
  return not model.metadata and model.tokenizer is not None and find_template(model.tokenizer) is not None


def remember(rag: SelfRAGModel | Assistant, path: epath.PathLike) -> int:
  """Write the passages of a file, or of all files of a folder, to the memory, in place of their earlier chunks.

  A passage is a line of a `.txt` file or a record of another file; its `source` is the absolute path of the file, links
  resolved. Each file is one change: if the change fails, or the process ends, the earlier chunks of the file stay.
  Returns the number of chunks written.
  """
  chunks, old = 0, collections.defaultdict(list)
  for chunk_id, metadata in zip(rag.memory.ids, rag.memory.metadata, strict=True):
    old[str(metadata["source"])].append(chunk_id)
  files = {os.path.realpath(file) if is_local(file) else str(file): file for file in text_files(path)}
  for source, file in files.items():
    numbers, texts = zip(*read_passages(file), strict=True)
    metadata = [{"source": source, "line": n} for n in numbers]
    there = [chunk_id for chunk_id in old[source] if chunk_id in rag.memory]  # a full memory drops its oldest chunks
    chunks += len(rag.write_to_memory(texts, metadata, replacing=there))
  return chunks


def remember_all(who: SelfRAGModel | Assistant, paths: Iterable[str]) -> None:
  """Write files and folders to the memory, and tell how many chunks they have."""
  for path in paths:
    print(f"remembered {printable(path)}: {remember(who, path):,} chunks", file=sys.stderr)
    held, most = who.memory.size, who.memory.settings["max_chunks"]
    print(f"the memory holds {held:,} of at most {most:,}; the oldest go when it is full", file=sys.stderr)


def ask(
  who: SelfRAGModel | ChatAssistant,
  prompts: Iterable[str],
  max_new_tokens: int = 64,
  sampling: SamplingConfig = GREEDY,
  seed: int = 0,
  batch: int = 32,
) -> Iterator[dict[str, Any]]:
  """Answer prompts, `batch` at once. Yields records that can be written as JSON.

  A chat model answers with citations (`selfrag_jax.answers`); any other model gets `[MEM] chunk … [SEP] prompt`, which
  it has learned to read. A record has `question`, `answer` and `chunks`, best first, each with `text`, `place` (file
  and line), `score`, `metadata`; those of a chat model also `number` and `is_cited`.
  """
  prompts = iter(prompts)
  while part := list(itertools.islice(prompts, batch)):
    if isinstance(who, ChatAssistant):
      settings = GenerationSettings(max_new_tokens, **vars(sampling), seed=seed)
      for stream in [who.stream(question, (), settings) for question in part]:
        collections.deque(stream, maxlen=0)
        assert stream.answer is not None  # an error was raised otherwise
        yield as_record(stream.answer)
    else:
      written = who.generate(part, max_new_tokens, sampling=sampling, seed=seed)
      for question, answer in zip(part, written, strict=True):
        chunks = [
          {"text": c.text, "place": _place(c.metadata), "score": c.score, "metadata": dict(c.metadata)}
          for c in answer.retrieved
        ]
        yield {"question": question, "answer": answer.text, "chunks": chunks}
    seed += 1


def print_answers(answers: Iterable[dict[str, Any]], explains: bool) -> list[dict[str, Any]]:
  """Print answers as they come, with what was retrieved for them if it `explains`; return all of them."""
  printed = []
  for answer in answers:
    printed.append(answer)
    print(shown(answer), *[explained(answer)] * explains, sep="\n", flush=True)
  return printed


def as_record(answer: Answer) -> dict[str, Any]:
  """Return an answer as a record of `ask`."""
  chunks = [
    {
      "text": source.said,
      "place": place(source),
      "score": source.score,
      "metadata": dict(source.metadata),
      "number": source.number,
      "is_cited": source.is_cited,
    }
    for source in answer.sources
  ]
  return {"question": answer.question, "answer": answer.text, "chunks": chunks}


def place(source: Source) -> str:
  """Return where a source is from: the file and line of a chunk, the file or the id of a document."""
  is_of_memory = {"source", "position", "timestamp"} <= source.metadata.keys()
  return _place(source.metadata) if is_of_memory else source.source or source.id


def _place(metadata: Any) -> str:
  line = metadata.get("line", "" if metadata["source"] else metadata["position"])
  return f"{metadata['source'] or 'position'}{':' * (line != '')}{line}"


def explained(answer: dict[str, Any]) -> str:
  """Format the chunks of an answer for a terminal, one line per chunk, whatever characters a chunk has."""
  lines = [
    f"  {chunk['score']:+.3f}  {printable(chunk['place'])}  {printable(chunk['text'])}" for chunk in answer["chunks"]
  ]
  return "\n".join(lines) or "  nothing was retrieved: the memory is empty"


def shown(answer: dict[str, Any]) -> str:
  """Format a question and its answer, which may have several lines, for a terminal."""
  return f"{printable(answer['question'])} {printable(answer['answer'], keep=chr(10) + chr(9))}"


def save_answers(path: epath.PathLike, answers: Sequence[dict[str, Any]]) -> None:
  """Write answers to a `.jsonl` file or to an `.html` page. Raises ValueError for a name with another suffix."""
  suffix = check_output(path)
  if suffix == ".html":
    write_answers(path, "Answers and what was retrieved", answers)
  else:
    write_bytes_atomic(path, "".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers).encode())


def check_output(path: epath.PathLike) -> str:
  """Return the suffix of a file of answers. Raises ValueError unless it is `.jsonl` or `.html` and can be written."""
  file = epath.Path(path)
  if file.suffix not in (".jsonl", ".html"):
    raise ValueError(f"{path}: answers are written to a .jsonl or a .html file")
  if is_local(file):
    if not file.parent.is_dir():
      raise ValueError(f"{path}: there is no folder {file.parent}; make it, or give another")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
      raise ValueError(f"{path} cannot be written: {'it is a folder' if file.is_dir() else 'its folder is protected'}")
  return file.suffix
