"""Sharded checkpoints: a folder to which each rank writes its rows of sharded tensors.

`contents.pt` is the checkpoint with a placeholder for each sharded tensor. `part-RRRRR.pt` has rank
R's rows of all sharded tensors. Rows are distributed as by `torch.chunk` along the first axis, like
in FSDP2. As in all checkpoints, there are SHA-256 checksums, and nothing is unpickled: torch's own
format for sharded checkpoints contains a pickle.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from protlm.checkpoints.checksums import check_sum
from protlm.checkpoints.format import save
from protlm.errors import InputDataError
from protlm.paths import fsync

_CONTENTS = "contents.pt"
# The key of the tensor's number in a placeholder.
_MARK = "protlm.sharded"


class Ranks(NamedTuple):
    """The number of this rank, and of all ranks."""

    rank: int
    number: int

    def rows(self, total: int) -> range:
        """Returns the rows of this rank, of a tensor with `total` rows."""
        most = -(-total // self.number)
        return range(min(self.rank * most, total), min((self.rank + 1) * most, total))


_ONE = Ranks(0, 1)


def write_part(contents: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Writes this rank's shard of a checkpoint, and on rank 0 the rest."""
    own: dict[int, Tensor] = {}

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        own[len(own)] = leaf.to_local().detach()
        return {_MARK: len(own) - 1, "shape": list(leaf.shape)}

    marked = _replaced(contents, placeholder)
    save(own, folder / _part(ranks.rank))
    # Rank 0 syncs the folder, but not what another node has in its cache.
    fsync(folder / _part(ranks.rank))
    if ranks.rank == 0:
        save({"contents": marked, "parts": ranks.number}, folder / _CONTENTS)


def read_parts(
    path: Path,
    ranks: Ranks = _ONE,
    *,
    sharded: Callable[[Tensor, torch.Size], Any] = lambda rows, shape: rows,
) -> dict[str, Any]:
    """Reads a sharded checkpoint, with this rank's rows of the sharded tensors.

    Args:
        path: the verified folder.
        ranks: this rank and the number of ranks, which may differ from those that wrote the shards.
        sharded: converts a rank's rows and the shape of the whole tensor to the returned tensor.

    Raises:
        InputDataError: it is not a sharded checkpoint of protlm.
    """
    try:
        return _read_parts(path, ranks, sharded)
    except Exception as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise InputDataError(f"{path} is not a sharded checkpoint: {reason}") from error


def _read_parts(
    path: Path, ranks: Ranks, sharded: Callable[[Tensor, torch.Size], Any]
) -> dict[str, Any]:
    saved = torch.load(path / _CONTENTS, map_location="cpu", weights_only=True)
    number = saved["parts"]
    # Memory-mapped, so that only the requested rows are read.
    parts = [
        torch.load(path / _part(rank), map_location="cpu", weights_only=True, mmap=True)
        for rank in range(number)
    ]

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

    contents = _replaced(saved["contents"], fill)
    if not isinstance(contents, dict):
        raise ValueError(f"it contains a {type(contents)}")
    return contents


def read_facts(path: Path) -> dict[str, Any]:
    """Reads a verified checkpoint of a run, sharded or not, without reading its tensors.

    Returns:
        its contents; tensors are memory-mapped, sharded ones are placeholders.

    Raises:
        InputDataError: it is not a checkpoint of protlm.
    """
    file = path / _CONTENTS if path.is_dir() else path
    try:
        contents = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return dict(contents["contents"] if path.is_dir() else contents)
    except Exception as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise InputDataError(f"{path} is not a protlm checkpoint: {reason}") from error


def consolidated(path: Path) -> dict[str, Any]:
    """Converts a sharded checkpoint to the one that a single process would have written.

    Raises:
        InputDataError: the folder is damaged, or not a sharded checkpoint.
    """
    if not (path / _CONTENTS).is_file():
        raise InputDataError(f"{path} is not a sharded checkpoint: it has no {_CONTENTS}")
    check_sum(path)
    return read_parts(path)


def _replaced(node: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns a copy of nested containers with `replace` applied to each node."""
    node = replace(node)
    if isinstance(node, dict) and _MARK not in node:
        return type(node)((key, _replaced(value, replace)) for key, value in node.items())
    if isinstance(node, list) or type(node) is tuple:
        return type(node)(_replaced(value, replace) for value in node)
    return node


def _part(rank: int) -> str:
    return f"part-{rank:05d}.pt"
