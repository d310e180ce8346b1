"""Bytes and text from a plain or gzip file, recognized by its first bytes; damage is an error.

The raw bytes are hashed while they are read, so that one pass also computes the SHA-256.
"""

import hashlib
import io
import shlex
import sys
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from select import select
from types import ModuleType
from typing import Any, Self

from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file

STANDARD_INPUT = Path("-")

_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Blocks of this size stay in the processor's cache and reuse the same memory.
_RAW_BYTES, _PLAIN_BYTES = 1 << 15, 1 << 17
# Numbers of bytes that have a mark, and that suffice to detect the encoding without one.
_MARK_BYTES, _TEXT_BYTES = 4, 1 << 12
# Text compresses by at most about 10:1. More than 200:1 over a gigabyte is a zip bomb.
_BOMB_BYTES, _BOMB_RATIO = 1 << 30, 200
_MAX_LINE = 1 << 24


class ByteSource:
    """A file, or standard input for `-`, as decompressed bytes without a byte order mark.

    `name` is its name in messages; `has_mark` is whether there was a byte order mark;
    `num_bytes` counts the raw bytes read so far, all of them after the end of `blocks`.
    """

    def __init__(
        self, path: Path, what: str, *, ignore_trailing_garbage: bool = False, name: str = ""
    ) -> None:
        self.num_bytes, self._size, self._digest = 0, 0, hashlib.sha256()
        self._ignore_trailing_garbage = ignore_trailing_garbage
        if path == STANDARD_INPUT:
            # A process may be started without standard input.
            if sys.stdin is None:
                raise InputDataError("standard input is closed; give the path of a file")
            self.name, self._raw = "standard input", io.FileIO(sys.stdin.fileno(), closefd=False)
        else:
            self.name = name or str(path)
            self._raw = existing_file(path, what).open("rb", buffering=0)
        try:
            self._begin(path)
        except BaseException:
            self._raw.close()
            raise

    def _begin(self, path: Path) -> None:
        first = self._read(_RAW_BYTES)
        self._blocks = self._gunzipped(first) if first.startswith(_GZIP) else self._plain(first)
        start = bytearray()
        for block in self._blocks:
            start += block
            if len(start) >= _MARK_BYTES:
                break
        # In UTF-16, every other byte of ASCII letters is zero, and no byte between them.
        text = start[2 * start.startswith(_UTF16_MARKS) : _TEXT_BYTES]
        fewer, more = sorted((text[::2].count(0), text[1::2].count(0)))
        if not fewer and more and 4 * more >= len(text):
            raise InputDataError(
                f"{self.name}, line 1: the text is UTF-16; type: {as_utf8(path, 'UTF-16')}"
            )
        self.has_mark = start.startswith(_UTF8_MARK)
        self._start = bytes(start.removeprefix(_UTF8_MARK))

    @property
    def sha256(self) -> str:
        """SHA-256 of the raw bytes read so far, in hexadecimal."""
        return self._digest.hexdigest()

    def blocks(self) -> Iterator[bytes]:
        """Returns an iterator over the decompressed bytes, once, in blocks of any size."""
        return chain([self._start], self._blocks)

    def close(self) -> None:
        """Closes the file; standard input stays open."""
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, size: int) -> bytes:
        """Reads the next raw bytes, fewer than `size` only at the end."""
        data = b""
        try:
            # A pipe returns the available bytes, and a non-blocking pipe without any returns None.
            while len(data) < size and (block := self._raw.read(size - len(data))) != b"":
                if block is None:
                    select([self._raw], [], [])
                data += block or b""
        except OSError as error:
            raise InputDataError(
                f"{self.name} cannot be read: {error.strerror or error}"
            ) from error
        self.num_bytes += len(data)
        self._digest.update(data)
        return data

    def _plain(self, data: bytes) -> Iterator[bytes]:
        while data:
            yield data
            data = self._read(_PLAIN_BYTES)

    def _gunzipped(self, data: bytes) -> Iterator[bytes]:
        library = fast_zlib()
        try:
            while data:
                inflater = library.decompressobj(wbits=31)
                yield from self._member(inflater, data)
                data = self._next_member(inflater.unused_data)
        except library.error as error:
            raise self._damage(str(error)) from None

    def _member(self, inflater: Any, data: bytes) -> Iterator[bytes]:
        is_drained = True
        while not inflater.eof:
            if not data and is_drained:
                data = self._read(_RAW_BYTES)
                if not data:
                    raise self._damage("they end prematurely")
            block = inflater.decompress(data, _PLAIN_BYTES)
            # If the block is full, more may follow from the same input.
            data, is_drained = inflater.unconsumed_tail, len(block) < _PLAIN_BYTES
            self._size += len(block)
            if self._size > _BOMB_BYTES and self._size > _BOMB_RATIO * self.num_bytes:
                raise InputDataError(
                    f"{self.name}: the gzip data expand more than {_BOMB_RATIO}-fold; this is not "
                    "a sequence file"
                )
            yield block

    def _next_member(self, data: bytes) -> bytes:
        """Returns data from the start of the next member, or empty bytes; zeros are padding."""
        while not (data := data.lstrip(b"\0")):
            if not (data := self._read(_RAW_BYTES)):
                return b""
        if len(data) < len(_GZIP):
            data += self._read(_RAW_BYTES)
        if data.startswith(_GZIP):
            return data
        if not self._ignore_trailing_garbage:
            raise InputDataError(
                f"{self.name}: other data follow the gzip data at byte "
                f"{self.num_bytes - len(data):,}; download the file again (protlm prepare can "
                "ignore trailing garbage)",
                {"ignore_trailing_garbage": True},
            )
        while self._read(_PLAIN_BYTES):
            pass
        return b""

    def _damage(self, how: str) -> InputDataError:
        return InputDataError(
            f"{self.name}: the gzip data are truncated or damaged near byte "
            f"{self.num_bytes:,} ({how}); download the file again"
        )


def text_lines(path: Path, what: str) -> Iterator[str]:
    """Yields the lines of a file without their ends, of any system.

    Bytes that are not UTF-8 become lone surrogates (`surrogateescape`), without loss.
    """
    with ByteSource(path, what) as source:
        rest = b""
        for block in with_unix_line_ends(source.blocks()):
            lines, is_any, rest = (rest + block).rpartition(b"\n")
            if is_any:
                yield from lines.decode("utf-8", "surrogateescape").split("\n")
            if len(rest) > _MAX_LINE:
                raise InputDataError(
                    f"{source.name}: a line has more than {_MAX_LINE:,} bytes; this is not a table"
                )
        if rest:
            yield rest.decode("utf-8", "surrogateescape")


def as_utf8(path: Path, encoding: str) -> str:
    """Returns the command that converts a text to UTF-8, beside it."""
    files = [shlex.quote(str(one)) for one in (path, path.with_suffix(f".utf8{path.suffix}"))]
    return f"iconv -f {encoding} -t UTF-8 {' > '.join(files)}"


def with_unix_line_ends(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Converts all line ends to `\\n`."""
    held = b""
    for block in blocks:
        if not held and b"\r" not in block:
            yield block
            continue
        whole = held + block
        # The line feed of a CR LF pair may be in the next block.
        held = b"\r" if whole.endswith(b"\r") else b""
        yield whole.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if held:
        yield b"\n"


def fast_zlib() -> ModuleType:
    """Returns Intel's igzip if it is installed, which is three to ten times faster."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib
