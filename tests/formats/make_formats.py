"""The folders and files that `test_formats.py` opens, of every format that this project writes.

  python tests/formats/make_formats.py FOLDER
  tar czf tests/formats/NAME.tar.gz -C FOLDER .

An archive stays as an earlier version wrote it. Add one when a format is meant to change, and keep the old ones.
"""

import sys
from pathlib import Path

import numpy as np

TEXTS = ("the harbour of Avalor", "a river and a forest", "towns by the sea", "ships in the harbour")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "and", "harbour", "river", "sea", "ships", "##s")
HYBRID = {"vocab_size": 8, "d_model": 8, "n_layers": 2, "n_heads": 2, "mlp_dim": 8, "block_pattern": "MT",
          "ssm_state": 4, "ssm_head_dim": 4}  # fmt: skip
ENCODED = "tests/formats"  # of the critiques: the name of the encoder below


def lengths(texts):
  """Embed texts by what can be computed by hand."""
  return np.array([[len(text), text.count("a"), text.count("e"), 1] for text in texts], np.float32)


def documents():
  """Return four documents, one of them with everything that a document can have."""
  from selfrag_jax.retrieval.document import Document

  first = Document("d0", content=TEXTS[0], title="Avalor", metadata={"year": 1999, "tags": "port"})
  return [first, *(Document(f"d{i}", content=text) for i, text in enumerate(TEXTS[1:], 1))]


def memory(folder: Path) -> None:
  """Write a memory: a snapshot and, behind it, a log of an addition and a deletion."""
  from selfrag_jax.memory.store import MemoryStore

  options = {"token_ids": [[i, i + 1] for i in range(4)], "metadata": [{"n": i} for i in range(4)]}
  with MemoryStore(4, 6, chunk_size=3, path=str(folder / "memory")) as store:
    store.add_many(TEXTS, lengths(TEXTS), **options)
    store.save(str(folder / "memory"))
    store.delete([store.ids[1]])
    store.add("one more", lengths(["one more"])[0], token_ids=[7], id="mine")


def knowledge_bases(folder: Path) -> None:
  """Write knowledge bases of given documents and one that was built from a file."""
  from selfrag_jax.retrieval.base import create
  from selfrag_jax.retrieval.dense import DenseRetriever
  from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base

  parts = [create("bm25"), create("simple"), DenseRetriever("token-bag")]
  hybrid = create("hybrid", retrievers=parts)
  hybrid.add_documents(documents())
  hybrid.save(folder / "kb_hybrid")
  (folder / "texts.jsonl").write_text(
    "".join(f'{{"id": "d{i}", "content": "{text}"}}\n' for i, text in enumerate(TEXTS))
  )
  prepare_knowledge_base(
    folder / "texts.jsonl", folder / "kb_built", "dense", settings={"model_name": "token-bag"}, progress=False
  )


def critiques(folder: Path) -> None:
  """Write a store of critiques, and a variable with a critique."""
  import selfrag_jax.textgrad as tg

  with tg.GradientStore(
    str(folder / "critiques"), max_records=10, encoder=lengths, encoder_name=ENCODED, dedupe_threshold=None
  ) as store:
    ids = store.add([tg.Critique(role="prompt", text=text, sample=f"case {i}", step=i) for i, text in enumerate(TEXTS)])
    store.note_use(ids[:2], helped=True)
    store.note_outcome(ids[2:3], accepted=False, delta=-0.5)
  cache = tg.EngineCache(str(folder / "answers.sqlite"))
  cache.put("a key", "an answer")
  variable = tg.Variable("be brief", role_description="prompt")
  variable.gradients.add(tg.Variable("say why", role_description="critique"))
  variable.save(str(folder / "variable.json"))


def models(folder: Path) -> None:
  """Write a run's checkpoint, and the exported folders of a language model, two encoders and a reranker."""
  import jax
  from etils import epath
  from flax.linen import unbox
  from tokenizers.pre_tokenizers import ByteLevel

  from selfrag_jax.encoders import bert
  from selfrag_jax.encoders.language_model import LMEncoder
  from selfrag_jax.model.config import ModelConfig
  from selfrag_jax.model.export import export_safetensors
  from selfrag_jax.model.lm import init_params
  from selfrag_jax.retrieval.cross_encoder import CrossEncoder
  from selfrag_jax.text.tokenizer import BPETokenizer
  from selfrag_jax.text.wordpiece import WordPieceTokenizer
  from selfrag_jax.train.checkpoint import Checkpointer

  key = jax.random.key(0)
  hybrid = ModelConfig(**HYBRID)
  metadata = {"model": hybrid.to_dict(), "tokenizer": {"name": "word", "fingerprint": "0"}, "phase": "pretrain"}
  with Checkpointer(epath.Path(folder / "run" / "checkpoints" / "pretrain")) as checkpointer:
    checkpointer.save(
      3, {"params": unbox(init_params(hybrid, key)), "key": key, "step": np.int32(3)}, metadata=metadata
    )
  bytes_alone = BPETokenizer.from_pieces(list(ByteLevel.alphabet()), [], [])
  llama = ModelConfig(vocab_size=bytes_alone.vocab_size, d_model=8, n_layers=1, n_heads=2, mlp_dim=8)
  export_safetensors(folder / "llama", llama, unbox(init_params(llama, key)), tokenizer=bytes_alone)
  encoder = LMEncoder(llama, unbox(init_params(llama, key)), bytes_alone)
  encoder.fit(TEXTS)
  encoder.save(folder / "lm_encoder", encoder.params)
  tokenizer = WordPieceTokenizer(PIECES)
  sizes = {
    "vocab_size": len(PIECES),
    "d_model": 8,
    "n_layers": 1,
    "n_heads": 2,
    "mlp_dim": 8,
    "max_positions": 32,
    "max_tokens": 32,
  }
  for name, kind, labels in (("bert", bert.BertEncoder, 0), ("cross_encoder", CrossEncoder, 1)):
    config = bert.BertConfig(**sizes, labels=labels)
    kind(config, params := unbox(bert.init_bert(config, key)), tokenizer).save(folder / name, params)


def answers(folder: Path) -> dict[str, np.ndarray]:
  """Return what the models of a folder compute."""
  import jax.numpy as jnp

  from selfrag_jax.encoders.load import load_encoder
  from selfrag_jax.model.lm import LM
  from selfrag_jax.model.pretrained import load_pretrained
  from selfrag_jax.retrieval.cross_encoder import load_cross_encoder
  from selfrag_jax.retrieval.document import Document
  from selfrag_jax.train.load import load_model

  run, llama = load_model(folder / "run"), load_pretrained(folder / "llama")
  tokens = jnp.arange(6)[None]
  return {
    "run": np.asarray(LM(run.config).apply(run.params, tokens)),
    "llama": np.asarray(LM(llama.config).apply(llama.params, tokens)),
    "lm_encoder": load_encoder(folder / "lm_encoder")(TEXTS),
    "bert": load_encoder(folder / "bert")(TEXTS),
    "cross_encoder": load_cross_encoder(folder / "cross_encoder")("the harbour", [Document("d", content=TEXTS[0])]),
  }


def main(folder: Path) -> None:
  """Write all of them."""
  folder.mkdir(parents=True)
  for make in (memory, knowledge_bases, critiques, models):
    make(folder)
  np.savez(folder / "answers.npz", **answers(folder))


if __name__ == "__main__":
  sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
  main(Path(sys.argv[1]))
