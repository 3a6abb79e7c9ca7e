"""A chat in the terminal with a memory in a folder, for tests: the model writes a long story, slowly."""

import sys

from selfrag_jax.apps.assistant import ChatAssistant
from selfrag_jax.apps.chat import Chat
from selfrag_jax.apps.memory import open_store
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.generate.generation import GenerationSettings
from tests.scripted_engine import ScriptedEngine

if __name__ == "__main__":
  engine = ScriptedEngine(*["This is a story of a fox. " * 1000] * 9, delay=0.05)
  Chat(ChatAssistant(engine, open_store(sys.argv[1], HashingEncoder())), GenerationSettings(32)).run()
