"""What a page contains, and its size, which is known before any map is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from protlm.report.codes import base64_bytes
from protlm.system.errors import UserError

# The attachments that mail servers accept are 25 MB.
MAX_BYTES = 25_000_000
# Without a selection of heads, full maps are added up to this size.
_COMFORTABLE_BYTES = 12_000_000
# Longer proteins would leave less than one full map on a page.
MAX_RESIDUES = 2_048
_MOST_FULL_MAPS = 16
_OVERVIEW_SIDE = 96
# Statistics, strongest pairs and names of a head; scripts, style and text; the predictions,
# coordinates and contacts of a residue.
_BYTES_PER_HEAD, _BYTES_OF_PAGE, _BYTES_PER_RESIDUE = 1_800, 200_000, 450


@final
@dataclass(frozen=True)
class PagePlan:
    """The resolution of the maps of a page.

    Attributes:
        full_maps: the number of heads of each model whose map has one cell a residue pair.
        bin_size: the residues in a cell of the other maps.
        num_bytes: an upper bound of the size of the page.
    """

    full_maps: int
    bin_size: int
    num_bytes: int


def plan_page(
    length: int, heads: Sequence[int], *, is_selection: bool, num_contact_maps: int = 0
) -> PagePlan:
    """Decides which maps are full.

    Heads that the user selected are all full. Otherwise all are if they fit into 12 MB, or else up
    to 16 of each model, and the other maps are reduced to at most 96 × 96 cells.

    Args:
        length: residues.
        heads: the number of heads of each model.
        is_selection: whether the user selected layers or heads.
        num_contact_maps: predicted contact maps, which are always full.
    """
    if length > MAX_RESIDUES:
        raise UserError(
            f"the protein has {length:,} residues, and a page shows at most {MAX_RESIDUES:,}; give "
            "a domain of it, or type: protlm attention, which writes maps of any length"
        )
    most = max(heads)
    full = base64_bytes(length**2)
    bin_size = -(-length // _OVERVIEW_SIDE)
    overview = base64_bytes((-(-length // bin_size)) ** 2)
    base = _BYTES_OF_PAGE + len(heads) * length * _BYTES_PER_RESIDUE + num_contact_maps * full
    base += sum(heads) * (_BYTES_PER_HEAD + base64_bytes(length))
    complete = base + sum(heads) * full
    if is_selection:
        _refuse_large(complete, base, full, len(heads))
    if is_selection or complete <= _COMFORTABLE_BYTES:
        return PagePlan(most, bin_size, complete)
    base += sum(heads) * overview
    fitting = (_COMFORTABLE_BYTES - base) // (full * len(heads))
    kept = min(max(fitting, 1), _MOST_FULL_MAPS, most)
    size = base + kept * len(heads) * full
    if size > MAX_BYTES:
        raise UserError(
            f"the page would have {size / 1e6:.0f} MB, and mail takes {MAX_BYTES / 1e6:.0f} MB; "
            "select fewer heads with --layers and --heads" + _or_one_model(len(heads))
        )
    return PagePlan(kept, bin_size, size)


def _refuse_large(size: int, base: int, full: int, num_models: int) -> None:
    if size <= MAX_BYTES:
        return
    fitting = max((MAX_BYTES - base) // full // num_models, 0)
    where = "in all" if num_models == 1 else "of each model"
    advice = f"select at most {fitting} heads {where}" if fitting else "give a shorter protein"
    raise UserError(
        f"the page would have {size / 1e6:.0f} MB, and mail takes {MAX_BYTES / 1e6:.0f} MB: "
        f"{advice}{_or_one_model(num_models)}, or omit --layers and --heads, for reduced maps of "
        "all heads"
    )


def _or_one_model(num_models: int) -> str:
    return ", or give one model" if num_models > 1 else ""
