"""SHA-256 checksums beside a file, or of all files of a folder, in `sha256sum` format."""

from collections.abc import Iterable
from pathlib import Path

from protlm.system.errors import InputDataError
from protlm.system.paths import complete_file, refuse_pointer, sha256_of

SUMS = "SHA256SUMS"
# Bytes of a list of checksums, and of a file in it: more would take minutes to hash.
_LONGEST_LIST, _LARGEST_FILE = 1 << 26, 1 << 38


def sum_path(path: Path) -> Path:
    """Returns the path of the SHA-256 of a file."""
    return path.with_name(path.name + ".sha256")


def write_sum(path: Path, *, contents: Path) -> None:
    """Writes the SHA-256 of `contents` beside `path`."""
    with complete_file(sum_path(path), overwrite=True) as temporary:
        temporary.write_text(f"{sha256_of(contents)}  {path.name}\n")


def write_sums(folder: Path) -> None:
    """Writes the SHA-256 of every file of a complete folder into its `SHA256SUMS`."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = (f"{sha256_of(path)}  {path.name}\n" for path in files)
    (folder / SUMS).write_text("".join(lines))


def damaged_files(folder: Path, *, required: Iterable[str] = ()) -> list[str]:
    """Returns the names of files that do not match `SHA256SUMS`, or are missing.

    Args:
        folder: a folder with a `SHA256SUMS`; files that are not listed in it are ignored.
        required: names that must be listed.
    """
    try:
        lines = _few_lines(folder / SUMS)
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        for name in sums:
            path = folder / name
            if Path(name).name != name or (path.exists() and not path.is_file()):
                raise InputDataError(
                    f"{folder / SUMS} lists {name!r:.60}, which is not a file in its folder; get "
                    "the folder again"
                )
    except (OSError, ValueError):
        return [SUMS]
    missing = [name for name in required if name not in sums]
    wrong = [name for name, digest in sums.items() if _digest(folder / name) != digest]
    return missing + wrong if sums else [SUMS]


def check_sum(path: Path) -> None:
    """Rejects a file that is missing, or whose SHA-256 is missing or does not match."""
    if not path.is_file():
        raise InputDataError(f"{path} is missing or not a file")
    try:
        expected = _few_lines(sum_path(path))[0].split()[0]
    except (OSError, IndexError, ValueError):
        raise InputDataError(
            f"{path} has no readable {sum_path(path).name} beside it, so it may be incomplete"
        ) from None
    if _digest(path) != expected:
        raise InputDataError(
            f"{path} is damaged: its SHA-256 is not the one in {sum_path(path).name}"
        )


def _few_lines(path: Path) -> list[str]:
    """Returns the lines of a file of checksums; raises ValueError if it is a device or large."""
    if not path.is_file() or path.stat().st_size > _LONGEST_LIST:
        raise ValueError
    return path.read_text().splitlines()


def _digest(path: Path) -> str | None:
    """Returns the SHA-256 of a regular file; None if it is not one, or of an impossible size."""
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():
            return None
        refuse_pointer(path)
        if path.suffix == ".safetensors":
            # Its beginning says how large it is.
            safe_open(path, framework="pt").__exit__(None, None, None)
        elif path.stat().st_size > _LARGEST_FILE:
            return None
        return sha256_of(path)
    except (OSError, SafetensorError):
        return None
