"""State-space duality: reference = plain numpy, chunked = reference, packed = separate, step = chunked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.model.ssd import ssd_chunked, ssd_reference, ssd_step

H, P, N = 4, 4, 8
NAMES = ("x", "dt", "A", "B", "C", "initial_state")
# Rows of 45 tokens, as lengths of documents. With chunks of 8, 16 and 48: boundaries on and off the edges, documents
# longer than a chunk, of one token, one that ends with a chunk, and an id that comes back for another document.
LAYOUTS = [[45], [16, 29], [5, 1, 1, 38], [40, 5], [1, 7, 8, 29], [13, 11, 9, 12]]
SEGMENTS = np.stack([np.repeat(np.arange(len(lengths)) % 3 + 1, lengths) for lengths in LAYOUTS])


def draw(seed, n_batch, n_tokens, n_groups):
  """Inputs on the scale of a Mamba-2 block at its initialisation, in float64 but exact in float32."""
  rng = np.random.default_rng(seed)
  arrays = dict(
    x=rng.normal(size=(n_batch, n_tokens, H, P)),
    dt=np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (n_batch, n_tokens, H))),
    A=-rng.uniform(1, 16, H),
    B=rng.normal(size=(n_batch, n_tokens, n_groups, N)),
    C=rng.normal(size=(n_batch, n_tokens, n_groups, N)),
    initial_state=rng.normal(size=(n_batch, H, P, N)),
  )
  return {name: a.astype(np.float32).astype(np.float64) for name, a in arrays.items()}


def run(ssd, arrays, segment_ids=None, **options):
  x, dt, A, B, C, initial_state = (arrays.get(name) for name in NAMES)
  return ssd(x, dt, A, B, C, segment_ids_BxT=segment_ids, initial_state_BxHxPxN=initial_state, **options)


def cast(arrays, dtype):
  return {name: jnp.asarray(a, dtype) for name, a in arrays.items()}


def value_and_grad(ssd, arrays, segment_ids, **options):
  """Outputs, and the gradients of a fixed random projection of them with respect to every input."""

  def loss(arrays):
    y, state = run(ssd, arrays, segment_ids, **options)
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in (y, state)]
    return jnp.sum(y * weights[0]) + jnp.sum(state * weights[1]), (y, state)

  grads, outputs = jax.jit(jax.grad(loss, has_aux=True))(arrays)
  return jax.tree.map(np.asarray, (outputs, grads))


def numpy_recurrence(arrays, segment_ids):
  """The definition, one token and one head at a time."""
  x, dt, A, B, C, initial_state = (arrays[name] for name in NAMES)
  y, states = np.zeros_like(x), initial_state.copy()
  for b, t, h in np.ndindex(x.shape[:3]):
    if t and segment_ids[b, t] != segment_ids[b, t - 1]:
      states[b, h] = 0
    g = h // (H // B.shape[2])
    states[b, h] = np.exp(dt[b, t, h] * A[h]) * states[b, h] + dt[b, t, h] * np.outer(x[b, t, h], B[b, t, g])
    y[b, t, h] = states[b, h] @ C[b, t, g]
  return y, states


def assert_close(actual, expected, bar):
  """The largest error, relative to the largest entry of what is expected."""
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  assert np.max(np.abs(actual - expected)) <= bar * np.max(np.abs(expected))


# chunks of 2: three blocks, whose edges lie within documents and between them
@pytest.mark.parametrize(("n_groups", "chunk_size"), [(1, 8), (2, 16), (4, 128), (2, 2)])
def test_chunked_and_reference_equal_the_definition(n_groups, chunk_size):
  arrays = draw(0, len(LAYOUTS), SEGMENTS.shape[1], n_groups)
  y, state = numpy_recurrence(arrays, SEGMENTS)
  with jax.enable_x64(True):
    exact, exact_grads = value_and_grad(ssd_reference, cast(arrays, jnp.float64), SEGMENTS)
    assert exact[0].dtype == exact[1].dtype == np.float64
    assert_close(exact[0], y, 1e-13)
    assert_close(exact[1], state, 1e-13)

  outputs, grads = value_and_grad(ssd_chunked, cast(arrays, jnp.float32), SEGMENTS, chunk_size=chunk_size)
  np.testing.assert_allclose(outputs[0], y, rtol=0, atol=5e-6)
  np.testing.assert_allclose(outputs[1], state, rtol=0, atol=5e-6)
  for name in NAMES:
    assert_close(grads[name], exact_grads[name], 1e-5)


def test_long_rows_and_the_default_chunk():
  arrays = draw(2, 2, 300, 2)
  del arrays["initial_state"]
  with jax.enable_x64(True):
    exact = jax.jit(lambda a: run(ssd_reference, a))(cast(arrays, jnp.float64))
    double = jax.jit(lambda a: run(ssd_chunked, a))(cast(arrays, jnp.float64))
    for ours, theirs in zip(double, exact, strict=True):
      assert ours.dtype == jnp.float64
      assert_close(ours, theirs, 1e-13)
  single = jax.jit(lambda a: run(ssd_chunked, a))(cast(arrays, jnp.float32))
  for ours, theirs in zip(single, exact, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-6)


def test_bfloat16_inputs_keep_a_float32_decay():
  arrays = draw(3, 2, 150, 2)
  arrays["x"][1] = 0  # in this row the final state is the initial one, decayed: nothing of it may be bfloat16
  low = cast(arrays, jnp.bfloat16) | {name: jnp.asarray(arrays[name], jnp.float32) for name in ("dt", "A")}
  (y, state), grads = value_and_grad(ssd_chunked, low, None)
  exact, exact_grads = value_and_grad(ssd_reference, cast(low, jnp.float32), None)
  assert y.dtype == low["x"].dtype
  assert state.dtype == np.float32
  np.testing.assert_allclose(state[1], exact[1][1], rtol=1e-4)
  assert_close(y, exact[0], 1e-2)
  assert_close(state, exact[1], 1e-2)
  for name in NAMES:
    assert grads[name].dtype == low[name].dtype
    assert_close(grads[name], exact_grads[name], 2e-2)


def test_packed_equals_separate():
  arrays = draw(4, len(LAYOUTS), SEGMENTS.shape[1], 2)
  del arrays["initial_state"]
  packed_y, packed_state = jax.jit(lambda a: run(ssd_chunked, a, SEGMENTS, chunk_size=16))(cast(arrays, jnp.float32))
  # every document alone in a row of its own, followed by pads that dt = 0 turns off
  documents = [
    (b, stop - length, stop)
    for b, lengths in enumerate(LAYOUTS)
    for length, stop in zip(lengths, np.cumsum(lengths), strict=True)
  ]

  def alone(a):
    rows = np.zeros((len(documents), *a.shape[1:]))
    for row, (b, start, stop) in zip(rows, documents, strict=True):
      row[: stop - start] = a[b, start:stop]
    return rows

  separate = {name: a if name == "A" else alone(a) for name, a in arrays.items()}
  separate_y, separate_state = jax.jit(lambda a: run(ssd_chunked, a, chunk_size=16))(cast(separate, jnp.float32))
  for i, (b, start, stop) in enumerate(documents):
    np.testing.assert_allclose(packed_y[b, start:stop], separate_y[i, : stop - start], rtol=0, atol=5e-6)
    if stop == SEGMENTS.shape[1]:
      np.testing.assert_allclose(packed_state[b], separate_state[i], rtol=0, atol=5e-6)


@pytest.mark.parametrize("chunk_size", [8, 2])
def test_no_gradient_crosses_documents(chunk_size):
  segments = np.repeat([1, 2, 3, 1], [5, 1, 20, 4])[None]  # chunks of 8: boundaries inside chunks, one spans three
  documents = np.repeat([0, 1, 2, 3], [5, 1, 20, 4])
  arrays = cast(draw(5, 1, 30, 2), jnp.float32)

  def document_loss(arrays, document):
    y, state = run(ssd_chunked, arrays, segments, chunk_size=chunk_size)
    in_document = jnp.asarray(documents == document)[None, :, None, None]
    return jnp.sum(jnp.where(in_document, y, 0) ** 2) + jnp.where(document == 3, jnp.sum(state**2), 0)

  grads = jax.jit(jax.vmap(jax.grad(document_loss), (None, 0)))(arrays, jnp.arange(4))
  for name in ("x", "dt", "B", "C"):
    reached = np.abs(grads[name][:, 0]).max(axis=tuple(range(2, grads[name].ndim - 1))) > 0  # [document, token]
    np.testing.assert_array_equal(reached, np.arange(4)[:, None] == documents[None], err_msg=name)
  np.testing.assert_array_equal(np.abs(grads["initial_state"]).max(axis=(1, 2, 3, 4)) > 0, [True, False, False, False])


def test_gradients_are_finite_when_everything_decays():
  arrays = cast(draw(6, 1, 24, 1), jnp.float32)
  arrays["dt"] = arrays["dt"] * 1000  # log decays of -1600 a token: exp of their negative overflows
  _, grads = value_and_grad(ssd_chunked, arrays, np.repeat([1, 2], [10, 14])[None], chunk_size=8)
  assert all(np.isfinite(g).all() for g in grads.values())


def test_steps_splits_and_pads_continue_the_same_state():
  n_tokens, pads = 21, 9
  arrays = cast(draw(7, 2, n_tokens, 2), jnp.float32)
  whole_y, whole_state = jax.jit(lambda a: run(ssd_chunked, a, chunk_size=8))(arrays)

  def decode(arrays):
    y, state = [], arrays["initial_state"]
    for t in range(n_tokens):
      y_t, state = ssd_step(state, *(arrays[n] if n == "A" else arrays[n][:, t] for n in ("x", "dt", "A", "B", "C")))
      y.append(y_t)
    return jnp.stack(y, axis=1), state

  def part(arrays, tokens, state):
    return {n: a[:, tokens] if a.ndim > 2 else a for n, a in arrays.items()} | {"initial_state": state}

  def resume(arrays, split):
    y, state = run(ssd_chunked, part(arrays, slice(None, split), arrays["initial_state"]), chunk_size=8)
    rest, state = run(ssd_chunked, part(arrays, slice(split, None), state), chunk_size=8)
    return jnp.concatenate([y, rest], axis=1), state

  def pad(arrays):
    padded = dict(arrays)
    for name in ("x", "dt", "B", "C"):
      tail = jnp.full_like(arrays[name][:, :pads], 0 if name == "dt" else 7)
      padded[name] = jnp.concatenate([arrays[name], tail], axis=1)
    y, state = run(ssd_chunked, padded, chunk_size=8)
    return y[:, :n_tokens], state

  variants = jax.jit(lambda a: [decode(a), pad(a), *(resume(a, split) for split in (1, 8, 13, 20))])(arrays)
  for y, state in variants:
    np.testing.assert_allclose(y, whole_y, rtol=0, atol=5e-6)
    np.testing.assert_allclose(state, whole_state, rtol=0, atol=5e-6)


def test_rows_of_pads_return_the_state_itself():
  arrays = cast(draw(8, 1, 11, 1), jnp.float32) | {"dt": jnp.zeros((1, 11, H))}
  for ssd in (ssd_reference, ssd_chunked):
    np.testing.assert_array_equal(run(ssd, arrays)[1], arrays["initial_state"])


def test_memory_grows_linearly_with_tokens():
  def largest(n_tokens):
    arrays = {n: jax.ShapeDtypeStruct(a.shape, jnp.float32) for n, a in draw(9, 1, n_tokens, 1).items()}
    program = jax.make_jaxpr(lambda a: run(ssd_chunked, a, chunk_size=8))(arrays)
    return max(v.aval.size for equation in program.eqns for v in equation.outvars)

  assert largest(509) <= 1.1 * 8 * largest(64)  # a prime number of tokens is still cut into chunks


def test_groups_must_divide_heads():
  arrays = cast(draw(10, 1, 4, 3), jnp.float32)
  for ssd in (ssd_reference, ssd_chunked):
    with pytest.raises(ValueError, match="4 SSD heads do not divide into 3 groups"):
      run(ssd, arrays)
