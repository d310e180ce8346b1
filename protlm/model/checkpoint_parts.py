"""Checkpoints in parts: a folder to which each rank writes what it has of sharded tensors.

`contents.pt` is the checkpoint with a mark in the place of each sharded tensor; `part-RRRRR.pt` are
rank R's rows of all of them. Rows are dealt out as by `torch.chunk` along the first axis, which is
what FSDP2 does. Like all checkpoints, the folder has its SHA-256 sums, and nothing is unpickled:
torch's own format for sharded checkpoints describes itself in a pickle.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from protlm.errors import InputDataError
from protlm.model.checkpoint import save
from protlm.model.sums import check_sum
from protlm.paths import fsync

_CONTENTS = "contents.pt"
# The key of a mark, under which stand the tensor's number and its shape.
_MARK = "protlm.sharded"


class Ranks(NamedTuple):
    """Which rank this is, and of how many."""

    rank: int
    number: int

    def rows(self, total: int) -> range:
        """The rows of this rank, of a tensor with so many."""
        most = -(-total // self.number)
        return range(min(self.rank * most, total), min((self.rank + 1) * most, total))


_ONE = Ranks(0, 1)


def write_part(contents: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Writes this rank's part of a checkpoint, and on the first rank the rest."""
    own: dict[int, Tensor] = {}

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        own[len(own)] = leaf.to_local().detach()
        return {_MARK: len(own) - 1, "shape": list(leaf.shape)}

    marked = _replaced(contents, mark)
    save(own, folder / _part(ranks.rank))
    # The first rank makes the folder durable, but another node keeps to itself what it wrote.
    fsync(folder / _part(ranks.rank))
    if ranks.rank == 0:
        save({"contents": marked, "parts": ranks.number}, folder / _CONTENTS)


def read_parts(
    path: Path,
    ranks: Ranks = _ONE,
    *,
    sharded: Callable[[Tensor, torch.Size], Any] = lambda rows, shape: rows,
) -> dict[str, Any]:
    """The checkpoint in a folder, with a rank's rows of its sharded tensors; of one rank, all.

    Args:
        path: the folder, whose sums agree.
        ranks: which rank of how many this is, however many wrote the parts.
        sharded: makes of a rank's rows, and the shape of the whole, what stands in their place.

    Raises:
        InputDataError: it is no checkpoint of ours.
    """
    try:
        saved = torch.load(path / _CONTENTS, map_location="cpu", weights_only=True)
        number = saved["parts"]
        # Mapped, so that only the rows that are wanted are read.
        parts = [
            torch.load(path / _part(rank), map_location="cpu", weights_only=True, mmap=True)
            for rank in range(number)
        ]
    except Exception as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise InputDataError(f"{path} is no checkpoint in parts: {reason}") from error

    def fill(leaf: Any) -> Any:
        if not (isinstance(leaf, dict) and _MARK in leaf):
            return leaf
        shape = torch.Size(leaf["shape"])
        wanted, pieces = ranks.rows(shape[0]), list[Tensor]()
        for rank, part in enumerate(parts):
            first = Ranks(rank, number).rows(shape[0]).start
            begin, end = (max(row - first, 0) for row in (wanted.start, wanted.stop))
            pieces.append(part[leaf[_MARK]][begin:end])
        return sharded(torch.cat(pieces), shape)

    return _replaced(saved["contents"], fill)


def consolidated(path: Path) -> dict[str, Any]:
    """The checkpoint that one process would have written, of a folder of parts.

    Raises:
        InputDataError: the folder is damaged, or no checkpoint in parts.
    """
    if not (path / _CONTENTS).is_file():
        raise InputDataError(f"{path} is no checkpoint in parts: there is no {_CONTENTS} in it")
    check_sum(path)
    return read_parts(path)


def _replaced(node: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of nested containers, with what `replace` makes of each node."""
    node = replace(node)
    if isinstance(node, dict) and _MARK not in node:
        return type(node)((key, _replaced(value, replace)) for key, value in node.items())
    if isinstance(node, list) or type(node) is tuple:
        return type(node)(_replaced(value, replace) for value in node)
    return node


def _part(rank: int) -> str:
    return f"part-{rank:05d}.pt"
