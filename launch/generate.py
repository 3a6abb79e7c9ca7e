"""Generate with a memory: `python launch/generate.py --model=runs/position_recall_kv --prompt="Ada Baker:" --explain`.

  --remember=FILE   writes the lines of a text to the memory first; --memory=FOLDER keeps the memory
  --explain         prints the chunks retrieved for each answer, with source and score; --output=FILE.html|.jsonl
                    writes them to a file

Without --prompt, the prompts are the lines of the standard input. A chat model gets each prompt as a user's turn, with
the retrieved chunks as notes in it.
"""

import sys

from absl import flags
from command import run

MODEL = flags.DEFINE_string(
  "model", None, "A workdir of launch/train.py, smollm2-135m, a Hugging Face folder or name, a GGUF file."
)
PHASE = flags.DEFINE_string("phase", None, "Which phase of the workdir (default: the last).")
PROMPT = flags.DEFINE_multi_string("prompt", [], "What to continue or answer; may be given several times.")
MEMORY = flags.DEFINE_string("memory", None, "A folder that keeps the memory (default: it is forgotten at the end).")
REMEMBER = flags.DEFINE_multi_string("remember", [], "A text, or a folder of texts: .txt, .jsonl, .array_record.")
EXPLAIN = flags.DEFINE_bool("explain", False, "Print the chunks retrieved for each answer.")
OUTPUT = flags.DEFINE_string("output", None, "Write answers and retrieved chunks to a .jsonl or a .html file.")
TOP_K = flags.DEFINE_integer("top_k", None, "Chunks to retrieve (default: as the model was trained).", lower_bound=1)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "The longest answer, in tokens.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: the likeliest token.", lower_bound=0.0, upper_bound=1e6)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the fewest likeliest tokens whose probability reaches it.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.", lower_bound=-(2**62), upper_bound=2**62)


def main(argv: list[str]) -> None:
  """Open model and memory, remember, answer."""
  if len(argv) > 1 or not MODEL.value:
    raise ValueError(f"unexpected argument {argv[1]!r}" if len(argv) > 1 else "which model? --model=WORKDIR or a name")
  from selfrag_jax.apps import ask
  from selfrag_jax.generate.sampling import SamplingConfig
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.text.printable import printable

  configure_xla()
  if OUTPUT.value:
    ask.check_output(OUTPUT.value)
  for path in REMEMBER.value:
    ask.text_files(path)  # a wrong name is an error before the work, not after
  sampling = SamplingConfig(TEMPERATURE.value, top_p=TOP_P.value)
  model, config = ask.open_model(MODEL.value, PHASE.value, MAX_NEW_TOKENS.value)
  rag = ask.open_rag(model, config, MEMORY.value, TOP_K.value)
  for path in REMEMBER.value:
    print(f"remembered {printable(path)}: {ask.remember(rag, path):,} chunks", file=sys.stderr)
    held, most = rag.memory.size, rag.memory.settings["max_chunks"]
    print(f"the memory holds {held:,} of at most {most:,}; the oldest go when it is full", file=sys.stderr)
  prompts = PROMPT.value or (line.strip() for line in sys.stdin)
  answers = []
  batch = 1 if not PROMPT.value and sys.stdin.isatty() else 32
  for answer in ask.ask(rag, filter(None, prompts), MAX_NEW_TOKENS.value, sampling, SEED.value, batch):
    answers.append(answer)
    print(ask.shown(answer), flush=True)
    if EXPLAIN.value:
      print(ask.explained(answer), flush=True)
  if OUTPUT.value:
    ask.save_answers(OUTPUT.value, answers)
  rag.memory.close()


if __name__ == "__main__":
  run(main)
