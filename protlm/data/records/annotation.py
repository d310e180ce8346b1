"""Detection, by the first records of a FASTA file, of annotation that would be read as residues."""

import re

_RECORDS = 1_000
_FORMATS = (
    (
        re.compile(rb"(?:ss|sa|aa|bb)_(?:pred|conf|dssp)\b"),
        "this alignment of HH-suite has records of annotation (ss_pred, ss_conf, ss_dssp); leave "
        "them out: awk '/^>/{keep=!/^>(ss|sa|aa|bb)_/} keep' FILE > SEQUENCES.a3m",
    ),
    (
        re.compile(rb"\S+:(?:secstr|disorder)\s*\n"),
        "this is RCSB's file of secondary structures (:secstr, :disorder); keep its sequences: "
        "awk '/^>/{keep=/:sequence/} keep' FILE > SEQUENCES.fasta",
    ),
    (
        re.compile(rb"(?:P1|F1|D[LC]|R[LC]|N[13]|XX);\S.*\n.*\n[^*]*\*"),
        "this is PIR (NBRF), where a line of description follows '>P1;ID' and '*' ends a sequence; "
        "convert it: python -c \"from Bio import SeqIO; SeqIO.convert('FILE', 'pir', "
        "'SEQUENCES.fasta', 'fasta')\"; if it is FASTA, remove the '*' at the ends",
    ),
)
_RUN = re.compile(rb"(.)\1*")


def annotation(data: bytes) -> str:
    """Returns what is wrong with data that begin with a record of FASTA, or ""."""
    records = data.removeprefix(b">").split(b"\n>", _RECORDS)[:_RECORDS]
    for pattern, sentence in _FORMATS:
        if any(map(pattern.match, records)):
            return sentence
    lines = [[s for s in record.split(b"\n")[1:] if s.strip()] for record in records]
    pairs = [some for some in lines if len(some) == 2 and len(some[0]) == len(some[1])]
    letters = b"".join(second for _, second in pairs).translate(None, b" -.~")
    # Few of the letters of a protein, of which a wrapped one has lines of the file's width.
    are_few = len(set(letters)) <= min(9, len(letters) // 6)
    lengths = {len(first) for first, _ in pairs}
    is_wrapped = len(lengths) == 1 and not _are_labels(letters.upper())
    if len(pairs) < 0.9 * len(records) or not are_few or is_wrapped:
        return ""
    shown = bytes(sorted(set(letters))).decode("ascii", "backslashreplace")
    return (
        f"each record has two lines of the same length, the second of the letters {shown} alone: "
        "this looks like a file of three lines, as SignalP and DeepTMHMM write them, with labels "
        "below each sequence; leave the labels out: awk 'NF && ++n % 3' FILE > SEQUENCES.fasta; "
        "if they are residues, write each sequence in one line"
    )


def _are_labels(letters: bytes) -> bool:
    """Returns whether capitals are topology (O: outside), digits or runs of H, E and C."""
    used = set(letters)
    if used & set(b"O0123456789") or used <= set(b"IM"):
        return True
    mean_run = len(letters) / len(_RUN.findall(letters))
    return used <= set(b"HECLGIBTSPX_") and len(used & set(b"HEC")) > 1 and mean_run > 2.5
