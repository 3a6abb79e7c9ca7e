"""Files opened to read bytes, on a disk and in object storage alike."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from etils import epath


@contextlib.contextmanager
def open_binary(path: epath.PathLike) -> Iterator[BinaryIO]:
  """Open a file to read its bytes, as `open` does; what epath opens in object storage lacks methods of Python's files.

  Raises FileNotFoundError and other OSErrors.
  """
  with epath.Path(path).open("rb") as file:
    yield cast(BinaryIO, file if isinstance(file, io.IOBase) else io.BufferedReader(_Raw(file), 1 << 20))


class _Raw(io.RawIOBase):
  """TensorFlow's file, without a buffer."""

  def __init__(self, file: Any):
    self._file = file

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    data = self._file.read(len(buffer))
    buffer[: len(data)] = data
    return len(data)

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._file.seek(offset, whence)
    return self._file.tell()

  def tell(self) -> int:
    return self._file.tell()
