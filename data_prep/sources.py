"""The source files of a data set: found, read from a position on, and rejected if they change."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protlm.data.records import Block, SequenceFile
from protlm.data.records.source import STANDARD_INPUT, fast_zlib
from protlm.data.shards.manifest import SourceEntry
from protlm.options.prepare import ReadOptions
from protlm.system.errors import InputDataError, UserError
from protlm.system.paths import existing_file


@dataclass(frozen=True)
class Source:
    """A file with its size and modification time at the start; standard input has neither."""

    path: Path
    bytes: int = 0
    mtime_ns: int = 0

    @property
    def is_stream(self) -> bool:
        return self.path == STANDARD_INPUT

    @property
    def name(self) -> str:
        """File name without its folder, escaped to valid UTF-8."""
        if self.is_stream:
            return "standard input"
        return os.fsencode(self.path.name).decode("utf-8", "backslashreplace")

    @property
    def place(self) -> str:
        return os.fspath(self.path if self.is_stream else self.path.absolute())

    def refuse_change(self) -> None:
        """Refuses a file that has changed since the build began."""
        if not self.is_stream and _source(self.path) != self:
            raise _changed(self)


@dataclass(frozen=True)
class Place:
    """A position between two blocks of a source; the CRC-32 is that of its blocks before it."""

    source: int = 0
    blocks: int = 0
    crc32: int = 0

    def after(self, block: Block) -> "Place":
        return Place(self.source, self.blocks + 1, fast_zlib().crc32(block.data, self.crc32))


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Lists the files in order; folders are replaced by their files, sorted, except hidden ones."""
    if not paths:
        raise UserError("no source given; type: protlm prepare SOURCE.fasta.gz --out DIR")
    files = [file for path in paths for file in _files_of(path)]
    given: set[str] = set()
    for path in files:
        # `Path.resolve` fails on a link to itself.
        place = os.path.realpath(path)
        if place in given:
            raise UserError(f"{path} is given twice; give each source once")
        given.add(place)
    return files


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """Lists the files with their sizes and times, without reading them."""
    return [_source(path) for path in list_files(paths)]


def refuse_inside(paths: Sequence[Path], out: Path) -> None:
    """Rejects an output in a folder of sources, where, unfinished, it would become a source."""
    parent = os.path.realpath(out.absolute().parent)
    for path in paths:
        if path.is_dir() and os.path.realpath(path) == parent:
            raise UserError(
                f"{out} is inside {path}, where all files are sources: choose another folder"
            )


def check_formats(sources: Sequence[Source], options: ReadOptions) -> None:
    """Reads the beginning of every file, so that an unknown format is reported at once."""
    for source in sources:
        if not source.is_stream:
            with SequenceFile(source.path, options):
                pass


def _files_of(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        others = [file for file in files if not file.is_file()]
    except OSError as error:
        raise InputDataError(f"{path} cannot be read: {error.strerror}") from error
    if not files:
        raise InputDataError(f"{path} is empty; give a sequence file, or a folder of them")
    if others:
        raise InputDataError(
            f"{others[0]} is not a file: move it away, or give the files of {path} by name"
        )
    return files


def _source(path: Path) -> Source:
    if path == STANDARD_INPUT:
        return Source(path)
    status = existing_file(path, "a sequence file").stat()
    return Source(path, status.st_size, status.st_mtime_ns)


class SourceReader:
    """Reads the sources from a position on, block by block.

    `entries` contains the manifest entry of each source that was read completely.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        options: ReadOptions,
        start: Place,
        entries: Sequence[SourceEntry],
    ) -> None:
        self._sources, self._options, self._start = sources, options, start
        self.entries = list(entries)

    def blocks(self) -> Iterator[tuple[Place, Block]]:
        """Yields each block with the position after it."""
        for number, source in enumerate(self._sources):
            # A file that was read is identified by size and time; a stream must be read again.
            if number >= self._start.source or source.is_stream:
                yield from self._blocks(number, source)

    def _blocks(self, number: int, source: Source) -> Iterator[tuple[Place, Block]]:
        source.refuse_change()
        is_finished = number < self._start.source
        skipped = self._start.blocks if number == self._start.source else 0
        place = Place(number)
        with SequenceFile(source.path, self._options) as file:
            for block in file.blocks():
                place = place.after(block)
                if place.blocks == skipped and place != self._start:
                    raise _changed(source)
                if place.blocks > skipped and not is_finished:
                    yield place, block
            entry = SourceEntry(source.name, file.source.num_bytes, file.source.sha256)
        if place.blocks < skipped or (is_finished and entry != self.entries[number]):
            raise _changed(source)
        source.refuse_change()
        if not source.is_stream and entry.bytes != source.bytes:
            raise _changed(source)
        if not is_finished:
            self.entries.append(entry)


def _changed(source: Source) -> InputDataError:
    what = source.name if source.is_stream else source.path
    return InputDataError(
        f"{what} changed while it was read, or differs from what was read before; when it is "
        "complete, start over",
        {"restart": True},
    )
