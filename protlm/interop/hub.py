"""Models of the Hugging Face Hub by name, through `huggingface_hub` and its cache.

Only the description, the alphabet and the weights are downloaded, never code.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from protlm.checkpoints.format import CONFIG
from protlm.data.alphabet import ADDED, ALPHABET, PIECES, TOKENIZER
from protlm.interop.source import ADAPTER
from protlm.system.errors import InputDataError, UserError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_DESCRIBING = {CONFIG, ALPHABET, TOKENIZER, PIECES, ADDED}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# In the order in which a folder is searched for them, with the parts that an index lists.
_WEIGHTS = (
    r"model\.safetensors",
    r"model\.safetensors\.index\.json|model-\d+-of-\d+\.safetensors",
    r"pytorch_model\.bin",
    r"pytorch_model\.bin\.index\.json|pytorch_model-\d+-of-\d+\.bin",
)
_MEGABYTE = 1e6


def is_hub_name(path: Path) -> bool:
    """Whether a path is the name OWNER/MODEL of the Hub, not a local one.

    If there is a folder of the name OWNER, it is a local path.
    """
    try:
        return bool(_NAME.fullmatch(str(path))) and not path.parent.exists()
    except OSError:
        return False


def local_path(path: Path) -> Path:
    """Returns the folder of a model that is named as on the Hugging Face Hub; otherwise `path`."""
    return download(str(path)) if is_hub_name(path) else path


def download(name: str) -> Path:
    """Returns the folder of a model in the cache, which is downloaded if it is not there.

    What is downloaded is printed on standard error before. Without the network, or with
    `HF_HUB_OFFLINE=1`, the model of the cache is used.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise UserError(
            f"{name} does not exist here, and models of the Hugging Face Hub need the package "
            "huggingface_hub; type: pip install 'protlm[hf]'"
        ) from None
    try:
        if constants.HF_HUB_OFFLINE:
            return _cached(name, "HF_HUB_OFFLINE is set")
        files = _announced(name, huggingface_hub.HfApi().model_info(name, files_metadata=True))
        # With a commit as its revision, the cache would not know it as the newest one.
        found = huggingface_hub.snapshot_download(name, allow_patterns=files)
    except UserError:
        raise
    except errors.GatedRepoError:
        raise InputDataError(
            f"{name} is gated: accept its conditions on https://huggingface.co/{name}, then type: "
            "hf auth login"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise InputDataError(
            f"{name} does not exist here, and is not a model of the Hugging Face Hub; if it is "
            "private, type: hf auth login"
        ) from None
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0][:100]
        return _cached(name, f"the Hugging Face Hub failed ({type(error).__name__}: {reason})")
    return Path(found)


def _cached(name: str, reason: str) -> Path:
    from huggingface_hub import constants, try_to_load_from_cache

    # A snapshot for which other files exist on the Hub counts as incomplete there.
    found = try_to_load_from_cache(name, CONFIG)
    if not isinstance(found, str):
        raise InputDataError(
            f"{name} does not exist here; it is not in the cache {constants.HF_HUB_CACHE} either, "
            f"and {reason}; download it on a machine with a network, and give its folder"
        )
    print(f"model: {name} from the cache, because {reason}", file=sys.stderr)
    return Path(found).parent


def _announced(name: str, info: "ModelInfo") -> list[str]:
    """Returns the files of a model that are read, and prints which of them are downloaded."""
    from huggingface_hub import constants, try_to_load_from_cache

    size = {one.rfilename: one.size or 0 for one in info.siblings or []}
    files = _read_files(size)
    if ADAPTER in size:
        raise InputDataError(
            f"{name} is an adapter of PEFT; type: hf download {name} --local-dir FOLDER, then give "
            "FOLDER"
        )
    if CONFIG not in files or _DESCRIBING.issuperset(files):
        raise InputDataError(
            f"{name} of the Hugging Face Hub has no {CONFIG} with weights beside it, in the form "
            "of transformers"
        )
    missing = [
        file
        for file in files
        if not isinstance(try_to_load_from_cache(name, file, revision=info.sha), str)
    ]
    if missing:
        megabytes = sum(size[file] for file in missing) / _MEGABYTE
        print(
            f"model: downloading {', '.join(missing)} of {name}, {megabytes:,.1f} MB, from the "
            f"Hugging Face Hub to {constants.HF_HUB_CACHE}",
            file=sys.stderr,
        )
    return files


def _read_files(names: Iterable[str]) -> list[str]:
    """Returns the files that protlm reads, of those in the folder of a model.

    >>> _read_files(["config.json", "model.py", "model.safetensors", "pytorch_model.bin"])
    ['config.json', 'model.safetensors']
    """
    names = sorted(names)
    chosen = [name for name in names if name in _DESCRIBING]
    for pattern in _WEIGHTS:
        if weights := [name for name in names if re.fullmatch(pattern, name)]:
            return chosen + weights
    return chosen
