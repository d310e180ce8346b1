"""Models of the Hugging Face Hub by name, through `huggingface_hub` and its cache.

Only the description, the alphabet and the weights are downloaded, never code.
"""

import re
import sys
from pathlib import Path

from protlm.checkpoints.format import CONFIG
from protlm.data.alphabet import ADDED, ALPHABET, PIECES, TOKENIZER
from protlm.system.errors import InputDataError, UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DESCRIBING = (CONFIG, ALPHABET, TOKENIZER, PIECES, ADDED)
# In the order in which a folder is searched for them: the first that a model has are downloaded.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
)


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
    """Returns the folder of a model in the cache, whose revision is printed on standard error.

    What is not there is downloaded. Without the network, or with `HF_HUB_OFFLINE=1`, the model of
    the cache is used.
    """
    try:
        from huggingface_hub import constants, errors
    except ImportError:
        raise UserError(
            f"{name} does not exist here, and models of the Hugging Face Hub need the package "
            "huggingface_hub; type: pip install 'protlm[hf]'"
        ) from None
    try:
        folder = _snapshot(name)
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
        first_line = str(error).strip().partition("\n")[0]
        reason = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"the Hugging Face Hub failed ({type(error).__name__}: {first_line:.100})"
        )
        raise InputDataError(
            f"{name} does not exist here; it is not in the cache {constants.HF_HUB_CACHE} either, "
            f"and {reason}; download it on a machine with a network, and give its folder"
        ) from None
    if folder is None:
        raise InputDataError(
            f"{name} of the Hugging Face Hub has no {CONFIG} with weights beside it, in the form "
            f"of transformers; if it is an adapter of PEFT, type: hf download {name} --local-dir "
            "FOLDER, then give FOLDER"
        )
    print(f"model: {name} of the Hugging Face Hub, revision {folder.name}", file=sys.stderr)
    return folder


def _snapshot(name: str) -> Path | None:
    """Returns the folder of a model and its weights; None if it has none, or no description."""
    from huggingface_hub import errors, snapshot_download

    for weights in _WEIGHTS:
        try:
            folder = Path(snapshot_download(name, allow_patterns=[*_DESCRIBING, *weights]))
        except errors.LocalEntryNotFoundError as error:
            # The cache may lack files that are not needed.
            if not (there := getattr(error, "snapshot_path", "")):
                raise
            folder = Path(there)
        if any(path.match(one) for path in folder.glob("*") for one in weights):
            return folder if (folder / CONFIG).is_file() else None
    return None
