"""Files of other formats, known by their first bytes so that a refusal can name them."""

_COMMENT = (
    "this is a comment, which FASTA does not know; delete it "
    "(only protlm prepare takes --allow-comments)"
)
_STARTS = (
    (b"@", "this is FASTQ"),
    (b"PK\x03\x04", "this is a zip archive; type: unzip"),
    (b"\x1f\x8b", "this is packed by gzip twice; type: gunzip"),
    (b"BZh", "this is packed by bzip2; type: bunzip2"),
    (b"\xfd7zXZ\x00", "this is packed by xz; type: unxz"),
    (b"\x28\xb5\x2f\xfd", "this is packed by zstd; type: unzstd"),
    (b"\x89HDF", "this is HDF5"),
    (b"%PDF", "this is PDF"),
    (b"ID   ", "this is an EMBL flat file of nucleotides"),
    (b"LOCUS ", "this is a GenBank flat file"),
    (b"# STOCKHOLM", "this is a Stockholm alignment"),
    (b"CLUSTAL", "this is a Clustal alignment"),
    (b"HEADER ", "this is a structure (PDB)"),
    (b"ATOM ", "this is a structure (PDB)"),
    (b"data_", "this is a structure (mmCIF)"),
    (b";", _COMMENT),
    (b"#", _COMMENT),
    (b"!", _COMMENT),
)
# UniProt's earlier releases come as such archives; before this place stands a file's name.
_TAR_MAGIC = 257


def foreign_format(start: bytes) -> str:
    """Says what begins so, or else what was found where a FASTA file has its first header."""
    if start.startswith(b"ustar", _TAR_MAGIC):
        return "this is a tar archive; type: tar xf"
    for beginning, what in _STARTS:
        if start.startswith(beginning):
            return what
    line = start[:40].partition(b"\n")[0].rstrip().decode("utf-8", "backslashreplace")
    return f"{line!r} stands before the first header; a FASTA file begins with '>'"
