"""The chat: commands, what is remembered, and Ctrl-C, in this process and in a terminal of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from selfrag_jax import BM25Retriever, Document, MemoryStore, RetrievalManager
from selfrag_jax.apps.assistant import ChatAssistant
from selfrag_jax.apps.chat import COMMANDS, Chat
from selfrag_jax.apps.memory import RELATED, open_store
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.generate.generation import GenerationSettings
from tests.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
# pexpect forks, and its child runs another program at once
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


class Terminal:
  """A chat whose lines are typed by a test, and what it has printed since the line before."""

  def __init__(self, capsys, monkeypatch, *texts, memory=None, **options):
    self.engine = ScriptedEngine(*texts, **options)
    store = open_store(memory, HashingEncoder(), min_score=RELATED)
    self.assistant = ChatAssistant(self.engine, store)
    self.chat = Chat(self.assistant, GenerationSettings(32))
    self._capsys, self._patch = capsys, monkeypatch

  def type(self, *lines):
    """Type lines and Ctrl-D (an exception is raised in the place of a line), and return what is printed."""
    left = list(lines)

    def read(prompt):
      line = left.pop(0) if left else EOFError()
      if isinstance(line, BaseException):
        raise line
      return line

    self._patch.setattr("builtins.input", read)
    self._capsys.readouterr()
    self.chat.run()
    first, *printed = self._capsys.readouterr().out.splitlines()
    assert first.endswith("/help shows the commands, Ctrl-D leaves.")
    return printed[:-1]  # the last one is the end of the line with Ctrl-D


@pytest.fixture
def terminal(capsys, monkeypatch):
  return lambda *texts, **options: Terminal(capsys, monkeypatch, *texts, **options)


def test_what_is_remembered_is_found_cited_explained_and_forgotten(terminal, tmp_path):
  notes = tmp_path / "my notes.txt"
  notes.write_text("amber is yellow\nquartz is hard\n")
  chat = terminal("The password is bluebird. It is long [4].", "Quartz is hard [1].", "I do not know.", "")
  assert chat.type("/remember The password is bluebird.", f"/remember {notes}") == [
    "remembered as #0; the memory holds 1 of at most 10,000",
    f"remembered 2 texts of {notes}; the memory holds 3 of at most 10,000",
  ]
  assert chat.type("What is the password?", "/explain") == [
    "The password is bluebird. [1] It is long.",
    "  [1] chat",
    "  [1]* +0.593  #0  chat  The password is bluebird.",
    "  * is cited",
    "  [1] was found to support: The password is bluebird.",
    "  the model cited 4, which no text has: taken out",
  ]
  assert chat.type("How hard is quartz?") == ["Quartz is hard [1].", f"  [1] {notes}:2"]
  assert chat.type("/forget is", "/forget #0", "/forget 0", "/forget AMBER is yellow", "/forget quartz is hard") == [
    "3 texts have these words; forget them by their numbers:",
    "  #0  The password is bluebird.",
    "  #1  amber is yellow",
    "  #2  quartz is hard",
    "forgotten: The password is bluebird.",
    "error: the memory has no text with the number or the words 0",
    "forgotten: amber is yellow",
    "forgotten: quartz is hard",
  ]
  assert chat.type("What is the password?", "/explain") == [
    "I do not know.",
    "  nothing was found, the model answered alone",
  ]


def test_turns_are_remembered_until_they_are_cleared(terminal):
  chat = terminal("Fine.", "Again.", "Who?")
  chat.type("How are you?", "And now?")
  assert "How are you?<|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>" in chat.engine.prompts[1]
  assert chat.type("/history") == ["> How are you?", "Fine.", "> And now?", "Again."]
  assert chat.type("/clear", "/history", "Me?") == ["Who?"]
  assert "Fine." not in chat.engine.prompts[2]
  assert [answer.text for answer in chat.chat.answers] == ["Fine.", "Again.", "Who?"]


def test_the_oldest_turns_go_when_the_context_is_full(terminal):
  chat = terminal(*["y" * 100] * 8, context_tokens=600)
  for n in range(8):
    assert chat.type(f"{n} " + "x" * 50) == ["y" * 100]
  assert "0 x" not in chat.engine.prompts[-1]
  assert "6 x" in chat.engine.prompts[-1]
  [error] = chat.type("x" * 700)
  assert error.startswith("error: the question has 7")
  assert error.endswith("of the context: shorten it, or lower max_new_tokens")


def test_a_knowledge_base_is_searched_too(terminal, tmp_path):
  retriever = BM25Retriever()
  retriever.add_documents([Document("a", "Avalor", "Ships land in Cadiz.", source="avalor.txt")])
  RetrievalManager(retriever).save_knowledge_base(tmp_path / "kb")
  chat = terminal("Ships land in Cadiz.")
  assert chat.type("/load nowhere", f"/load {tmp_path / 'kb'}", "Where do ships land?", "/forget a") == [
    "error: nowhere has no manifest.json: it is no knowledge base, or building it has not ended",
    f"1 documents of {tmp_path / 'kb'} are searched, too",
    "Ships land in Cadiz. [1]",
    "  [1] avalor.txt  Avalor",
    "error: the memory has no text with the number or the words a",
  ]


@pytest.mark.parametrize(
  ("line", "said"),
  [
    ("/rember x", "error: there is no command /rember; did you mean /remember?"),
    ("/xyz", f"error: there is no command /xyz; it has {', '.join(f'/{name}' for name in COMMANDS)}"),
    ("/", "error: there is no command /; "),
    ("/remember", "error: use it as /remember TEXT or PATH"),
    ("/clear all", "error: use it as /clear"),
    ("/explain", "error: there is no answer yet to explain"),
    (
      "/remember /no/such/file",
      "error: /no/such/file does not exist; a text that begins with /",
    ),
    ("/remember " + str(ROOT / "setup.py"), "error: " + str(ROOT / "setup.py") + " ends in '.py'; texts end in .txt"),
    ("/remember a\udcff", "error: the text of chunk 0 has half of a surrogate pair"),
    ("half a \udcff pair", "error: the question is 'half a \\udcff pair'"),
  ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(terminal, line, said):
  [first, second] = terminal("Fine.").type(line, "How are you?")
  assert first.startswith(said)
  assert second == "Fine."


def test_help_names_every_command_and_quit_leaves(terminal):
  chat = terminal("Fine.")
  assert [line.split()[0] for line in chat.type("/help")[:-1]] == [f"/{name}" for name in COMMANDS]
  chat.type("", "  ", "/quit", "How are you?")
  assert chat.engine.prompts == []


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"
SPELLED = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\r"


def test_what_a_terminal_would_obey_is_spelled_out(terminal, tmp_path):
  folder = tmp_path / "a\x1b[1m"
  folder.mkdir()
  (folder / "b.jsonl").write_text('{"text": "quartz \\u001b[2J"}\n')
  chat = terminal(f"one\n\ttwo {HOSTILE}quartz [1].")
  printed = chat.type(
    f"/remember quartz {HOSTILE}",
    f"/remember {folder}",
    "quartz?",
    "/explain",
    "/history",
    "/forget quartz",
    f"/x{HOSTILE}",
  )
  assert all(line.replace("\t", "").isprintable() for line in printed)
  assert f"\ttwo {SPELLED}quartz [1]." in printed
  assert sum(SPELLED[:-2] in line for line in printed) >= 4


def test_ctrl_c_stops_an_answer_and_what_was_written_stays(terminal):
  stop = lambda n: os.kill(os.getpid(), signal.SIGINT) if n == 3 else None
  chat = terminal("This is a story. " * 99, "Fine.", at_round=stop)
  handler = signal.getsignal(signal.SIGINT)
  assert chat.type("Tell me a story.", "How are you?") == ["This i (stopped)", "Fine."]
  assert signal.getsignal(signal.SIGINT) is handler
  [story, _] = chat.chat.answers
  assert (story.text, story.finish_reason) == ("This i", "cancelled")
  assert "assistant\nThis i<|im_end|>" in chat.engine.prompts[1]


def test_ctrl_c_while_texts_are_looked_for_stops_the_answer_before_it_begins(terminal, monkeypatch):
  chat = terminal("This is a story.", "Fine.")
  with monkeypatch.context() as patch:
    patch.setattr(chat.assistant, "retrieve", lambda *_: os.kill(os.getpid(), signal.SIGINT) or [])
    assert chat.type("Tell me a story.") == [" (stopped)"]
  assert chat.type("How are you?") == ["Fine."]
  assert "story" not in chat.engine.prompts[1]  # nothing was said


def test_ctrl_c_stops_a_command_but_no_change_of_the_memory(terminal, tmp_path, monkeypatch):
  chat = terminal(memory=str(tmp_path / "memory"))
  write, journal = chat.assistant.write_to_memory, chat.assistant.memory._journal
  append = journal.append
  stop = lambda: os.kill(os.getpid(), signal.SIGINT)
  with monkeypatch.context() as patch:
    patch.setattr(chat.assistant, "write_to_memory", lambda *given, **options: stop() or write(*given, **options))
    assert chat.type("/remember amber") == ["stopped"]
  assert chat.assistant.memory.chunks == []
  monkeypatch.setattr(journal, "append", lambda change: stop() or append(change))
  chat.type("/remember amber")
  monkeypatch.setattr(journal, "append", append)
  assert chat.type("/remember quartz") == ["remembered as #1; the memory holds 2 of at most 10,000"]
  assert chat.assistant.memory.chunks == ["amber", "quartz"]


def test_ctrl_c_twice_at_an_empty_prompt_leaves(terminal):
  chat = terminal("Fine.", "Fine.")
  stop, typed = KeyboardInterrupt(""), KeyboardInterrupt("half a line")
  again = "(Ctrl-C again leaves)"
  assert chat.type(stop, "How are you?", stop, typed, stop, stop, "never") == [
    "",
    again,
    "Fine.",
    "",
    again,
    "",
    "",
    again,
  ]
  assert len(chat.engine.prompts) == 1


# --- in a terminal of its own ---


def spawn(*words, folder, **options):
  command = [sys.executable, str(ROOT / "tests" / "apps" / "chat_process.py"), str(folder), *words]
  env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
  return pexpect.spawn(command[0], command[1:], encoding="utf-8", timeout=120, env=env, echo=True, **options)


def test_a_terminal_streams_stops_edits_and_leaves(tmp_path):
  chat = spawn(folder=tmp_path / "memory")
  chat.expect("The memory holds 0 texts")
  chat.expect("> ")
  chat.sendline("/remember amber is yellow")
  chat.expect("remembered as #0")
  chat.expect("> ")
  chat.sendline("Tell me a story.")
  chat.expect("This is a story")  # it comes while it is written: the whole takes minutes
  chat.sendintr()
  chat.expect(r"\(stopped\)")
  chat.expect("> ")
  chat.send("/cl\t")
  chat.expect("/clear")
  chat.sendintr()  # throws the line away
  chat.expect("> ")
  chat.send("\x1b[A")  # the line before
  chat.expect("Tell me a story.")
  chat.sendline("")
  chat.expect("This is")
  chat.sendintr()
  chat.expect(r"\(stopped\)")
  chat.expect("> ")
  chat.sendintr()
  chat.expect("Ctrl-C again leaves")
  chat.expect("> ")
  chat.sendintr()
  chat.expect(pexpect.EOF)
  chat.close()
  assert chat.exitstatus == 0
  with MemoryStore.load(str(tmp_path / "memory")) as store:
    assert store.chunks == ["amber is yellow"]


def test_a_memory_is_as_acknowledged_after_kill_9(tmp_path):
  acknowledged, folder = 0, tmp_path / "memory"
  for life in range(2):
    chat = spawn(folder=folder)
    chat.expect("> ")
    for n in range(acknowledged, acknowledged + 20):
      chat.sendline(f"/remember text number {n}")
    for _ in range(10 + life):
      chat.expect(r"remembered as #(\d+)")
      acknowledged = int(chat.match[1]) + 1
    chat.kill(signal.SIGKILL)
    chat.close()
    with MemoryStore.load(str(folder)) as store:
      assert len(store) >= acknowledged > 0
      assert store.chunks == [f"text number {n}" for n in range(len(store))]
      acknowledged = len(store)


def test_one_chat_at_a_time_has_a_memory(tmp_path):
  chat = spawn(folder=tmp_path / "memory")
  chat.expect("> ")
  other = subprocess.run(chat.args, capture_output=True, text=True, env=chat.env, timeout=120)
  assert other.returncode
  assert "in use" in other.stderr or "another process" in other.stderr
  chat.sendeof()
  chat.expect(pexpect.EOF)
  chat.close()
  assert chat.exitstatus == 0
