"""Mean vectors that several calls need, in files."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from protlm.system.parts import new_part, read_part


@dataclass(frozen=True)
class VectorStore:
    """Mean vectors of several calls, in parts in a folder, from which another process continues.

    A part has the sequences of a call that no earlier one has: equal calls make equal batches. What
    is computed with a store depends on all parts in `used`.
    """

    folder: Path
    check: Callable[[], object]
    used: set[str] = field(default_factory=set)

    def means(
        self, of: str, sequences: Sequence[str], compute: Callable[[list[str]], list[np.ndarray]]
    ) -> list[np.ndarray]:
        """Returns what `compute` returns, by layer; `of` is what it depends on."""
        paths = [x for x in sorted(self.folder.glob(f"{_digest(of)}-*.npy")) if read_part(x)]
        known = {str(row["key"]): row["means"] for x in paths for row in np.load(x, mmap_mode="r")}
        keys = {one: _digest(one) for one in sequences}
        if new := [one for one, key in keys.items() if key not in known]:
            means = np.stack(compute(new), axis=1)
            part = np.empty(len(new), [("key", "U32"), ("means", np.float32, means.shape[1:])])
            part["key"], part["means"] = [keys[one] for one in new], means
            # One that was lost gets the name that it had.
            paths.append(self.folder / f"{_digest(of)}-{_digest(' '.join(new))}.npy")
            with (
                new_part(paths[-1], check=self.check) as temporary,
                temporary.open("wb") as file,
            ):
                np.save(file, part)
            known |= zip(part["key"].tolist(), part["means"], strict=True)
        self.used.update(path.name for path in paths)
        layers = zip(*(known[keys[one]] for one in sequences), strict=True)
        return [np.stack(layer) for layer in layers]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
