"""Talk to a model with a memory: `python launch/generate.py --model=smollm2-135m --memory=memory`.

  --remember=FILE   writes the lines of a text to the memory first; --memory=FOLDER keeps the memory
  --explain         prints the texts retrieved for each answer, with source and score; --output=FILE.html|.jsonl
                    writes them to a file

On a terminal this is a chat, where /help shows the commands. Elsewhere the prompts are those of --prompt, or the lines
of the standard input. A chat model cites what it was shown; others continue a prompt behind what was retrieved.
"""

import sys

from absl import flags
from command import run

MODEL = flags.DEFINE_string("model", None, "A workdir of launch/train.py, smollm2-135m, a Hugging Face folder, a GGUF.")
PHASE = flags.DEFINE_string("phase", None, "Which phase of the workdir (default: the last).")
PROMPT = flags.DEFINE_multi_string("prompt", [], "What to continue or answer; may be given several times.")
MEMORY = flags.DEFINE_string("memory", None, "A folder that keeps the memory (default: it is forgotten at the end).")
ENCODER = flags.DEFINE_string("encoder", None, "What finds the memory of a chat model (default: hashed words).")
REMEMBER = flags.DEFINE_multi_string("remember", [], "A text, or a folder of texts: .txt, .jsonl, .array_record.")
KNOWLEDGE_BASE = flags.DEFINE_string("knowledge_base", None, "A folder of launch/build_kb.py for a chat model.")
EXPLAIN = flags.DEFINE_bool("explain", False, "Print the texts retrieved for each answer.")
OUTPUT = flags.DEFINE_string("output", None, "Write answers and retrieved texts to a .jsonl or a .html file.")
TOP_K = flags.DEFINE_integer("top_k", None, "Texts to retrieve (default: as it was trained, or 5).", lower_bound=1)
MAX_NEW_TOKENS = flags.DEFINE_integer(
  "max_new_tokens", None, "Longest answer, in tokens (64; chat: 256).", lower_bound=1
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: the likeliest token.", lower_bound=0.0, upper_bound=1e6)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the fewest likeliest tokens whose probability reaches it.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.", lower_bound=-(2**62), upper_bound=2**62)


def main(argv: list[str]) -> None:
  """Open model and memory, remember, and talk or answer."""
  if len(argv) > 1 or not MODEL.value:
    raise ValueError(f"unexpected argument {argv[1]!r}" if len(argv) > 1 else "which model? --model=WORKDIR or a name")
  from selfrag_jax.apps import ask, chat
  from selfrag_jax.generate.sampling import SamplingConfig
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  if OUTPUT.value:
    ask.check_output(OUTPUT.value)
  for path in REMEMBER.value:
    ask.text_files(path)  # a wrong name is an error before the work, not after
  talks = not PROMPT.value and sys.stdin.isatty() and sys.stdout.isatty()
  longest = MAX_NEW_TOKENS.value or (256 if talks else 64)
  sampling = SamplingConfig(TEMPERATURE.value, top_p=TOP_P.value)
  model, config = ask.open_model(MODEL.value, PHASE.value, longest)
  who = ask.open_assistant(model, config, MEMORY.value, TOP_K.value, ENCODER.value, KNOWLEDGE_BASE.value)
  ask.remember_all(who, REMEMBER.value)
  if talks:
    answers = chat.talk(who, model, longest, sampling, SEED.value, explains=EXPLAIN.value)
  else:
    prompts = filter(None, PROMPT.value or (line.strip() for line in sys.stdin))
    batch = 1 if sys.stdin.isatty() and not PROMPT.value else 32
    answers = ask.print_answers(ask.ask(who, prompts, longest, sampling, SEED.value, batch), EXPLAIN.value)
  if OUTPUT.value:
    ask.save_answers(OUTPUT.value, answers)
  who.memory.close()


if __name__ == "__main__":
  run(main)
