"""Detection of files like FASTA in which annotation would be read as residues.

A file is judged by its first records, since it has one format.
"""

import re

_RECORDS = 1_000
_PIR = re.compile(rb"(?:P1|F1|D[LC]|R[LC]|N[13]|XX);\S")
_RCSB = re.compile(rb"\S+:(?:secstr|disorder)\s*$")
_HH_SUITE = re.compile(rb"(?:ss|sa|aa|bb)_(?:pred|conf|dssp)\b")
_RUN = re.compile(rb"(.)\1*")
# The alphabets of secondary structure; proteins of a few letters have no long runs of these.
_STRUCTURE = frozenset(b"HECLGIBTSPX_")


def annotation(data: bytes) -> str:
    """Returns what is wrong with records of FASTA whose lines are not all residues, or "".

    Args:
        data: the first records, from the `>` of the first.
    """
    records = data.removeprefix(b">").split(b"\n>", _RECORDS)[:_RECORDS]
    parts = [record.split(b"\n", 2) for record in records]
    if any(_HH_SUITE.match(header) for header, *_ in parts):
        return (
            "this alignment of HH-suite has records of annotation (ss_pred, ss_conf, ss_dssp), "
            "which are not proteins; leave them out: "
            "awk '/^>/{keep=!/^>(ss|sa|aa|bb)_/} keep' FILE > SEQUENCES.a3m"
        )
    if any(_RCSB.match(header) for header, *_ in parts):
        return (
            "this is RCSB's file of secondary structures, whose records :secstr and :disorder are "
            "not proteins; keep the others: "
            "awk '/^>/{keep=/:sequence/} keep' FILE > SEQUENCES.fasta"
        )
    if any(len(part) == 3 and _PIR.match(part[0]) and b"*" in part[2] for part in parts):
        return (
            "this is PIR (NBRF), where a line of description follows '>P1;ID' and '*' ends a "
            "sequence; convert it: python -c \"from Bio import SeqIO; SeqIO.convert('FILE', 'pir', "
            "'SEQUENCES.fasta', 'fasta')\"; if it is FASTA, remove the '*' at the ends"
        )
    return _three_lines(records)


def _three_lines(records: list[bytes]) -> str:
    """Returns what is wrong with records of a sequence and a line of labels below it, or "".

    A wrapped sequence of two lines of the same length has the width of the file, and many letters.
    Labels have few, and either the lengths of the proteins or letters that only labels have.
    """
    lines = [[s for s in record.split(b"\n")[1:] if s.strip()] for record in records]
    pairs = [some for some in lines if len(some) == 2 and len(some[0]) == len(some[1])]
    letters = b"".join(second for _, second in pairs).translate(None, b" -.~")
    used = set(letters)
    are_few = len(used) <= min(9, len(letters) // 6)
    if len(pairs) < 0.9 * len(records) or not are_few:
        return ""
    widths = {len(first) for first, _ in pairs}
    if len(widths) == 1 and not _are_labels(letters.upper()):
        return ""
    return (
        "each record has two lines of the same length, the second of the letters "
        f"{bytes(sorted(used)).decode('ascii', 'backslashreplace')} alone: this looks like a file "
        "of three lines, as SignalP and DeepTMHMM write them, with labels below each sequence; "
        "leave the labels out: awk 'NF && ++n % 3' FILE > SEQUENCES.fasta; if they are residues, "
        "write each sequence in one line"
    )


def _are_labels(letters: bytes) -> bool:
    """Returns whether capitals are labels of topology, digits, or runs of secondary structure."""
    used = set(letters)
    if used & set(b"O0123456789") or used <= set(b"IM"):
        return True
    mean_run = len(letters) / len(_RUN.findall(letters))
    return used <= _STRUCTURE and len(used & set(b"HEC")) > 1 and mean_run > 2.5
