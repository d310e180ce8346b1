"""The options of `protlm attention`, `contacts` and `inspect`, which look into models."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from protlm.config.fields import Checked, flag
from protlm.options import shared
from protlm.options.relatives import RelativesOptions
from protlm.options.shared import Duplicates

MapDtype = StrEnum("MapDtype", ["float32", "float16"])


@dataclass(frozen=True)
class MapOptions(Checked):
    """The settings of `protlm attention`; layers and heads are numbered from 1; None: all."""

    layers: tuple[int, ...] | None = shared.layers()
    heads: tuple[int, ...] | None = shared.heads()
    dtype: MapDtype = flag("Type of the stored numbers: float32 or float16.", MapDtype.float32)
    device: str = shared.device()
    duplicates: Duplicates = shared.duplicates()
    figure: Path | None = shared.figure("Also draw a PNG; the input must contain one protein.")
    relatives: RelativesOptions = field(default_factory=RelativesOptions)


@dataclass(frozen=True)
class ContactOptions(Checked):
    """The settings of `protlm contacts`.

    `fit` is a folder of structures, or an earlier fit; None fits to the shipped structures.
    """

    fit: Path | None = flag(
        "A folder of structures to fit to, or the NAME.fit.json of an earlier fit; default: the "
        "shipped structures.",
        None,
    )
    chain: str | None = shared.chain()
    device: str = shared.device()
    figure: Path | None = shared.figure(
        "Also draw a PNG; of several proteins, NAME.PROTEIN.png each."
    )
    duplicates: Duplicates = shared.duplicates()
    relatives: RelativesOptions = field(default_factory=RelativesOptions)


@dataclass(frozen=True)
class InspectOptions(Checked):
    """The settings of `protlm inspect`: fits of one of the models, features of the first."""

    layers: tuple[int, ...] | None = shared.layers()
    heads: tuple[int, ...] | None = shared.heads()
    fits: tuple[Path, ...] = flag(
        "NAME.fit.json of protlm contacts, to show predicted contacts; repeat for two models.",
        (),
        "--fit",
    )
    chain: str | None = shared.chain()
    predictions: bool = flag(
        "Also predict every residue from the others, with one pass for each.", True
    )
    features: Path | None = flag("Folder of protlm features train, whose features are shown.", None)
    description: Path | None = flag(
        "Names of features, from protlm features describe.", None, needs="--features SAE"
    )
    device: str = shared.device()
    relatives: RelativesOptions = field(default_factory=RelativesOptions)
