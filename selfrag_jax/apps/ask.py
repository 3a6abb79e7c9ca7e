"""Questions to a model with a memory: each answer comes with the retrieved chunks, their sources and similarities."""

import collections
import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from selfrag_jax.experiments.self_rag import last_phase, make_tokenizer
from selfrag_jax.generate.complete import check_new_tokens
from selfrag_jax.generate.sampling import GREEDY, SamplingConfig
from selfrag_jax.memory.journal import is_free
from selfrag_jax.memory.records import Chunk
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.reports.page import write_answers
from selfrag_jax.self_rag import SelfRAGConfig, SelfRAGModel
from selfrag_jax.settings import settings
from selfrag_jax.storage.atomic import is_local, write_bytes_atomic
from selfrag_jax.tasks.text import read_passages, text_files
from selfrag_jax.text.chat import CHATML, render_for_completion
from selfrag_jax.text.printable import printable
from selfrag_jax.train.load import LoadedModel, load_model

SAME = 0.999  # the least cosine of two embeddings of one chunk by the same model


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
    if store.size and len(newest := store.token_ids[-1]):
      now, then = rag.embed([newest.tolist()])[0], store.vectors([store.ids[-1]])[0]
      if now @ then < SAME * np.linalg.norm(now) * np.linalg.norm(then):
        raise ValueError(f"{memory} was not written by this model, which embeds the newest chunk there otherwise")
  except BaseException:
    store.close()  # gives the folder back
    raise
  return rag


def remember(rag: SelfRAGModel, path: epath.PathLike) -> int:
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


def ask(
  rag: SelfRAGModel,
  prompts: Iterable[str],
  max_new_tokens: int = 64,
  sampling: SamplingConfig = GREEDY,
  seed: int = 0,
  batch: int = 32,
) -> Iterator[dict[str, Any]]:
  """Answer prompts, `batch` at once. Yields records that can be written as JSON.

  A chat model gets the chunks as notes in a user's turn; any other model gets `[MEM] chunk … [SEP] prompt`, which it
  has learned to read. A record has `question`, `answer` and `chunks`, best first, each with `text`, `place` (file and
  line), `score`, `metadata`.
  """
  chats = "<|im_end|>" in rag.tokenizer.special
  options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling}
  prompts = iter(prompts)
  while part := list(itertools.islice(prompts, batch)):
    if chats:
      found = rag.explain(part)
      inputs = [_chat(rag, question, chunks) for question, chunks in zip(part, found, strict=True)]
      answers = rag.generate(inputs, use_memory=False, stop=("<|im_end|>",), seed=seed, **options)
    else:
      answers = rag.generate(part, seed=seed, **options)
      found = [answer.retrieved for answer in answers]
    seed += 1
    for question, answer, retrieved in zip(part, answers, found, strict=True):
      chunks = [
        {"text": c.text, "place": _place(c.metadata), "score": c.score, "metadata": dict(c.metadata)} for c in retrieved
      ]
      yield {"question": question, "answer": answer.text, "chunks": chunks}


def _chat(rag: SelfRAGModel, question: str, chunks: Sequence[Chunk]) -> list[int]:
  notes = "".join(f"{chunk.text}\n" for chunk in chunks)
  content = f"Answer from these notes.\n\n{notes}\nQuestion: {question}" if notes else question
  return render_for_completion(rag.tokenizer, {"messages": [{"role": "user", "content": content}]}, CHATML)


def _place(metadata: Any) -> str:
  source = metadata["source"] or "position"
  return f"{source}:{metadata.get('line', metadata['position'])}"


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
