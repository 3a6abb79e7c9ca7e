"""Serve a model over HTTP: `python launch/serve.py --model=smollm2-135m --memory=memory --knowledge_base=docs=KB`.

OpenAI's clients know the protocol: chat completions, completions, embeddings, models. A chat request with
`"knowledge_base": "docs"` or `"memory": true` is answered from what is found there, with `sources`. / is a web page.
SIGTERM or Ctrl-C lets running requests finish. API keys stand in a file, or in the environment's SELFRAG_API_KEYS.
"""

from absl import flags
from command import run

MODEL = flags.DEFINE_string(
  "model", None, "A workdir of launch/train.py, smollm2-135m, a Hugging Face folder or name, a GGUF file."
)
PHASE = flags.DEFINE_string("phase", None, "Which phase of the workdir (default: the last).")
NAME = flags.DEFINE_string("name", None, "What requests call the model (default: the last part of --model).")
ENCODER = flags.DEFINE_string("encoder", None, "Encoder of memory and embeddings (default: hashed words).")
MEMORY = flags.DEFINE_string("memory", None, "A folder that keeps the memory (default: there is none).")
KNOWLEDGE_BASE = flags.DEFINE_multi_string("knowledge_base", [], "NAME=FOLDER of launch/build_kb.py; may be repeated.")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; one that others reach needs API keys.")
PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0: a free one.", lower_bound=0)
API_KEYS = flags.DEFINE_string("api_keys", None, "A file of API keys, one a line.")
SLOTS = flags.DEFINE_integer("slots", 16, "The most texts that are written at once.", lower_bound=1)
CONTEXT_TOKENS = flags.DEFINE_integer("context_tokens", None, "The most tokens of prompt and text.", lower_bound=1)
LIMITS = {  # fields of ServerSettings
  "max_waiting": flags.DEFINE_integer("max_waiting", 64, "The most texts that wait for a slot; 429 beyond."),
  "max_tokens": flags.DEFINE_integer("max_tokens", 4096, "The most tokens that a request may ask for."),
  "max_body_bytes": flags.DEFINE_integer("max_body_bytes", 1 << 20, "The longest body; 413 beyond."),
  "request_seconds": flags.DEFINE_float("request_seconds", 300, "The time of a request; 504 beyond."),
  "shutdown_seconds": flags.DEFINE_float("shutdown_seconds", 30, "The time to finish in when the server is stopped."),
}


def main(argv: list[str]) -> None:
  """Open everything, and answer until the process is stopped."""
  if len(argv) > 1 or not MODEL.value:
    raise ValueError(f"unexpected argument {argv[1]!r}" if len(argv) > 1 else "which model? --model=WORKDIR or a name")
  from selfrag_jax.apps.serve.keys import read_keys
  from selfrag_jax.apps.serve.settings import ServerSettings
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  settings = ServerSettings(HOST.value, PORT.value, **{name: flag.value for name, flag in LIMITS.items()})
  keys = read_keys(API_KEYS.value)
  from selfrag_jax.apps.serve.run import bind, open_services, serve

  held = bind(settings, keys)  # an address that cannot be had is an error before the model is loaded
  options = {"name": NAME.value, "phase": PHASE.value, "slots": SLOTS.value, "context_tokens": CONTEXT_TOKENS.value}
  kept = {"encoder": ENCODER.value, "memory": MEMORY.value, "knowledge_bases": KNOWLEDGE_BASE.value}
  serve(open_services(MODEL.value, **options, **kept, keys=keys, settings=settings), held)


if __name__ == "__main__":
  run(main)
