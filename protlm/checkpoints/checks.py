"""Checks of untrusted files: their SHA-256, in `sha256sum` format, and their weights before use."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protlm.config import ModelConfig
from protlm.system.errors import InputDataError
from protlm.system.json_file import read_json, write_json
from protlm.system.paths import complete_file, refuse_pointer, sha256_of

SUMS = "SHA256SUMS"
# Of an `Artifact`.
_FORMAT = 1
# Bytes of a list of checksums, and of a file in it: more would take minutes to hash.
_LONGEST_LIST, _LARGEST_FILE = 1 << 26, 1 << 38
_BLOCK = re.compile(r"blocks\.(\d+)\.")
# The formats of weights; integers and floats of 8 bits are those of quantized models.
_FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Counters and keys of mechanisms.
_INTEGERS = (".hash_key", ".redraw_index")
# Numbers that may be created per weight, and for tables that are not saved.
_DRAWS_PER_WEIGHT, _TABLE = 16, 1 << 26
_NAMES = "arange empty eye full linspace ones rand randint randn randperm zeros"
_FACTORIES = {getattr(torch, name) for name in _NAMES.split()}


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

    Files that are not listed in it are ignored; the required ones must be listed.
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


def check_weights(path: Path, weights: object) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint if they are a dictionary of tensors."""
    if not isinstance(weights, dict) or not weights:
        raise not_usable(path, "it has no weights")
    for name, value in weights.items():
        is_plain = isinstance(name, str) and type(value) is Tensor
        if not is_plain or value.layout is not torch.strided or value.is_quantized:
            raise not_usable(path, f"{name!r:.60} is not a tensor of weights")
        # A stride of 0 lets a small file claim any size.
        if value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise not_usable(path, f"{name!r:.60} has more numbers than are stored for it")
    return weights


def check_sizes(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Compares the sizes in the settings with the weights, before memory is allocated."""
    num_layers = len({found[1] for name in weights if (found := _BLOCK.match(name))})
    if num_layers != config.num_layers:
        raise InputDataError(
            f"{path} has the weights of {num_layers} layers, and its settings say "
            f"{config.num_layers}; get both again from one place"
        )
    embedding = weights.get("embedding.weight", torch.empty(0))
    if embedding.ndim == 2 and embedding.shape[1] != config.model_dim:
        raise InputDataError(
            f"{path} has weights of width {embedding.shape[1]}, and its settings say "
            f"{config.model_dim}; get both again from one place"
        )
    if config.has_position_table and config.max_length * config.model_dim > _limit(weights):
        raise _misfit(path, f"model.max_length={config.max_length} needs too much memory")


def _limit(weights: Mapping[str, Tensor]) -> int:
    return _DRAWS_PER_WEIGHT * sum(value.numel() for value in weights.values()) + _TABLE


class LimitedMemory(TorchFunctionMode):
    """A context that limits the memory of a model under construction by the size of its weights.

    Any option of a mechanism may be a size. The limit prevents a large one from exhausting the
    memory before the shapes of the weights are compared.
    """

    def __init__(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._path, self._left = path, _limit(weights)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            # Tensors on this device have a size and no memory.
            sized = {key: value for key, value in kwargs.items() if key != "generator"}
            self._left -= func(*args, **{**sized, "device": "meta"}).numel()
            if self._left < 0:
                raise _misfit(self._path, "a setting is far larger than the weights")
        return func(*args, **kwargs)


def check_numbers(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Rejects weights that are NaN or infinite, and types that loading would convert silently."""
    for name, value in weights.items():
        allowed = (torch.int64,) if name.endswith(_INTEGERS) else _FORMATS
        if value.dtype not in allowed:
            typed = " or ".join(str(one).removeprefix("torch.") for one in allowed)
            raise InputDataError(
                f"{path} has {name!r:.90} as {value.dtype}: quantized models are not supported; "
                f"give one in {typed}"
            )
        if not value.isfinite().all():
            raise InputDataError(
                f"{path} has NaN or infinite numbers in {name!r:.90}: its training diverged, or "
                "the file is damaged; give an earlier checkpoint, or get it again"
            )


class Artifact(NamedTuple):
    """A folder with weights and their description, by the names of both and of its command."""

    weights: str
    description: str
    what: str
    command: str

    def write(self, folder: Path, weights: Mapping[str, Tensor], content: dict[str, Any]) -> None:
        """Writes both files, and the checksums of all files of the folder."""
        from safetensors.torch import save

        (folder / self.weights).write_bytes(save(dict(weights)))
        write_json(folder / self.description, {"format": _FORMAT, **content})
        write_sums(folder)

    def read(self, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the description and the weights of an undamaged folder."""
        from safetensors.torch import load_file

        made = f"a folder that protlm {self.command} has written"
        if not (folder / self.description).is_file():
            inner = [one.parent for one in folder.glob(f"*/{self.description}")]
            found = f"; {inner[0]} is one" if inner else ""
            raise InputDataError(f"{folder} is not {made}{found}")
        for name in damaged_files(folder, required=(self.weights, self.description)):
            raise InputDataError(f"{folder / name} is damaged or missing; give {made}")
        content = read_json(folder / self.description, self.what)
        if (form := content.pop("format", None)) != _FORMAT:
            raise InputDataError(f"{folder}: {self.what} of another format, {form!r:.20}")
        weights = load_file(folder / self.weights)
        check_numbers(folder, weights)
        return content, weights


def not_usable(path: Path, reason: str) -> InputDataError:
    """Returns the error for a file that is not a model, or not one of this version."""
    return InputDataError(f"{path} is not a model that this protlm can use: {reason}")


def _misfit(path: Path, reason: str) -> InputDataError:
    return InputDataError(f"{path} does not fit its own description: {reason}")
