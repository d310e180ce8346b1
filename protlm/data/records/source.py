"""Text from a plain or gzip file: what it is, its first bytes decide; damage is an error."""

import gzip
import io
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TextIO

from protlm.errors import InputDataError
from protlm.paths import existing_file

_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_STARTS = (b"\xff\xfe", b"\xfe\xff", b">\x00", b"\x00>")
_BUFFER = 1 << 18
# Text packs at most some 10:1. More than 200:1 over a gigabyte is meant to fill the memory.
_BOMB_BYTES, _BOMB_RATIO = 1 << 30, 200


class TextSource:
    """A file opened for reading text, line ends of every kind made `\\n`.

    Bytes that are no UTF-8 become lone surrogates (`surrogateescape`): nothing is lost.

    Raises:
        InputDataError: the file is missing, in UTF-16, or a gzip file that is truncated, damaged,
            followed by garbage, or absurdly compressed; from the constructor and while reading.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._raw = existing_file(path, what).open("rb")
        try:
            binary = io.BufferedReader(_Bytes(self._raw, path), _BUFFER)
            start = binary.peek(3)
            if start.startswith(_UTF16_STARTS):
                raise InputDataError(
                    f"{path}, line 1: the text is UTF-16; type: "
                    f"iconv -f UTF-16 -t UTF-8 {path.name}"
                )
            self.has_mark = start.startswith(_UTF8_MARK)
            if self.has_mark:
                binary.read(len(_UTF8_MARK))
        except BaseException:
            self._raw.close()
            raise
        self.text: TextIO = io.TextIOWrapper(binary, "utf-8", errors="surrogateescape")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.text.close()
        self._raw.close()


def _gunzip(raw: BinaryIO) -> tuple[Any, tuple[Any, ...]]:
    """The decompressed stream, and the errors it may raise; igzip is three times faster."""
    try:
        from isal import igzip, isal_zlib
    except ImportError:
        return gzip.GzipFile(fileobj=raw, mode="rb"), (EOFError, gzip.BadGzipFile, zlib.error)
    errors = (EOFError, gzip.BadGzipFile, zlib.error, isal_zlib.error)
    return igzip.IGzipFile(fileobj=raw, mode="rb"), errors


class _Bytes(io.RawIOBase):
    """The bytes of a file, decompressed where its first bytes say gzip."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._raw, self._path, self._size = raw, path, 0
        is_gzip = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        self._stream: Any = raw
        self._errors: tuple[Any, ...] = ()
        if is_gzip:
            self._stream, self._errors = _gunzip(raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            count: int = self._stream.readinto(buffer)
        except self._errors as error:
            raise InputDataError(
                f"{self._path}: the gzip data are truncated or damaged near byte "
                f"{self._raw.tell():,} ({error}); fetch the file again"
            ) from None
        except OSError as error:
            raise InputDataError(
                f"{self._path} cannot be read: {error.strerror or error}"
            ) from error
        self._size += count
        if self._size > _BOMB_BYTES and self._size > _BOMB_RATIO * self._raw.tell():
            raise InputDataError(
                f"{self._path}: the gzip data grow more than {_BOMB_RATIO}-fold; this is no "
                "sequence file"
            )
        return count
