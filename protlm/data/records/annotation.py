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
        re.compile(
            rb"\S+[:_](?:(?<=:)(?:secstr|disorder)\s*\n|(?:ss|pred|dssp)\d*\s*\n[-HECGIBTS\s]+$)"
        ),
        "this file has records of secondary structures (:secstr, :disorder, _ss); leave them out: "
        "awk '/^>/{keep=!/[:_](secstr|disorder|ss|pred|dssp)[^a-z]*$/} keep' FILE > SEQUENCES.fa",
    ),
    (
        re.compile(rb"(?:[PF]1|[DR][LC]|N[13]|XX);\S.*\n.*(?:\n[^*]*\*|[\d:;,(]|\S[ \t]+\S)"),
        "this is PIR (NBRF), where a line of description follows '>P1;ID' and '*' ends a sequence; "
        "convert it: awk '/^>/{sub(/..;/,\"\"); print; getline; on=1; next} on; /[*]/{on=0}' FILE "
        "> SEQUENCES.fasta; if it is FASTA, remove '*' and blanks from the lines",
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
    lines = [some for some in lines if len(some) > 1]
    # The lower half of the lines, or two thirds, if they have the lengths of those above.
    counts = [(some, len(some) // (2 + len(some) % 2)) for some in lines]
    labels = [some[n:] for some, n in counts if [*map(len, some[n:])] == [*map(len, some[:-n])]]
    letters = b"".join(map(b"".join, labels)).translate(None, b" -.~")
    # Few of the letters of a protein, of which one or two may have tags or be low in complexity.
    are_few = len(set(letters)) <= min(9, len(letters) // max(6, 3 * len(labels)))
    is_sure = len(labels) > 2 or _are_labels(letters.upper())
    if not labels or len(labels) < 0.9 * len(lines) or not (are_few and is_sure):
        return ""
    shown = bytes(sorted(set(letters))).decode("ascii", "backslashreplace")
    return (
        f"each record has two lines of the same length, the second of the letters {shown} alone: "
        "this looks like a file of three lines, as SignalP and DeepTMHMM write them, with labels "
        "below each sequence; leave the labels out: awk 'function p(){m=int(n/(2+n%2)); "
        "if(!m||length(s[n-1])!=length(s[m-1]))m=n; for(i=0;i<m;)print s[i++]; n=0} "
        "/^>/{p(); print; next} NF{s[n++]=$0} END{p()}' FILE > SEQUENCES.fasta; "
        "if they are residues, write each sequence in one line"
    )


def _are_labels(letters: bytes) -> bool:
    """Returns whether capitals are topology (O: outside), digits or runs of H, E and C."""
    used = set(letters)
    if used & set(b"O0123456789") or used <= set(b"IM"):
        return True
    mean_run = len(letters) / len(_RUN.findall(letters))
    return used <= set(b"HECLGIBTSPX_") and len(used & set(b"HEC")) > 1 and mean_run > 2.5
