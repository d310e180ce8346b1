"""Records of sequence files, and counts of rejected and changed records."""

from protlm.data.records.block import Block
from protlm.data.records.file import SequenceFile, read_records
from protlm.data.records.record import MAX_LISTED, Feature, Record, Tally
from protlm.options.prepare import ReadOptions

__all__ = [
    "MAX_LISTED",
    "Block",
    "Feature",
    "ReadOptions",
    "Record",
    "SequenceFile",
    "Tally",
    "read_records",
]
