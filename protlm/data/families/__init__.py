"""Relatives of a query: read from what people have, filtered, and drawn into contexts."""

from protlm.data.families.draw import LIMITS, Draw, draw, draws
from protlm.data.families.family import Family, Relative, num_neighbors
from protlm.data.families.reading import read_family
from protlm.data.families.source import Relatives

__all__ = [
    "LIMITS",
    "Draw",
    "Family",
    "Relative",
    "Relatives",
    "draw",
    "draws",
    "num_neighbors",
    "read_family",
]
