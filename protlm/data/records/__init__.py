"""Records of sequence files, and counts of rejected and changed records."""

from protlm.data.records.block import Block
from protlm.data.records.file import SequenceFile, read_records
from protlm.data.records.record import Feature, ReadOptions, Record
from protlm.data.records.tally import MAX_LISTED, Tally

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
