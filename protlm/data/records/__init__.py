"""Records of sequence files, and the tally of what was rejected or changed on the way."""

from protlm.data.records.block import Block
from protlm.data.records.file import SequenceFile, read_records
from protlm.data.records.record import ReadOptions, Record
from protlm.data.records.tally import MAX_LISTED, Tally

__all__ = ["MAX_LISTED", "Block", "ReadOptions", "Record", "SequenceFile", "Tally", "read_records"]
