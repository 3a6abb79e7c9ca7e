"""Build a knowledge base: `python launch/build_kb.py --documents=FOLDER --output=KB --type=dense --model=token-bag`.

Run the same command again to go on after it was stopped. On several hosts that all see the folder, each embeds its
share. `python -m selfrag_jax.retrieval` builds on one host, and also searches, inspects, validates and merges.
"""

from absl import flags
from command import HOSTS, run, start

DOCUMENTS = flags.DEFINE_multi_string("documents", [], "A file, or a folder of files: .jsonl, .txt, .md, .html.")
OUTPUT = flags.DEFINE_string("output", None, "Folder of the knowledge base.")
TYPE = flags.DEFINE_string("type", None, "simple, bm25, dense (the default), hybrid, or a retriever of your own.")
MODEL = flags.DEFINE_string("model", None, "Encoder of dense parts: token-bag, all-MiniLM-L6-v2, a folder or hub name.")
SETTINGS = flags.DEFINE_string("settings", None, "Settings of the retriever, as JSON.")
PLUGIN = flags.DEFINE_multi_string("plugin", [], "A module that registers a retriever of your own.")
CHUNK_SIZE = flags.DEFINE_integer("chunk_size", None, "Longest chunk, in --chunk_unit (180); 0: uncut.", lower_bound=0)
CHUNK_OVERLAP = flags.DEFINE_integer("chunk_overlap", None, "Overlap of consecutive chunks (0).", lower_bound=0)
CHUNK_METHOD = flags.DEFINE_enum("chunk_method", None, ["word", "sentence", "recursive"], "Where to cut (recursive).")
CHUNK_UNIT = flags.DEFINE_enum("chunk_unit", None, ["word", "token"], "token: those of the encoder (word).")
NEAR = flags.DEFINE_float("near_duplicates", None, "Similarity from which a repeat is left out (1: same words).")
SYNC = flags.DEFINE_bool("sync", False, "Update a knowledge base, built as before; only new texts are embedded.")
SKIP_BAD = flags.DEFINE_bool("skip_bad", False, "Leave out and count files and records that cannot be read.")

for shared in HOSTS:
  flags.declare_key_flag(shared)


def main(argv: list[str]) -> None:
  """Build the knowledge base that the flags describe."""
  if len(argv) > 1 or not DOCUMENTS.value or not OUTPUT.value:
    raise ValueError(f"unexpected argument {argv[1]!r}" if len(argv) > 1 else "--documents and --output are needed")
  start()
  from selfrag_jax.retrieval.base import import_plugins
  from selfrag_jax.retrieval.commands import given_chunking, parse_settings, told
  from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base

  import_plugins(PLUGIN.value)
  report = prepare_knowledge_base(
    DOCUMENTS.value,
    OUTPUT.value,
    TYPE.value,
    settings=parse_settings(SETTINGS.value, MODEL.value, TYPE.value),
    chunking=given_chunking(CHUNK_SIZE.value, CHUNK_OVERLAP.value, CHUNK_METHOD.value, CHUNK_UNIT.value),
    near_duplicates=NEAR.value,
    sync=SYNC.value,
    skip_bad=SKIP_BAD.value,
  )
  print(told(OUTPUT.value, report))


if __name__ == "__main__":
  run(main)
