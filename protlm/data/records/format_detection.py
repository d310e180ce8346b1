"""Detection of unsupported formats by their first bytes, and of annotation in FASTA files."""

import csv
import re
from collections.abc import Sequence

from protlm.data.records.record import NUCLEOTIDES
from protlm.system.errors import InputDataError

# The first line of an alignment of ColabFold, lengths and copies of its chains, or the MPI toolkit.
ALIGNMENT = re.compile(rb"^#(?:A3M#|\d+((?:,\d+)*)[ \t][\d,]+)[ \t]*$", re.MULTILINE)
WITHOUT_GAPS = "gzip -cdf FILE | sed -e '/^#/d' -e '/^>/!s/[-.~]//g' > SEQUENCES.fasta"
A3M = (
    "this is an alignment (A3M), as ColabFold and the MPI toolkit write them; remove its gaps: "
    f"{WITHOUT_GAPS}"
)
SECOND = "several alignments are in this file; give one file for each query"
_CHAINS = (
    "this is an alignment of a complex, whose rows have the residues of several chains end to end; "
    "give the alignment of each chain"
)

_COMMENT = "this is a comment, which FASTA does not allow; delete it"
_NUCLEIC_ACID = "this looks like DNA or RNA"
# The option of reading that accepts such a file; only `protlm prepare` has these.
_ACCEPTED_BY = {A3M: "allow_gaps", _COMMENT: "allow_comments", _NUCLEIC_ACID: "allow_nucleotides"}
# The first line of a structure; mmCIF may have comments before.
_MMCIF = re.compile(rb"(?:\s|#.*)*+data_[^\s,]*+\s", re.IGNORECASE)
# Atoms with a charge and a radius, without fixed columns; PDB has two decimals after x, y and z.
_PQR = re.compile(
    rb"^REMARK.*\bPQR\b|^(?:ATOM|HETATM)\s+\d+\s+\S+\s+\S+\s+(?:\S+\s+)?-?\d+\w?"
    rb"(?:\s+-?\d*\.\d+){3}\s+-?\d*\.(?:\d|\d{3,})\s+\d*\.\d+\s*$",
    re.MULTILINE,
)
_PDB = re.compile(rb"\s*(HEADER|TITLE|EXPDTA|REMARK|SEQRES|CRYST1|MODEL|ATOM|HETATM|PARENT)[ \r\n]")
_CHAIN = (
    'write its sequence: python -c "from pathlib import Path; '
    "from protlm.analysis.structures import read_structure as read; "
    "print('>FILE', read(Path('FILE')).sequence, sep='\\n')\" > SEQUENCES.fasta "
    "(of a folder: docs/embed.md)"
)
_JSON = rb"\s*[\[{]\s*[\"\[{]"
# What no table is: JSON, or bytes that no text has, also four that continue a letter; NCBI writes
# \x01 between titles.
NO_TABLE = re.compile(rb"(?s)%s|.*?(?:[\x00\x02-\x08\x0e-\x19\x7f]|[\x80-\xbf]{4})" % _JSON)
# Structures that are not read; the first two are MessagePack.
_STRUCTURES = (
    (
        rb"(?s)[\x80-\x8f\xde].{1,4}(?:encoder|version|dataBlocks)",
        "this is BinaryCIF; download the entry as mmCIF (.cif), or write it so with Mol*",
    ),
    (
        rb"(?s)[\x80-\x8f\xde].{1,40}?mmtf(?:Version|Producer)",
        "this is MMTF, which the PDB has given up; download the entry as mmCIF (.cif)",
    ),
    (rb"@<TRIPOS>", "this is MOL2; write it as PDB: obabel FILE -O FILE.pdb"),
)
_STARTS = (
    (rb"@(?:HD|SQ|RG|PG|CO)\t", "this is SAM, an alignment of reads"),
    (rb"@[\t -~]*\n", "this is FASTQ"),
    (rb"(?s).{4}\0{4}\{", "these are weights (safetensors)"),
    (rb"PK\x03\x04", "this is a zip archive (unzip it) or an Excel workbook (save a sheet as CSV)"),
    (rb"\x1f\x8b", "this is compressed by gzip twice; type: gunzip"),
    (rb"BZh", "this is compressed by bzip2; type: bunzip2"),
    (rb"\xfd7zXZ\x00", "this is compressed by xz; type: unxz"),
    (rb"\x28\xb5\x2f\xfd", "this is compressed by zstd; type: unzstd"),
    (rb"\x89HDF", "this is HDF5"),
    (rb"%PDF", "this is PDF"),
    (rb"ID   .*\bBP\.", "this is an EMBL flat file of nucleotides"),
    (
        rb"ID   \S+; (?:PATTERN|MATRIX|RULE)\.|CC   [\s\S]{,4000}?\bPROSITE\b|\{PDOC\d",
        "this is PROSITE, which has patterns and no sequences",
    ),
    (rb"ID   ", "this is a flat file, but its first line has no number of AA as in Swiss-Prot"),
    (rb"LOCUS ", "this is a GenBank flat file"),
    (rb"# STOCKHOLM", "this is a Stockholm alignment"),
    (rb"CLUSTAL|MUSCLE|PROBCONS", "this is a Clustal alignment"),
    (rb"#NEXUS", "this is NEXUS"),
    (rb"\d+[ \t]+\d+\s*\n", "this is a PHYLIP alignment"),
    (rb"##(?:gff-version|fileformat=VCF)", "this is a table of a genome's features (GFF, VCF)"),
    (_JSON, "this is JSON"),
    (NO_TABLE.pattern, "this is a binary file"),
    (rb"[;#!]", _COMMENT),
)
# Names of the columns of a table of sequences, in small letters.
_TABLE_COLUMNS = (("entry", "accession", "identifier", "id", "name"), ("sequence", "seq"))
_WRITE = (
    ": python -c \"import csv; [print('>' + r[{}], r[{}], sep='\\n') for r in csv.DictReader("
    "open('TABLE', encoding='utf-8-sig'), delimiter={})]\" > SEQUENCES.fasta"
)
# Earlier UniProt releases are tar archives, whose first 257 bytes contain a file name.
_TAR_MAGIC = 257
FIRST_RECORDS = 1_000
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
        re.compile(rb".*\n[\d \t-]*\d[ \t]+\d[\d\s-]*\Z"),
        "records have numbers alone, as the qualities of bases have them (.qual): give the file of "
        "the sequences",
    ),
    (
        re.compile(rb"(?:[PF]1|[DR][LC]|N[13]|XX);\S.*\n.*(?:\n[^*]*\*|[\d:;,(]|\S[ \t]+\S)"),
        "this is PIR (NBRF), where a line of description follows '>P1;ID' and '*' ends a sequence; "
        "convert it: awk '/^>/{sub(/..;/,\"\"); print; getline; on=1; next} on; /[*]/{on=0}' FILE "
        "> SEQUENCES.fasta; if it is FASTA, remove '*' and blanks from the lines",
    ),
)
_RUN = re.compile(rb"(.)\1*")
_3DI = re.compile(rb"\S*_(?:ss|3di)\b", re.IGNORECASE)
# SaProt writes the state of Foldseek, or #, after each residue.
_PAIRS = re.compile(rb"(?:[A-Z#][a-z#])*")
_PAIR_LETTERS = 10
# Kinds are A, C, G and T or U: proteins of two of them exist, as (AAT)n of antifreeze or (GA)n.
_NUCLEOTIDE_FRACTION, _NUCLEOTIDE_LETTERS, _NUCLEOTIDE_KINDS = 0.95, 50, 3
# States of three or of eight kinds, and the least letters that are sure to be states or labels. The
# letters of collagen are residues, however many there are.
_STATES, _STATE_LETTERS, _COLLAGEN = (set(b"HECGIBTSP-"), set(b"CEHL")), 500, set(b"GPST-")
_LABELS, _LABEL_RECORDS, _LABEL_LETTERS = 4, 10, 1_000


