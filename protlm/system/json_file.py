"""JSON files as untrusted data: of bounded size and depth."""

import json
from pathlib import Path
from typing import Any

from protlm.system.errors import InputDataError
from protlm.system.paths import existing_file

# Levels of nesting, of which those that protlm writes have a few; and bytes.
_DEEPEST, _MOST = 50, 1 << 26
_TOO_DEEP = f"it is nested more than {_DEEPEST} levels deep"


def read_json(path: Path, what: str, *, most: int = _MOST) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Args:
        path: the file.
        what: what it is, for messages.
        most: its largest size in bytes.
    """
    existing_file(path, what)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"it has more than {most:,} bytes")
        found = json.loads(content)
    except RecursionError:
        raise InputDataError(f"{path} is not {what}: {_TOO_DEEP}") from None
    except (OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0][:100]
        raise InputDataError(f"{path} is not JSON: {reason}") from error
    if not isinstance(found, dict):
        raise InputDataError(f"{path} is not {what}: its JSON is not an object")
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for part in parts for one in part if isinstance(one, dict | list)]
    if level:
        raise InputDataError(f"{path} is not {what}: {_TOO_DEEP}")
    return found
