"""A chat in the terminal with a model that remembers: answers come as they are written, commands begin with a slash.

Ctrl-C stops an answer, and not the chat; it leaves at an empty prompt, pressed twice.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from selfrag_jax.answers import Answer, AnswerStream
from selfrag_jax.apps.ask import as_record, place, remember
from selfrag_jax.apps.assistant import Assistant, ChatAssistant, CompletionAssistant
from selfrag_jax.checked import suggestion
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.generation import GenerationSettings
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.memory.journal import StoreError
from selfrag_jax.self_rag import SelfRAGModel
from selfrag_jax.storage.generation import FolderError
from selfrag_jax.tasks.text import text_files
from selfrag_jax.text.printable import printable
from selfrag_jax.train.interrupt import interrupt
from selfrag_jax.train.load import LoadedModel

PROMPT = "> "
MOST_LISTED = 10  # texts among which /forget lets one choose
MENDABLE = (ValueError, OSError, StoreError, FolderError)  # errors that end a command, and not the chat
PATHS = ("/", "./", "../", "~")  # how what cannot be meant as a text begins
COMMANDS = {
  "remember": ("TEXT or PATH", "keep a text in the memory, or the texts of a file or a folder"),
  "forget": ("ID or TEXT", "delete the text with this number, or the one that has these words"),
  "explain": ("", "show the texts behind the last answer, where they are from and how well they fit"),
  "load": ("FOLDER", "search this knowledge base, too (launch/build_kb.py makes one)"),
  "history": ("", "show what was said; the model sees as much of it as fits"),
  "clear": ("", "forget what was said, but not the memory"),
  "help": ("", "show this"),
  "quit": ("", "leave (so does Ctrl-D)"),
}


class Chat:
  """A conversation with an assistant in a terminal; `answers` are those so far."""

  def __init__(self, assistant: Assistant, settings: GenerationSettings, *, explains: bool = False):
    """explains: show the texts behind each answer."""
    self._assistant, self._settings, self._explains = assistant, settings, explains
    self.answers: list[Answer] = []
    self._begin = 0  # the first answer that the model sees
    self._stream: AnswerStream | None = None  # the answer that is being written
    self._is_stopped = self._is_amid_line = False
    self._state: Literal["idle", "reading", "working", "answering"] = "idle"

  def run(self) -> None:
    """Talk until the user leaves."""
    self._say(f"The memory holds {len(self._assistant.memory):,} texts. /help shows the commands, Ctrl-D leaves.")
    with self._interrupts(), _line_editing():
      while (line := self._read()) is not None:
        try:
          try:
            self._state = "working"
            if not self.obey(line):
              break
          finally:
            self._state = "idle"
        except KeyboardInterrupt:
          self._say("stopped")
        except MENDABLE as error:
          self._say(f"error: {printable(' '.join(str(error).split()))}")

  def obey(self, line: str) -> bool:
    """Answer a line, or do what its command says; False: the user leaves."""
    line = line.strip()
    if not line.startswith("/"):
      if line:
        self._answer(line)
      return True
    name, _, argument = line[1:].partition(" ")
    if name not in COMMANDS:
      raise ValueError(f"there is no command /{name}; {suggestion(f'/{name}', [f'/{known}' for known in COMMANDS])}")
    usage, argument = COMMANDS[name][0], argument.strip()
    if bool(usage) != bool(argument):
      raise ValueError(f"use it as /{name} {usage}".rstrip())
    if name == "quit":
      return False
    getattr(self, f"_{name}")(*[argument] * bool(usage))
    return True

  # --- answers ---

  def _answer(self, question: str) -> None:
    self._is_stopped, self._state = False, "answering"
    history = [turn for answer in self.answers[self._begin :] if answer.text for turn in answer.turns]
    try:
      self._stream = self._assistant.stream(question, history, self._settings)
      if self._is_stopped:  # while the texts were looked for
        self._stream.cancel()
      for piece in self._stream:
        self._write(printable(piece, keep="\n\t"))
      answer = self._stream.answer
    finally:
      self._stream, self._state = None, "working"
    assert answer is not None  # an error was raised otherwise
    self._write(" (stopped)\n" if answer.finish_reason == "cancelled" else "\n")
    self.answers.append(answer)
    if self._explains:
      self._explain()
    else:
      for source in answer.sources:
        if source.is_cited:
          self._say(f"  [{source.number}] {printable(place(source))}  {printable(source.title)}".rstrip())

  def _explain(self) -> None:
    if not self.answers:
      raise ValueError("there is no answer yet to explain")
    answer = self.answers[-1]
    if not answer.sources:
      self._say("  nothing was found, the model answered alone")
    for source in answer.sources:
      id = f"#{source.id}  " if source.id in self._assistant.memory else ""
      score = f"{source.score:+.3f}" if source.score is not None else ""
      mark = "*" if source.is_cited else " "
      self._say(f"  [{source.number}]{mark} {score}  {printable(f'{id}{place(source)}  {source.said}')}")
    if any(source.is_cited for source in answer.sources):
      self._say("  * is cited")
    for citation in answer.citations:
      if citation.is_attributed:
        self._say(f"  [{citation.number}] was found to support: {printable(citation.statement)}")
    if answer.removed:
      self._say(f"  the model cited {', '.join(map(str, answer.removed))}, which no text has: taken out")
    if answer.dropped:
      self._say(f"  {answer.dropped} more were found, and did not fit into the context")

  # --- the memory ---

  def _remember(self, said: str) -> None:
    memory = self._assistant.memory
    path = Path(said).expanduser()
    if said.startswith(PATHS) or _exists(path):
      if not _exists(path):
        raise FileNotFoundError(f"{said} does not exist; a text that begins with {said[0]} is remembered from a file")
      text_files(path)  # raises for other files than texts
      told = f"remembered {remember(self._assistant, path):,} texts of {said}"
    else:
      ids = self._assistant.write_to_memory([said], [{"source": "chat"}])
      told = f"remembered as {', '.join(f'#{id}' for id in ids)}"
    self._say(f"{printable(told)}; the memory holds {len(memory):,} of at most {memory.settings['max_chunks']:,}")

  def _forget(self, said: str) -> None:
    memory, id = self._assistant.memory, said.removeprefix("#")
    if id not in memory:
      texts = dict(zip(memory.ids, memory.chunks, strict=True))
      same = [i for i, text in texts.items() if text == said]
      like = same or [i for i, text in texts.items() if said.casefold() in text.casefold()]
      if not like:
        raise ValueError(f"the memory has no text with the number or the words {said}")
      if len(like) > 1:
        self._say(f"{len(like):,} texts have these words; forget them by their numbers:")
        for i in like[:MOST_LISTED]:
          self._say(f"  #{printable(i)}  {printable(texts[i])}")
        return
      [id] = like
    text = memory.get(id).text
    memory.delete(id)
    self._say(f"forgotten: {printable(text)}")

  def _load(self, folder: str) -> None:
    count = self._assistant.load(str(Path(folder).expanduser()))
    self._say(f"{count:,} documents of {printable(folder)} are searched, too")

  # --- the conversation ---

  def _history(self) -> None:
    for answer in self.answers[self._begin :]:
      self._say(f"{PROMPT}{printable(answer.question)}\n{printable(answer.text, keep=chr(10) + chr(9))}")

  def _clear(self) -> None:
    self._begin = len(self.answers)

  def _help(self) -> None:
    for name, (usage, does) in COMMANDS.items():
      self._say(f"  {f'/{name} {usage}':24}{does}")
    self._say("Everything else is a question. Ctrl-C stops an answer.")

  # --- the terminal ---

  def _read(self) -> str | None:
    """Return the next line; None: the user leaves."""
    is_asked = False
    while True:
      try:
        try:
          self._state = "reading"
          return input(PROMPT)
        finally:
          self._state = "idle"
      except EOFError:
        self._write("\n")
        return None
      except KeyboardInterrupt as stopped:
        self._write("\n")
        is_empty = not str(stopped)
        if is_empty and is_asked:
          return None
        if is_empty:
          self._say("(Ctrl-C again leaves)")
        is_asked = is_empty

  @contextlib.contextmanager
  def _interrupts(self) -> Iterator[None]:
    """Let Ctrl-C end what is being done, and not the chat."""
    before = signal.signal(signal.SIGINT, self._interrupt)
    try:
      yield
    finally:
      signal.signal(signal.SIGINT, before)

  def _interrupt(self, number: int, frame: FrameType | None) -> None:
    if self._state == "answering":  # an exception amid a program would lose what the engine holds
      self._is_stopped = True
      if self._stream is not None:
        self._stream.cancel()
    elif self._state == "reading":
      raise KeyboardInterrupt(_typed())
    elif self._state == "working":
      if self._assistant.memory.is_changing:  # an exception would close the memory
        again = lambda: os.kill(os.getpid(), number) if self._state == "working" else None
        threading.Timer(0.01, again).start()
      else:
        interrupt(number, frame)

  def _say(self, line: str) -> None:
    self._write(f"{chr(10) * self._is_amid_line}{line}\n")

  def _write(self, text: str) -> None:
    if text:
      self._is_amid_line = not text.endswith("\n")
      sys.stdout.write(text)
      sys.stdout.flush()


def talk(
  who: SelfRAGModel | ChatAssistant,
  model: LoadedModel,
  max_new_tokens: int,
  sampling: SamplingConfig,
  seed: int = 0,
  *,
  explains: bool = False,
) -> list[dict[str, Any]]:
  """Chat with a model until the user leaves, and return the answers as `ask` does."""
  assistant = who if isinstance(who, ChatAssistant) else CompletionAssistant(Engine(model), who)
  settings = GenerationSettings(max_new_tokens, **vars(sampling), seed=seed)
  chat = Chat(assistant, settings, explains=explains)
  chat.run()
  return [as_record(answer) for answer in chat.answers]


def _exists(path: Path) -> bool:
  try:
    return path.exists()
  except (OSError, ValueError):  # a text that is too long for a path, or holds a zero byte
    return False


def _typed() -> str:
  """Return what stands in the line that is being typed."""
  readline = sys.modules.get("readline")
  return readline.get_line_buffer() if readline else ""


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
  """Let the arrows edit a line and fetch earlier ones, and let Tab complete a command."""
  try:
    import readline
  except ImportError:  # Windows has a line editor of its own
    yield
    return
  names = [f"/{name}" for name in COMMANDS]
  complete = lambda text, n: [*[name for name in names if text and name.startswith(text)], None][n]
  before, delimiters = readline.get_completer(), readline.get_completer_delims()
  readline.set_completer(complete)
  readline.set_completer_delims(" ")
  readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
  try:
    yield
  finally:
    readline.set_completer(before)
    readline.set_completer_delims(delimiters)
