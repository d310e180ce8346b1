"""Annotation that looks like residues is refused by name; sequences that look like it are read."""

import re
import subprocess

import pytest

from protlm.system.errors import InputDataError

# 60 residues of human titin, and others.
ONE = "MTTQAPTFTQPLQSVVVLEGSTATFEAHISGFPVPEVSWFRDGQVISTSTLPGVQISFSD"
TWO = "GRAKLTIPAVTKANSGRYSLKATNGSGQATSTAELLVKAETAPPNFVQRLQSMTVRQGSQ"
STATES = "DDDFDEDPAEDAAQFKFKADFDPDDDDDFFAKKFKAFVVPRHGAFMTGHPPDGD"
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
    "unknown labels": records(*[(ONE[:n], ("Q" * 30 + "D" * 30)[:n]) for n in (60, 50, 40)]),
    "of one length": records(*[(ONE, "S" * n + "I" * (60 - n)) for n in (18, 20, 22)]),
    "burial": records(*[(one, "BEEBEEEBBE" * 6) for one in (ONE, TWO, ONE[::-1])]),
    "peptides": records(*[(ONE[n : n + 8], "BEEBEEEB") for n in range(9)]),
    "disorder": records((ONE, "D" * 60), (TWO, "D" * 20 + "S" * 40), (ONE[::-1], "S" * 60)),
    "two lines of labels": records((ONE, f"{TOPOLOGY}\n{'0' * 60}")),
    "wrapped": records((f"{ONE}\n{TWO[:9]}", f"{TOPOLOGY}\n{'M' * 9}")),
    "wrapped sequences": records((f"{ONE[:40]}\n{ONE[40:]}", TOPOLOGY)),
    "wrapped to one length": records((f"{ONE}\n{TWO}", f"{TOPOLOGY}\n{'O' * 60}")),
    "some without labels": records((ONE, TOPOLOGY)) * 2
    + f">p3\n{TWO}\n"
    + records((TWO, TOPOLOGY)),
    "with a fault": records(*[(ONE[:n], TOPOLOGY[:n]) for n in range(40, 60)]) + ">x\nMKV\n",
}
NAMED = {
    ":secstr": ">101M:A:sequence\nMVLSEGEWQ\n>101M:A:secstr\n   HHHHHH\n",
    ":disorder": ">101M:A:sequence\nMVLSEGEWQ\n>101M:A:disorder\nXXXXXXXXX\n",
    "_ss": f">p1\n{ONE}\n>p1_ss\n{'CCHHH' * 12}\n>p2\n{TWO}\n>p2_ss\n{'EEEEE' * 12}\n",
    "records of sec": f">p1 x\n{ONE}\n>p1:pred\nCCHH-\n{'C' * 55}\n>p2\n{TWO}\n>p2:pred\nHHHE\n",
    "3Di": f">p\n{ONE}\n>p_ss\n{STATES}\n>q\n{TWO}\n>q_ss\n{STATES}",
    "3Di states": f">p\n{STATES}\n>q\n{STATES.lower()}\n",
    "ss_pred": ">ss_pred PSIPRED\nCCHHHHH\n>ss_conf\n9999999\n>q\nMKVLLAA\n",
    "ss_dssp": ">ss_dssp\nCCHHHHH\n>aa_dssp\nMKVLLAA\n>q\nMKVLLAA\n",
    "PIR": ">P1;CRAB\nCrystallin alpha chain\nMDIAIHHPWI\nRRPF*\n",
    "PIR (NBRF)": ">P1;CRAB\nCrystallin alpha chain\nMDIAIHHPWI\nRRPF\n",
    "this is PIR": ">P1;CRAB\nsequence:CRAB::::\nMDIAIHHPWI\nRRPF\n>P1;B\nBeta 2\nMKV\n",
    "'>P1;ID'": ">F1;CRAB\nAlpha\nMDIAI\n>F1;B\nBeta\nMKV*\nC;Species: human\n",
}
NOT_PROTEINS = re.compile(r"(ss|aa)_|\S*:(secstr|disorder)|\S*[_:](ss|pred)")
LOW = ["Q", "S", "HHPHG", "TTTTPTTTTSTT", "EEELEEKLLE", "GPPGAP", "LLILLLIAVL", "sssppt"]
SEQUENCES = [
    *(records((ONE, (letters * 60)[:60])) for letters in LOW),
    records((ONE, TWO)),
    records((ONE, TWO), (TWO, ONE)),
    records((ONE, TWO), (TWO[:45], ONE[:45])),
    records((ONE, "S" * 60), (TWO, "T" * 60)),
    records(("MKTAYI", "HHHHHH"), ("MKVLLAGGAA", "GGGGSGGGGS")),
    records(*[(ONE, TWO[n:] + "G" * n) for n in range(20)]),
    records((f"{ONE}\n{TWO}", f"{ONE[::-1]}\n{TWO[::-1]}")),
    records((ONE, f"{TWO}\n{ONE}")),
    records(*[("MKVLW", "DEYRQ")] * 80),
    records((ONE, TWO[:9]), (TWO, ONE[:30])) + records((ONE, "S" * 60)),
    f">p\n{STATES[:-1]}\n>q\n{STATES}\n",
    ">p\nMKV\n>p_ss\nMKV\n>p_pred\nMKVHEC\n>q_class\nHEC\n",
    records(("MK", "VL"), ("MKV", "ILM")),
    ">P1\nMKV\nLLA*\n",
    ">P1 ;x\nMKV\nLLA*\n",
    ">P1;x\nMKV\nLLA\n",
    ">101M:A:sequence\nMVLSEGEWQ\n",
    ">x:disordered\nMVLSEGEWQ\n>x_disorder\nMKV\n",
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
        rows = slice(2, None) if "PIR" in message else slice(1, 3 if "wrapped" in kind else 2)
        expected = ["".join(r.split("\n")[rows]).partition("*")[0] for r in proteins]
        assert [r.sequence for r in found] == expected
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
