"""A file that hides failed writes from HDF5, which would crash at exit after one."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class DiskFile(io.FileIO):
    """A new file for h5py that keeps data in memory when they cannot be written.

    The first failure is stored in `fault`, and raised by `check`. Call `check` after each write of
    a large array, which bounds the memory, and once more when the HDF5 file is closed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self.fault: OSError | None = None
        self._refused: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raises the first failure."""
        if self.fault is not None:
            raise self.fault

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes all of `data` at the current position, on the disk or in memory."""
        content = memoryview(data).cast("B")
        place, done = self.tell(), 0
        try:
            while self.fault is None and done < len(content):
                done += os.pwrite(self.fileno(), content[done:], place + done)
        except OSError as error:
            self.fault = error
        if done < len(content):
            self._refused.append((place + done, bytes(content[done:])))
        self.seek(place + len(content))
        return len(content)

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Reads what was written; gaps are zero."""
        content = memoryview(buffer).cast("B")
        place, done = self.tell(), 0
        while done < len(content):
            found = os.pread(self.fileno(), len(content) - done, place + done)
            if not found:
                content[done:] = bytes(len(content) - done)
                break
            content[done : done + len(found)] = found
            done += len(found)
        end = place + len(content)
        for start, refused in self._refused:
            first, last = max(place, start), min(end, start + len(refused))
            if first < last:
                content[first - place : last - place] = refused[first - start : last - start]
        self.seek(end)
        return len(content)

    def truncate(self, size: int | None = None, /) -> int:
        """Sets the size of the file, unless a write has failed."""
        size = self.tell() if size is None else size
        if self.fault is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self.fault = error
        return size