def structure_format(start: bytes | bytearray) -> str:
    """Returns "mmCIF" or "PDB" for the format that begins with these bytes, otherwise ""."""
    return "mmCIF" if _MMCIF.match(start) else "PDB" if _PDB.match(start) else ""


def foreign_structure(data: bytes | bytearray) -> str:
    """Names a format of structures that is not read, or returns "" for all others."""
    known = (what for beginning, what in _STRUCTURES if re.match(beginning, data))
    pqr = "this is PQR; give the PDB file from which it was made" if _PQR.search(data) else ""
    return next(known, pqr)


def foreign_format(start: bytes) -> str:
    """Names the format that begins with these bytes, or quotes the unexpected first line."""
    if start.startswith(b"ustar", _TAR_MAGIC):
        return "this is a tar archive; type: tar xf"
    if found := ALIGNMENT.match(start):
        return _CHAINS if found[1] else A3M
    if foreign := foreign_structure(start):
        return foreign
    if kind := structure_format(start):
        return (
            f"this is a structure ({kind}), which only protlm contacts and inspect read; {_CHAIN}"
        )
    for beginning, what in _STARTS:
        if re.match(beginning, start):
            return what
    line, _, rest = start.decode("utf-8", "backslashreplace").partition("\n")
    second = rest.partition("\n")[0]
    sign = "\t" if "\t" in line[:40] else max(",;", key=line.count)
    # Fewer letters than the limit of csv; without a closed quotation mark the second row is empty.
    rows = [*csv.reader([line[:60_000], second[:60_000]], delimiter=sign), []]
    names = {one.strip().lower(): one for one in rows[0]}
    known = [names[one[0]] for some in _TABLE_COLUMNS if (one := [x for x in some if x in names])]
    # Prose has commas, too, but not as many in each line.
    is_even = len(rows[0]) == len(rows[1])
    if sign in line and (sign == "\t" or is_even or known[1:]):
        typed = [*known, sign] if known[1:] and is_even else []
        advice = _WRITE.format(*map(repr, typed)) if typed else " (docs/embed.md)"
        return (
            "this is a table; type protlm probe TABLE for labels, protlm score TABLE for variants, "
            f"or write its sequences as FASTA{advice}"
        )
    return f"{line[:40].rstrip(' ')!r} precedes the first header; a FASTA file begins with '>'"


