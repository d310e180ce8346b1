"""The settings of a study, kept beside its results so that different ones are not mixed."""

import argparse
import json
import sys
from pathlib import Path

from protlm.system.json_file import write_json


def keep_settings(given: argparse.Namespace, *names: str) -> None:
    """Writes the settings of a study into `given.out`; ends if it has results of other settings.

    Args:
        given: the arguments of the study.
        names: the arguments that decide its results.
    """
    values = {name: getattr(given, name) for name in names}
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
    path = given.out / "settings.json"
    given.out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if any(given.out.iterdir()):
            sys.exit(
                f"{given.out} has no settings.json, which says what its files are results of; "
                "choose another --out"
            )
        write_json(path, settings)
    if (there := json.loads(path.read_text(encoding="utf-8"))) != settings:
        sys.exit(f"{given.out} has results of {there}, not of {settings}; choose another --out")
