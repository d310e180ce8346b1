"""Annotation that looks like residues is refused by name; sequences that look like it are read."""

import re
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
NAMED = {
    ":secstr": ">101M:A:sequence\nMVLSEGEWQ\n>101M:A:secstr\n   HHHHHH\n",
    ":disorder": ">101M:A:sequence\nMVLSEGEWQ\n>101M:A:disorder\nXXXXXXXXX\n",
    "ss_pred": ">ss_pred PSIPRED\nCCHHHHH\n>ss_conf\n9999999\n>q\nMKVLLAA\n",
    "ss_dssp": ">ss_dssp\nCCHHHHH\n>aa_dssp\nMKVLLAA\n>q\nMKVLLAA\n",
    "PIR": ">P1;CRAB\nCrystallin alpha chain\nMDIAIHHPWI\nRRPF*\n",
    "'>P1;ID'": ">F1;CRAB\nAlpha\nMDIAI\n>F1;B\nBeta\nMKV*\nC;Species: human\n",
}
NOT_PROTEINS = re.compile(r"(ss|aa)_|\S*:(secstr|disorder)")
LOW = ["Q", "S", "HHPHG", "TTTTPTTTTSTT", "EEELEEKLLE", "GPPGAP", "LLILLLIAVL", "sssppt"]
SEQUENCES = [
    *(records((ONE, (letters * 60)[:60])) for letters in LOW),
    records((ONE, TWO)),
    records((ONE, TWO), (TWO, ONE)),
    records((ONE, TWO), (TWO[:45], ONE[:45])),
    records((ONE, "S" * 60), (TWO, "T" * 60)),
    records(("MK", "VL"), ("MKV", "ILM")),
    ">P1\nMKV\nLLA*\n",
    ">P1 ;x\nMKV\nLLA*\n",
    ">P1;x\nMKV\nLLA\n",
    ">101M:A:sequence\nMVLSEGEWQ\n",
    ">ss_prediction\nMKV\n",
]


@pytest.mark.parametrize("kind", [*THREE_LINES, *NAMED])
def test_annotation_is_refused_by_name_and_the_advice_leaves_the_sequences(read, tmp_path, kind):
    content = THREE_LINES.get(kind) or NAMED[kind]
    with pytest.raises(InputDataError) as caught:
        read(content.encode())
    message = str(caught.value)
    assert (kind if kind in NAMED else "in one line") in message
    if "awk" in message:
        (tmp_path / "FILE").write_text(content)
        command = ["awk", message.partition("awk '")[2].partition("'")[0], tmp_path / "FILE"]
        found, tally = read(subprocess.run(command, capture_output=True, check=True).stdout)
        proteins = [r for r in content[1:].split("\n>") if not NOT_PROTEINS.match(r)]
        assert [r.sequence for r in found] == [r.split("\n")[1] for r in proteins]
        assert found and not tally.rejected


@pytest.mark.parametrize("content", SEQUENCES)
def test_sequences_that_look_like_annotation_are_read(read, content):
    found, tally = read(content.encode())
    assert len(found) == content.count(">") and not tally.rejected


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
