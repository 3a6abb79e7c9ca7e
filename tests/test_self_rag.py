"""Embedding, retrieval, augmentation and generation, each against plain Python over the bare language model."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from selfrag_jax import self_rag
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.generate.augment import MemoryTokens, augment, embed, memory_tokens
from selfrag_jax.generate.documents import RetrievedDocuments
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.self_rag import SelfRAGConfig, SelfRAGModel
from selfrag_jax.text.tokenizer import WordTokenizer
from selfrag_jax.train.load import LoadedModel

WORDS = ["the", "port", "of", "avalor", "is", "bergen", "cadiz", "dover", "emden", "ally", "who", "where", "what"]
TOKENIZER = WordTokenizer(WORDS)
MODEL = ModelConfig(
  TOKENIZER.vocab_size, d_model=16, n_layers=2, n_heads=2, block_pattern="MT", ssm_state=8, ssm_head_dim=16, mlp_dim=32,
  init_scale=0.3, query_projection=True,
)  # fmt: skip
PARAMS = nn.unbox(init_params(MODEL, jax.random.key(0)))
IDS = memory_tokens(TOKENIZER)
FACTS = ["the port of avalor is bergen", "the ally of avalor is dover", "who is the ally", "cadiz is where the port is"]


def make(n_facts=4, backend="numpy", **settings):
  config = SelfRAGConfig(**{"max_chunks": 20, "chunk_size": 8, "top_k": 2, **settings})
  memory = MemoryStore(16, 20, chunk_size=config.chunk_size, metric=config.metric, backend=backend)
  model = SelfRAGModel(LoadedModel(MODEL, PARAMS, {}, TOKENIZER), memory, config)
  for i, fact in enumerate(FACTS[:n_facts]):
    model.write_to_memory(fact, {"source": f"page {i}"})
  return model


@jax.jit
def forward(tokens, segment_ids):
  hidden = LM(MODEL).apply(PARAMS, tokens, segment_ids)
  return hidden, LM(MODEL).apply(PARAMS, hidden, method="logits")


def full_forward(tokens):
  """Hidden states and logits of the bare model over one row."""
  row, inside = np.zeros((1, 48), np.int32), np.arange(48)[None] < len(tokens)
  row[inside] = tokens
  return [np.asarray(x)[0, : len(tokens)] for x in forward(row, inside.astype(np.int32))]


def full_logits(tokens):
  return full_forward(tokens)[1]


def augmented(tokens, chunks):
  """The oracle."""
  if not chunks:
    return list(tokens)
  return [token for chunk in chunks for token in (IDS.mem, *chunk)] + [IDS.sep, *tokens]


@pytest.mark.parametrize(
  ("order", "places"),
  [("score", [0, 1, 2, 3, 4]), ("reverse", [4, 3, 2, 1, 0]), ("edges", [0, 2, 4, 3, 1]), ("position", None)],
)
def test_augment_is_token_exact(order, places):
  rng = np.random.default_rng(0)
  tokens, lengths = rng.integers(50, 60, (4, 7)), np.array([7, 3, 1, 4])
  chunks, sizes = rng.integers(60, 90, (4, 5, 6)), rng.integers(0, 7, (4, 5))
  slots = np.array([[3, 1, 4, 0, 2], [5, -1, -1, -1, -1], [-1] * 5, [7, 8, -1, -1, -1]])
  out, out_lengths, starts = jax.jit(augment, static_argnames=("ids", "order"))(
    tokens, lengths, RetrievedDocuments(chunks, sizes, slots), ids=IDS, order=order
  )
  assert out.shape == (4, 5 * 7 + 1 + 7)
  for b in range(4):
    placed = places or np.argsort(slots[b])
    found = [chunks[b, j, : sizes[b, j]].tolist() for j in placed if slots[b, j] >= 0]
    expected = augmented(tokens[b, : lengths[b]].tolist(), found)
    assert out[b, : out_lengths[b]].tolist() == expected
    assert not out[b, out_lengths[b] :].any()
    assert out[b, starts[b] : out_lengths[b]].tolist() == tokens[b, : lengths[b]].tolist()


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_embeddings_ignore_padding(pooling):
  rng = np.random.default_rng(1)
  rows = [rng.integers(46, TOKENIZER.vocab_size, n).tolist() for n in (5, 1, 9)]
  tokens = np.full((4, 12), 50, np.int32)  # the padding is not 0
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  lengths = np.array([5, 1, 9, 0])
  out = jax.jit(embed, static_argnums=(0, 4, 5))(MODEL, PARAMS, tokens, lengths, IDS, pooling)
  for i, row in enumerate(rows):
    states = full_forward(row + [IDS.sep] * (pooling == "cls"))[0]
    expected = states.mean(0) if pooling == "mean" else states[-1]
    np.testing.assert_allclose(out[i], expected, atol=1e-5)
  assert not np.asarray(out[3]).any()


def test_without_memory_it_is_the_base_model_to_the_bit():
  inputs = ["where is the port of avalor", "who"]
  for model in (make(), make(n_facts=0)):
    base = model.forward(inputs, use_memory=False)
    assert base.retrieved == [[], []]
    for row, text in zip(base.logits, inputs, strict=True):
      tokens = TOKENIZER.encode(text)
      np.testing.assert_allclose(row[: len(tokens)], full_logits(tokens), atol=1e-5)
  np.testing.assert_array_equal(model.forward(inputs).logits, base.logits)  # empty: the same program, the same bits
  assert [answer.token_ids for answer in model.generate(inputs, 5)] == [
    answer.token_ids for answer in make().generate(inputs, 5, use_memory=False)
  ]


def test_forward_reads_what_it_remembers():
  model = make()
  inputs = ["where is the port of avalor", "who is the ally"]
  labels = [[-100, *TOKENIZER.encode(text)[1:]] for text in inputs]
  out = model.forward(inputs, labels)
  losses = []
  for row, text, chunks in zip(out.logits, inputs, out.retrieved, strict=True):
    tokens = TOKENIZER.encode(text)
    assert len(chunks) == 2
    whole = augmented(tokens, [chunk.token_ids.tolist() for chunk in chunks])
    assert whole in model.augment([text], [chunks])
    expected = full_logits(whole)[-len(tokens) :]
    np.testing.assert_allclose(row[: len(tokens)], expected, atol=1e-5)
    losses += [-jax.nn.log_softmax(expected[t - 1])[tokens[t]] for t in range(1, len(tokens))]
  np.testing.assert_allclose(out.loss, np.mean(losses), rtol=1e-5)
  assert out.retrieved[1][0].text == "who is the ally"
  assert not np.allclose(out.logits, model.forward(inputs, use_memory=False).logits, atol=1e-3)
  with pytest.raises(ValueError, match="as long as the inputs"):
    model.forward(inputs, labels[:1])


@pytest.mark.parametrize("use_memory", [True, False])
def test_generate_is_the_argmax_of_the_whole_forward(use_memory):
  model = make()
  inputs = ["where is the port", "who is the ally of avalor"]
  for answer, text in zip(model.generate(inputs, 4, use_memory=use_memory, stop=()), inputs, strict=True):
    tokens = augmented(TOKENIZER.encode(text), [chunk.token_ids.tolist() for chunk in answer.retrieved])
    assert bool(answer.retrieved) == use_memory
    for token in answer.token_ids:
      logits = full_logits(tokens)[-1]
      assert logits[token] > logits.max() - 1e-4
      tokens.append(token)
    assert len(answer.token_ids) == 4
    assert answer.text == TOKENIZER.decode(answer.token_ids, skip_special=True)


def test_generation_stops_at_a_stop_token():
  model = make()
  free = model.generate(["where is the port"], 6, stop=(), sampling=SamplingConfig(temperature=1.5), seed=3)[0]
  names = {i: name for name, i in TOKENIZER.special.items()}
  stopped = next((i for i, token in enumerate(free.token_ids) if token in names), None)
  assert stopped is not None, "choose a seed that writes a special token"
  stop = (names[free.token_ids[stopped]],)
  cut = model.generate(["where is the port"], 6, stop=stop, sampling=SamplingConfig(temperature=1.5), seed=3)[0]
  assert cut.token_ids == free.token_ids[: stopped + 1]


def test_every_way_to_embed_and_to_score_gives_other_results():
  results = {}
  for pooling in ("mean", "last", "cls"):
    for method in ("cosine", "dot", "learned"):
      model = make(embed_pooling=pooling, retrieval_method=method, top_k=4)
      if method == "learned":  # untrained it is dot
        same = make(embed_pooling=pooling, retrieval_method="dot", top_k=4)
        query = model.embed(["where is bergen"])
        assert [c.score for c in model.retrieve(query)[0]] == [c.score for c in same.retrieve(query)[0]]
        params = {"params": {**PARAMS["params"], "query_projection": jax.random.normal(jax.random.key(1), (16, 16))}}
        model.params = params
      results[pooling, method] = tuple(c.score for c in model.explain(["where is bergen"])[0])
  assert len(set(results.values())) == 9


def test_embeddings_are_cached_until_the_parameters_change(monkeypatch):
  model = make(n_facts=0)
  calls = []
  real = self_rag._embed_jit
  count = lambda *args, **options: calls.append(int((args[3] > 0).sum())) or real(*args, **options)
  monkeypatch.setattr(self_rag, "_embed_jit", count)
  first = model.embed(["who", "where"])
  np.testing.assert_array_equal(model.embed(["where", "who", "who"]), first[[1, 0, 0]])
  assert calls == [2]
  model.embed(["who", "what"])
  assert calls == [2, 1]  # only what is new
  model.params = jax.tree.map(lambda x: x * 1.1, PARAMS)
  changed = model.embed(["who", "where"])
  assert calls == [2, 1, 2]
  assert not np.allclose(changed, first)


def test_forward_embed_only_gives_the_hidden_states():
  model = make(n_facts=0)
  hidden = model.forward_embed_only(["who is the ally", "where"])
  assert hidden.shape == (2, 4, 16)
  np.testing.assert_allclose(hidden[0], full_forward(TOKENIZER.encode("who is the ally"))[0], atol=1e-5)


def test_writing_cuts_text_into_chunks():
  model = make(n_facts=0, chunk_size=4)
  text = "the port of avalor is bergen who is the ally"
  ids = model.write_to_memory(text, {"source": "book"})
  assert model.memory.chunks == ["the port of avalor", "is bergen who is", "the ally"]
  assert [t for row in model.memory.token_ids for t in row.tolist()] == TOKENIZER.encode(text)
  assert [m["source"] for m in model.memory.metadata] == ["book"] * 3
  assert len(ids) == 3
  with pytest.raises(ValueError, match="says nothing"):
    model.write_to_memory("")


def test_a_chunk_without_token_ids_is_read_all_the_same():
  model, other = make(n_facts=1), make(n_facts=0)
  other.memory.add(FACTS[0], model.embed([FACTS[0]])[0])
  np.testing.assert_array_equal(model.forward(["who"]).logits, other.forward(["who"]).logits)


@pytest.mark.parametrize(
  ("token", "message"),
  [
    (TOKENIZER.special["[SEP]"], r"chunk 'bad': the token id \d+ is the control token \[SEP\]; delete it, and write"),
    (0, "chunk 'bad': the token id 0 is the control token"),
    (TOKENIZER.vocab_size, f"chunk 'bad': the token id {TOKENIZER.vocab_size} is outside the"),
    (2**31 - 1, "chunk 'bad': the token id 2147483647 is outside the"),
  ],
)
def test_stored_token_ids_that_no_text_has_never_stand_before_the_model(token, message):
  model = make(n_facts=1)
  query = model.embed(["who"])[0]
  model.memory.add("what it says", query, token_ids=[*TOKENIZER.encode("the port"), token], id="bad")
  [found] = model.retrieve(query[None])
  assert found[0].id == "bad"
  for use in (
    lambda: model.augment(["who"], [found]),
    lambda: model.forward(["who"]),
    lambda: model.generate(["who"], 2),
  ):
    with pytest.raises(ValueError, match=message):
      use()
  model.memory.delete("bad")
  assert model.generate(["who"], 2)


def test_negative_ids_of_an_older_store_never_stand_before_the_model():
  model = make(n_facts=1)
  [found] = model.explain(["who"])
  old = dataclasses.replace(found[0], token_ids=np.array([-5], np.int32))
  with pytest.raises(ValueError, match="chunk '0': the token id -5 is outside the"):
    model.augment(["who"], [[old]])


@pytest.mark.parametrize(
  ("inputs", "message"),
  [
    ([[MODEL.vocab_size]], f"an input has the token id {MODEL.vocab_size}; the model knows the ids from 0 to"),
    ([[-1]], "an input has the token id -1"),
    ([[2**40]], "an input has the token id 1099511627776"),
    ([[1.5]], "a list of texts or of lists of token ids"),
    ([["1"]], "a list of texts or of lists of token ids"),
    ([None], "a list of texts or of lists of token ids"),
    (3, "a list of texts or of lists of token ids"),
  ],
)
def test_inputs_are_ids_that_the_model_knows(inputs, message):
  model = make(n_facts=0)
  for use in (model.embed, model.forward, model.generate, model.explain):
    with pytest.raises(ValueError, match=message):
      use(inputs)


def test_a_top_k_that_no_memory_can_fill_takes_no_room():
  model, usual = make(top_k=10**9), make(top_k=4)
  assert [len(found) for found in model.explain(["who is the ally"])] == [4]
  np.testing.assert_allclose(model.forward(["who"]).logits, usual.forward(["who"]).logits, atol=1e-5)
  with pytest.raises(ValueError, match="k = 0 must be at least 1"):
    model.retrieve(model.embed(["who"]), 0)
  with pytest.raises(ValueError, match="2 lists of chunks for 1 inputs"):
    model.augment(["who"], [[], []])


def test_texts_are_written_in_place_of_others_in_one_change():
  model = make()
  ids = model.write_to_memory(["who is dover", "who is cadiz"], {"source": "new"}, replacing=["0", "2"])
  assert model.memory.ids == ["1", "3", *ids]
  with pytest.raises(ValueError, match="says nothing"):
    model.write_to_memory(["who", ""], replacing=ids)
  with pytest.raises(ValueError, match="1 metadata for 2 texts"):
    model.write_to_memory(["who", "what"], [{}])
  assert model.memory.ids == ["1", "3", *ids]


def test_explain_says_what_from_where_and_how_similar():
  [found] = make(backend="exact").explain(["the port of avalor is bergen"])
  assert (found[0].text, found[0].metadata["source"]) == (FACTS[0], "page 0")
  assert found[0].score == pytest.approx(1, abs=1e-5)
  assert found[1].score < found[0].score
  assert make(n_facts=0).explain(["who"]) == [[]]


@pytest.mark.parametrize(("searches", "top_k", "n_facts"), [(2, 2, 4), (2, 3, 4), (3, 4, 4), (2, 4, 1)])
def test_a_further_search_asks_with_the_best_chunk_of_the_one_before(searches, top_k, n_facts):
  model = make(n_facts, top_k=top_k, searches=searches)
  plain = make(n_facts, top_k=top_k)  # its searches, one at a time
  for question in ("who is the ally of avalor", "where is the port"):
    [found] = model.explain([question])
    expected, best, asked = [], [], question
    for share in model.config.shares:
      new = [c for c in plain.retrieve(plain.embed([asked]))[0] if c.id not in [known.id for known in expected]][:share]
      expected, best = expected + new, best + new[:1]
      asked = plain.augment([question], [best])[0]
    assert [c.id for c in found] == [c.id for c in expected]
    assert [c.score for c in found] == pytest.approx([c.score for c in expected])
    assert len(found) == min(top_k, n_facts)


def test_an_encoder_of_the_same_weights_embeds_in_place_of_the_model():
  encoder = LMEncoder(MODEL, PARAMS, TOKENIZER)
  base, config = LoadedModel(MODEL, PARAMS, {}, TOKENIZER), SelfRAGConfig(chunk_size=8, top_k=2, max_chunks=20)
  memory = lambda width=32: MemoryStore(width, 20, chunk_size=8, backend="numpy")
  with pytest.raises(ValueError, match="not fitted"):
    SelfRAGModel(base, memory(), config, encoder=encoder)
  encoder.fit(FACTS)
  questions = ["who is the ally of avalor", "where is the port of avalor"]
  encoder.fit_queries(encoder.tokens(questions))
  model = SelfRAGModel(base, memory(), config, encoder=encoder)
  for fact in FACTS:
    model.write_to_memory(fact)
  np.testing.assert_allclose(model.embed(FACTS), encoder(FACTS), atol=1e-5)
  np.testing.assert_allclose(model.embed(questions, queries=True), encoder.for_queries(questions), atol=1e-5)
  assert not np.allclose(model.embed(questions), model.embed(questions, queries=True), atol=1e-2)
  best = np.argsort(-encoder.for_queries(questions) @ encoder(FACTS).T, axis=1)[:, :2]
  found = [[chunk.text for chunk in chunks] for chunks in model.explain(questions)]
  assert found == [[FACTS[i] for i in row] for row in best]
  trained = jax.tree.map(lambda x: 1.5 * x, PARAMS)  # the model's own weights embed, also after a training
  model.params = trained
  again = encoder.with_params({**encoder.params, "model": trained})
  np.testing.assert_allclose(model.embed(FACTS), again(FACTS), atol=1e-5)
  with pytest.raises(ValueError, match="d_model = 16, this model needs 32"):
    SelfRAGModel(base, memory(16), config, encoder=encoder)
  with pytest.raises(ValueError, match="'learned' projects the model's own vectors"):
    SelfRAGModel(base, memory(), dataclasses.replace(config, retrieval_method="learned"), encoder=encoder)
  wide = dataclasses.replace(MODEL, d_model=32)
  with pytest.raises(ValueError, match="d_model = 16, this one has 32"):
    SelfRAGModel(dataclasses.replace(base, config=wide), memory(), config, encoder=encoder)


def test_what_does_not_fit_is_refused():
  memory = MemoryStore(16, chunk_size=8, backend="numpy")
  base = LoadedModel(MODEL, PARAMS, {}, TOKENIZER)
  with pytest.raises(ValueError, match="chunk_size = 8, this model needs 64"):
    SelfRAGModel(base, memory, SelfRAGConfig())
  with pytest.raises(ValueError, match="d_model = 12, this model needs 16"):
    SelfRAGModel(base, MemoryStore(12, chunk_size=64, backend="numpy"), SelfRAGConfig())
  with pytest.raises(ValueError, match="metric = cosine, this model needs dot"):
    SelfRAGModel(base, memory, SelfRAGConfig(chunk_size=8, retrieval_method="dot"))
  with pytest.raises(ValueError, match="without a tokenizer"):
    SelfRAGModel(dataclasses.replace(base, tokenizer=None), memory, SelfRAGConfig(chunk_size=8))
  learned = SelfRAGConfig(chunk_size=8, retrieval_method="learned")
  plain = dataclasses.replace(base, config=dataclasses.replace(MODEL, query_projection=False))
  dot = MemoryStore(16, chunk_size=8, metric="dot", backend="numpy")
  with pytest.raises(ValueError, match="query_projection"):
    SelfRAGModel(plain, dot, learned)
  with pytest.raises(ValueError, match="put the text into a list"):
    make().forward("who")
  with pytest.raises(ValueError, match="none of them empty"):
    make().forward(["who", ""])
  for name in ("retrieval_method", "embed_pooling", "order"):
    with pytest.raises(ValueError, match=f"{name} is 'cosin'; one of"):
      SelfRAGConfig(**{name: "cosin"})
  with pytest.raises(ValueError, match="max_chunks = 5, this model needs 20"):
    SelfRAGModel(base, MemoryStore(16, 5, chunk_size=8), SelfRAGConfig(chunk_size=8, max_chunks=20))
  with pytest.raises(ValueError, match="top_k is 0"):
    SelfRAGConfig(top_k=0)
  with pytest.raises(ValueError, match="searches is 3, and they share top_k = 2"):
    SelfRAGConfig(top_k=2, searches=3)
  with pytest.raises(ValueError, match=r"memory_dropout is 1.5, it must lie in \[0, 1\]"):
    SelfRAGConfig(memory_dropout=1.5)


def test_memory_tokens_are_ids_of_the_tokenizer():
  assert MemoryTokens(TOKENIZER.special["[MEM]"], TOKENIZER.special["[SEP]"]) == IDS
