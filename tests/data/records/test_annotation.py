"""Annotation that looks like residues is refused by name; sequences that look like it are read."""

import subprocess

import pytest

from protlm.errors import InputDataError

# 60 residues of human titin, and others.
ONE = "MTTQAPTFTQPLQSVVVLEGSTATFEAHISGFPVPEVSWFRDGQVISTSTLPGVQISFSD"
TWO = "GRAKLTIPAVTKANSGRYSLKATNGSGQATSTAELLVKAETAPPNFVQRLQSMTVRQGSQ"
TOPOLOGY = "SSSSSSSSSSOOOOOOOOOOOOMMMMMMMMMMMMMMMMMMMMMIIIIIIIIIIIIIIIII"


def records(*pairs: tuple[str, str]) -> str:
    return "".join(f">p{number}\n{one}\n{two}\n" for number, (one, two) in enumerate(pairs))


THREE_LINES = {
    "DeepTMHMM": records((ONE, TOPOLOGY), (TWO[:45], TOPOLOGY[:45])),
    "one protein": records((ONE, TOPOLOGY)),
    "SignalP, cut to one length": records((ONE, "S" * 22 + "O" * 38), (TWO, "I" * 60)),
    "globular": records((ONE, "I" * 60)),
    "TMHMM": records((ONE, "i" * 20 + "M" * 20 + "o" * 20)),
    "three states": records((ONE, "CCCCEEEEEECCCHHHHHHHHHHHHCCC" * 2 + "CCCC")),
    "eight states": records((ONE, "TTTEEEEEESSSGGGHHHHHHHHHBTTT" * 2 + "EEEE")),
    "states with gaps": records((ONE, "---HHHHHHHH-----EEEEE---HHHHHH" * 2)),
    "masks": records((ONE, "0" * 20 + "1" * 40)),
    "unknown labels": records((ONE, "QQQQQQQQQQDDDDDDDDDD" * 3), (TWO[:40], "Q" * 20 + "D" * 20)),
    "with a fault": records(*[(ONE[:n], TOPOLOGY[:n]) for n in range(40, 60)]) + ">x\nMKV\n",
}
OTHERS = {
    "PIR": (">P1;CRAB\nCrystallin alpha chain\nMDIAIHHPWI\nRRPF*\n", "PIR"),
    "fragment": (">F1;CRAB\nAlpha\nMDIAI*\n>F1;B\nBeta\nMKV\n", "PIR"),
    "PIR with remarks": (">P1;CRAB\nAlpha\nMDIAI*\nC;Species: human\n", "PIR"),
    "ss.txt": (">101M:A:sequence\nMVLSEGEWQ\n>101M:A:secstr\n   HHHHHH\n", ":secstr"),
    "disorder": (">101M:A:sequence\nMVLSEGEWQ\n>101M:A:disorder\nXXXXXXXXX\n", ":disorder"),
    "a3m": (">ss_pred PSIPRED\nCCHHHHH\n>ss_conf\n9999999\n>q\nMKVLLAA\n", "ss_pred"),
    "a3m of a structure": (">ss_dssp\nCCHHHHH\n>aa_dssp\nMKVLLAA\n>q\nMKVLLAA\n", "ss_pred"),
}
# The look-alikes: the number of their records.
SEQUENCES = {
    "wrapped": (records((ONE, TWO), (TWO, ONE)), 2),
    "one wrapped": (records((ONE, TWO)), 1),
    "halves": (records((ONE, TWO), (TWO[:45], ONE[:45])), 2),
    "short": (records(("MK", "VL"), ("MKV", "ILM")), 2),
    **{
        name: (records((ONE, (repeat * 60)[:60])), 1)
        for name, repeat in {
            "glutamines": "Q",
            "serines": "S",
            "histidines": "HHPHG",
            "mucin": "TTTTPTTTTSTT",
            "coiled coil": "EEELEEKLLE",
            "collagen": "GPPGAP",
            "membrane": "LLILLLIAVL",
            "masked": "sssppt",
        }.items()
    },
    "two of few letters": (records((ONE, "S" * 60), (TWO, "T" * 60)), 2),
    "P1": (">P1\nMKV\nLLA*\n", 1),
    "P1 with words": (">P1 ;x\nMKV\nLLA*\n", 1),
    "a name with ;": (">P1;x\nMKV\nLLA\n", 1),
    "the sequences of ss.txt": (">101M:A:sequence\nMVLSEGEWQ\n", 1),
    "a name that begins so": (">ss_prediction\nMKV\n", 1),
}


@pytest.mark.parametrize("kind", THREE_LINES)
def test_labels_below_sequences_are_refused(read, kind):
    with pytest.raises(InputDataError, match=r"looks like a file of three lines.* in one line"):
        read(THREE_LINES[kind].encode(), allow_gaps=True)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_annotation_is_refused_by_name(read, kind):
    content, name = OTHERS[kind]
    with pytest.raises(InputDataError, match=name):
        read(content.encode())


@pytest.mark.parametrize("kind", SEQUENCES)
def test_sequences_that_look_like_annotation_are_read(read, kind):
    content, number = SEQUENCES[kind]
    found, tally = read(content.encode())
    assert len(found) == number and not tally.rejected


@pytest.mark.parametrize("kind", [*THREE_LINES, "ss.txt", "a3m"])
def test_the_advice_leaves_the_sequences(read, tmp_path, kind):
    content = THREE_LINES.get(kind) or OTHERS[kind][0]
    with pytest.raises(InputDataError) as caught:
        read(content.encode())
    program = str(caught.value).partition("awk '")[2].partition("'")[0]
    (tmp_path / "FILE").write_text(content)
    kept = subprocess.run(["awk", program, tmp_path / "FILE"], capture_output=True, check=True)
    found, tally = read(kept.stdout)
    lines = content.splitlines()
    assert [r.sequence for r in found] == [
        lines[n + 1] for n, line in enumerate(lines) if line[0] == ">" and "ss_" not in line
        and ":secstr" not in line
    ]  # fmt: skip
    assert not tally.rejected


ROWS = ">101\nMKTAY\n>U\t0.9\nMK-Yi\n"


@pytest.mark.parametrize("first", ["#5\t1\n", "#5\t2\n", "#A3M#\n", "\n#A3M#\n\n", ""])
@pytest.mark.parametrize("last", ["", "\0", "\0\n", "\0#5\t1\n>102\nMKV\n\0", "\0>102\nMKV\n\0"])
@pytest.mark.parametrize("size", [1, 4 << 20])
def test_alignments_of_colabfold_and_the_mpi_toolkit(read, small_blocks, first, last, size):
    small_blocks(size)
    content = (first + ROWS + last).encode()
    found, tally = read(content, allow_gaps=True)
    assert [r.sequence for r in found] == ["MKTAY", "MKYI"] + ["MKV"] * ("102" in last)
    assert found[0].line == 1 + first.count("\n") and not tally.rejected
    assert read(content, allow_gaps=True, allow_comments=True) == (found, tally)
    if first or last:
        with pytest.raises(InputDataError, match=r"this is an alignment .*type --allow-gaps"):
            read(content)


@pytest.mark.parametrize("option", ["allow_gaps", "allow_comments", "allow_nucleotides"])
def test_an_alignment_of_a_complex_is_refused(read, option):
    with pytest.raises(InputDataError, match=r"line 1: .*several chains"):
        read(f"#2,3\t1,1\n{ROWS}".encode(), **{option: True})