def foreign_letters(sequences: Sequence[bytes]) -> str:
    """Returns why the letters of the first records are not those of proteins, or ""."""
    where = f"the first {len(sequences):,} records" if len(sequences) > 1 else "the first record"
    states = b"".join(sequences).upper().translate(None, b".~*")
    letters = states.replace(b"-", b"")
    size, used, fraction = len(letters), set(letters), _nucleotide_fraction(letters)
    if fraction >= _NUCLEOTIDE_FRACTION and len(used & set(b"ACGTU")) >= _NUCLEOTIDE_KINDS:
        return (
            f"{fraction:.0%} of the letters of {where} are ACGTUN: {_NUCLEIC_ACID}; translate it "
            "first; if they are residues, put other proteins into the same file"
        )
    if size > _PAIR_LETTERS and all(map(_PAIRS.fullmatch, sequences)):
        return (
            f"in {where}, a small letter or # follows each residue: these are pairs of SaProt, "
            'with states of Foldseek; leave the states out: awk \'!/^>/{t=""; for(i=1;i<=length($0'
            ');i+=2)t=t substr($0,i,1); gsub(/#/,"X",t); $0=t} 1\' FILE > SEQUENCES.fasta'
        )
    are_states = any(set(states) <= one for one in _STATES) and not set(states) <= _COLLAGEN
    are_few = len(used) <= _LABELS and len(sequences) >= _LABEL_RECORDS
    if (are_states and len(states) >= _STATE_LETTERS) or (are_few and size >= _LABEL_LETTERS):
        shown = bytes(sorted(set(states))).decode("ascii", "backslashreplace")
        return (
            f"in {where} there are the letters {shown} alone: these look like secondary structures "
            "or other labels; give the file of the sequences; if they are residues, put other "
            "proteins into the same file"
        )
    return ""


