"""SHA-256 checksums beside a file, or of all files of a folder, in `sha256sum` format."""

from collections.abc import Iterable
from pathlib import Path

from protlm.errors import InputDataError
from protlm.paths import complete_file, sha256_of

SUMS = "SHA256SUMS"


def sum_path(path: Path) -> Path:
    """Returns the path of the SHA-256 of a file."""
    return path.with_name(path.name + ".sha256")


def write_sum(path: Path, *, contents: Path) -> None:
    """Writes the SHA-256 of `contents` beside `path`."""
    with complete_file(sum_path(path), overwrite=True) as temporary:
        temporary.write_text(f"{sha256_of(contents)}  {path.name}\n")


def write_sums(folder: Path) -> None:
    """Writes the SHA-256 of every file of a complete folder into its `SHA256SUMS`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    lines = (f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in files)
    (folder / SUMS).write_text("".join(lines))


def damaged_files(folder: Path, *, required: Iterable[str] = ()) -> list[str]:
    """Returns the names of files that do not match `SHA256SUMS`, or are missing.

    Args:
        folder: a folder with a `SHA256SUMS`; files that are not listed in it are ignored.
        required: names that must be listed.
    """
    try:
        lines = (folder / SUMS).read_text().splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        return [SUMS]
    missing = [name for name in required if name not in sums]
    wrong = [name for name, digest in sums.items() if _digest(folder / name) != digest]
    return missing + wrong if sums else [SUMS]


def check_sum(path: Path) -> None:
    """Rejects a file that is missing, or whose SHA-256 is missing or does not match.

    Raises:
        InputDataError: names the file.
    """
    if not path.is_file():
        raise InputDataError(f"{path} is missing or not a file")
    try:
        expected = sum_path(path).read_text().split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        raise InputDataError(
            f"{path} has no readable {sum_path(path).name} beside it, so it may be incomplete"
        ) from None
    if _digest(path) != expected:
        raise InputDataError(
            f"{path} is damaged: its SHA-256 is not the one in {sum_path(path).name}"
        )


def _digest(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except OSError:
        return None
