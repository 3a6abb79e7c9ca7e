"""The bytes that a compiled program moves between a device's large memory (HBM) and its cores, by loop.

Read from the text of its HLO: what an instruction takes and gives, unless it lies in a cache, which a TPU's compiler
decides and writes down. Of an array that is only sliced or gathered from, or written into in place, what moves is the
part. The compiler's own count knows no caches and takes the body of a loop once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from selfrag_jax.aot.hlo import Array, Instruction, Module, path_of

# what names arrays and moves none
_FREE = (
  "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "iota", "opt-barrier", "parameter",
  "partition-id", "replica-id", "tuple", "while",
)  # fmt: skip
_PARTS = ("dynamic-slice", "gather", "slice")  # read of their first operand what they return
_INTO = ("dynamic-update-slice", "scatter")  # write a later operand into their first, in place


def moved(module: Module) -> Counter:
  """Count the bytes that a device reads and writes: path of a loop ("" outside of all) -> bytes of one turn of it.

  Paths are those of `flops.count`, and a loop of known length counts as often as it turns, as a scan there. Pallas
  kernels count their operands and results once. Of the branches of a condition, one counts: see `Module.walk`.
  """
  bytes_: Counter = Counter()
  for where, instruction, loops in module.walk(("call", "conditional"), one_branch=True):
    path, times = path_of(loops)
    bytes_[path] += times * sum(_moved(module, where, instruction))
  return bytes_


def moved_by(module: Module, kind: str, name: str) -> int:
  """Count the bytes that the instructions of a kind whose name begins with `name` read and write, each once."""
  chosen = (found for found in module.walk(into=("call", "conditional")) if found[1].kind == kind)
  return sum(sum(_moved(module, where, one)) for where, one, _ in chosen if one.name.startswith(name))


def _moved(module: Module, where: str, instruction: Instruction) -> Iterator[int]:
  """Yield the bytes of each array that an instruction reads or writes."""
  kind = instruction.kind
  if kind in _FREE or kind.endswith(("-done", "-update")):
    return
  known = module.types[where]
  operands = [known.get(name, []) for name in instruction.operands]
  if kind in ("copy-start", "slice-start", "dynamic-slice-start"):  # their types name the source, too
    first, second = instruction.arrays[:2]
    target = first if kind == "copy-start" else second
    yield target.bytes * (bool(_size(operands[0])) + (not target.space))
    return
  if kind == "fusion":
    inner = instruction.called[0]
    yield from (_read(module, inner, i) if _size(arrays) else 0 for i, arrays in enumerate(operands))
    yield _written(module, inner, instruction.arrays)
    return
  if kind in _PARTS:
    yield (1 + bool(_size(operands[0]))) * _size(instruction.arrays)
    return
  if kind in _INTO:
    update = operands[-1 if kind == "scatter" else 1]
    yield _size(update)
    yield _size(update, everywhere=True) if _size(instruction.arrays) else 0
    return
  names_operands = kind.endswith("-start") and kind != "all-reduce-start"  # beside its results
  yield from () if names_operands else map(_size, operands)
  yield _size(instruction.arrays)


def _read(module: Module, computation: str, index: int) -> int:
  """Return the bytes that a fusion reads of its operand of that number."""
  instructions = module.computations[computation]
  parameter = next(one for one in instructions if one.kind == "parameter" and one.rest.startswith(f"{index})"))
  return min(_used(module, computation, parameter.name), _size(parameter.arrays, everywhere=True))


def _used(module: Module, computation: str, name: str) -> int:
  """Return the bytes of an array that the instructions of a fusion use."""
  total, known = 0, module.types[computation]
  for one in module.computations[computation]:
    for place, operand in enumerate(one.operands):
      if operand != name:
        continue
      if one.kind in ("bitcast", "reshape", "copy") and not one.is_root:
        total += _used(module, computation, one.name)
      elif one.kind == "fusion":
        total += _read(module, one.called[0], place)
      elif one.kind in _PARTS and place == 0:
        total += _size(one.arrays, everywhere=True)
      elif one.kind not in _INTO or place:
        total += _size(known[name], everywhere=True)
  return total


def _written(module: Module, computation: str, results: list[Array]) -> int:
  """Return the bytes that a fusion writes of its results."""
  by_name: Mapping[str, Instruction] = {one.name: one for one in module.computations[computation]}
  root = next(one for one in by_name.values() if one.is_root)
  roots = [by_name[name] for name in root.operands] if root.kind == "tuple" else [root]
  total = 0
  for array, one in zip(results, roots, strict=False):
    while one.kind == "bitcast" and one.operands[0] in by_name:
      one = by_name[one.operands[0]]
    if one.kind in _INTO:
      update = one.operands[-1 if one.kind == "scatter" else 1]
      total += 0 if array.space else _size(module.types[computation][update], everywhere=True)
    else:
      total += _size([array])
  return total


def _size(arrays: list[Array], everywhere: bool = False) -> int:
  return sum(array.bytes for array in arrays if everywhere or not array.space)
