"""Figures as files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from protlm.system.errors import UserError, one_of
from protlm.system.paths import complete_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150
# Metadata to remove from each format: the time, and the version of matplotlib.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}


def save_figure(figure: "Figure", path: Path, *, overwrite: bool = False) -> None:
    """Writes a figure as PNG, PDF or SVG by the suffix of `path`, reproducibly to the byte."""
    import matplotlib

    format_ = path.suffix.lower().removeprefix(".")
    if format_ not in _METADATA:
        known = one_of([f".{name}" for name in _METADATA])
        raise UserError(f"{path} is not a figure by its name: it must end in one of {known}")
    # Without the salt, the identifiers inside an SVG are random.
    with (
        complete_file(path, overwrite=overwrite) as temporary,
        matplotlib.rc_context({"svg.hashsalt": "protlm"}),
    ):
        figure.savefig(temporary, format=format_, dpi=_DPI, metadata=_METADATA[format_])
