"""Detection of unsupported formats by their first bytes, so that messages can name them."""

import re

# The first line of an alignment of ColabFold, lengths and copies of its chains, or the MPI toolkit.
ALIGNMENT = re.compile(rb"^#(?:A3M#|\d+((?:,\d+)*)[ \t][\d,]+)[ \t]*$", re.MULTILINE)
WITHOUT_GAPS = "sed -e '/^#/d' -e '/^>/!s/[-.~]//g' FILE > SEQUENCES.fasta"
A3M = (
    "this is an alignment (A3M), as ColabFold and the MPI toolkit write them; for protlm prepare "
    f"type --allow-gaps; for others remove its gaps: {WITHOUT_GAPS}"
)
_CHAINS = (
    "this is an alignment of a complex, whose rows have the residues of several chains end to end; "
    "give the alignment of each chain"
)

_COMMENT = (
    "this is a comment, which FASTA does not allow; delete it "
    "(only protlm prepare has --allow-comments)"
)
# The first line of a structure; mmCIF may have comments before.
_MMCIF = re.compile(rb"(?:\s|#.*)*+data_[^\s,]*+\s", re.IGNORECASE)
_PDB = re.compile(rb"\s*(HEADER|TITLE|EXPDTA|REMARK|SEQRES|CRYST1|MODEL|ATOM|HETATM|PARENT)[ \r\n]")
_STARTS = (
    (b"@", "this is FASTQ"),
    (b"PK\x03\x04", "this is a zip archive; type: unzip"),
    (b"\x1f\x8b", "this is compressed by gzip twice; type: gunzip"),
    (b"BZh", "this is compressed by bzip2; type: bunzip2"),
    (b"\xfd7zXZ\x00", "this is compressed by xz; type: unxz"),
    (b"\x28\xb5\x2f\xfd", "this is compressed by zstd; type: unzstd"),
    (b"\x89HDF", "this is HDF5"),
    (b"%PDF", "this is PDF"),
    (b"ID   ", "this is an EMBL flat file of nucleotides"),
    (b"LOCUS ", "this is a GenBank flat file"),
    (b"# STOCKHOLM", "this is a Stockholm alignment"),
    (b"CLUSTAL", "this is a Clustal alignment"),
    (b";", _COMMENT),
    (b"#", _COMMENT),
    (b"!", _COMMENT),
)
# Earlier UniProt releases are tar archives, whose first 257 bytes contain a file name.
_TAR_MAGIC = 257


def structure_format(start: bytes | bytearray) -> str:
    """Returns "mmCIF" or "PDB" for the format that begins with these bytes, otherwise ""."""
    return "mmCIF" if _MMCIF.match(start) else "PDB" if _PDB.match(start) else ""


def foreign_format(start: bytes) -> str:
    """Names the format that begins with these bytes, or quotes the unexpected first line."""
    if start.startswith(b"ustar", _TAR_MAGIC):
        return "this is a tar archive; type: tar xf"
    if found := ALIGNMENT.match(start):
        return _CHAINS if found[1] else A3M
    if kind := structure_format(start):
        return (
            f"this is a structure ({kind}), which protlm contacts and protlm inspect take as a "
            "file; write its sequence as FASTA for the others"
        )
    for beginning, what in _STARTS:
        if start.startswith(beginning):
            return what
    line = start[:40].partition(b"\n")[0].rstrip().decode("utf-8", "backslashreplace")
    if "\t" in line:
        return (
            "this is a table; type protlm probe TABLE for labels, protlm score TABLE for variants, "
            "or write its sequences as FASTA"
        )
    return f"{line!r} precedes the first header; a FASTA file begins with '>'"