def refusal(where: str, what: str, otherwise: str = "") -> InputDataError:
    """Returns the error that a file is something else, with the option that accepts it, if any."""
    options = {option: True for sign, option in _ACCEPTED_BY.items() if sign in what}
    return InputDataError(f"{where}: {what}{otherwise}", options)


def _nucleotide_fraction(letters: bytes) -> float:
    """Returns the fraction of nucleotides; 0 of too few letters to tell."""
    letters = letters.upper().translate(None, b"-.~*")
    rest = len(letters.translate(None, NUCLEOTIDES))
    return 1 - rest / len(letters) if len(letters) >= _NUCLEOTIDE_LETTERS else 0


def annotation(data: bytes, *, allow_nucleotides: bool = False) -> str:
    """Returns what is wrong with data that begin with a record of FASTA, or ""."""
    records = data.removeprefix(b">").split(b"\n>", FIRST_RECORDS)[:FIRST_RECORDS]
    for pattern, sentence in _FORMATS:
        if any(map(pattern.match, records)):
            return sentence
    named = [*filter(_3DI.match, records)] or records
    states = [b"".join(one.partition(b"\n")[2].split()).upper() for one in named]
    # Foldseek writes D at both ends, and D or V at every third residue.
    joined, least = b"".join(states), 0.2 if len(states) > 1 else 0.3
    is_rich = joined.count(b"D") + joined.count(b"V") > max(8, least * len(joined))
    if is_rich and sum(one[:1] == one[-1:] == b"D" for one in states) >= 0.9 * len(states):
        return (
            "records begin and end with D and are rich in D and V: these are 3Di states of "
            "Foldseek; leave them out, and give residues: foldseek convert2fasta DB, not DB_ss"
        )
    letters = [b"".join(one.partition(b"\n")[2].split()) for one in records]
    if allow_nucleotides and _nucleotide_fraction(b"".join(letters)) >= _NUCLEOTIDE_FRACTION:
        return ""
    if told := foreign_letters(letters):
        return told
    lines = [[s for s in record.split(b"\n")[1:] if s.strip()] for record in records]
    texts = [b"".join(some) for some in lines if len(some) > 1]
    # Labels are the last two thirds, or the lower half, however a record is wrapped.
    for n in (3, 2):
        whole = [s for s in texts if len(s) % n == 0]
        above = b"".join(s[: len(s) // n] for s in whole)
        letters = b"".join(s[len(s) // n :] for s in whole).translate(None, b" -.~")
        # Few letters for proteins, of which one or two may have tags or be low in complexity.
        are_few = len(set(letters)) <= min(9, len(letters) // max(6, 3 * len(whole)))
        is_sure = (len(whole) > 2 and len(set(above)) > 8) or _are_labels(letters.upper())
        if whole and len(whole) >= 0.9 * len(texts) and are_few and is_sure:
            shown = bytes(sorted(set(letters))).decode("ascii", "backslashreplace")
            return (
                f"the last {n - 1}/{n} of each record has the letters {shown} alone: this looks "
                "like a file of three lines, as SignalP and DeepTMHMM write them, with labels "
                "below each sequence; leave the labels out: awk 'function p(){if(k)print substr("
                f't,1,length(t)/(k>1&&length(t)%{n}==0?{n}:1)); t=""; k=0}} '
                "/^>/{p(); print; next} NF{t=t $0; k++} END{p()}' FILE > SEQUENCES.fasta; "
                "if they are residues, write each sequence in one line"
            )
    return ""


def _are_labels(letters: bytes) -> bool:
    """Returns whether capitals are topology (O: outside), digits or runs of H, E and C."""
    used = set(letters)
    if used & set(b"O0123456789") or used <= set(b"IM"):
        return True
    mean_run = len(letters) / len(_RUN.findall(letters))
    return used <= set(b"HECLGIBTSPX_") and len(used & set(b"HEC")) > 1 and mean_run > 2.5
