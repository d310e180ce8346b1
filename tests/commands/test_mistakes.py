"""Mistakes at the command line: an exit code, one sentence, and nothing left behind."""

import shlex
from pathlib import Path

import pytest

from tests.fixtures.commands import Command
from tests.marks import slow_but

FILES = {
    "two.fasta": ">P1\nMKTAYIAK\n>P2\nMKTAYIAK\n",
    "old.png": "",
    "book.xlsx": "PK\3\4",
    "map.json": '{"P1": "MKT"}',
    "twice.fasta": ">P1\nMKTAYIAK\n>P1\nMKTAYIAK\n",
    "rows.a3m": "#A3M#\n>a\nMKV\n",
    "uniprot.tsv": "Entry\tReviewed\tSequence\nP1\treviewed\tMKTAYIAK\n",
    "again.fasta": ">P1\nMKTAYIAKQRQISFVKSHFSRQ\n",
    "long.fasta": f">P1\n{'MKTAYIAKQR' * 210}\n",
    "v.csv": "mutant\nM1A\n",
    "folder/v.csv": "mutant\nM1A\n",
    "scored.csv": "mutant,masked-marginals\nM1A,1\n",
    "wrong.csv": "mutant\nM1A\nA2P\n",
    "zero.csv": "mutant\nM0A\nT2A\nY4F\n",
    "other_value.csv": "mutant,DMS_score\nK2R,1\nM1A,0\nk2r,2\n",
    "states.fasta": ">P1\n" + "CCEEEHHHHH" * 50 + "\n",
    "sequences.csv": "id,seq\nP1,MKTAYIAK\nP2,MKTAYIAK\n",
    "bytes.csv": "SQLite format 3\0",
    "comments.csv": "# urn:mavedb:1, by x\n#\nmutant,DMS_score\nM1P,1\nM9A,2\n",
    "utf16.csv": "m\0u\0t\0a\0n\0t\0\n\0",
    "indel.csv": "mutated_sequence\nMKT\n",
    "other.csv": "DMS_id,target_seq\nother,MKT\n",
    "labels.tsv": "identifier\tsequence\tlabel\tsplit\n"
    + "".join(f"P{n}\tMKTAYI{'KR' * n}\tc{n % 2}\t{('train', 'test')[n % 2]}\n" for n in range(8)),
}
# The exit code, the arguments, and the words of the sentence.
TABLE = """
2 finetune labels.tsv -m run -o o --lora-targets query -> --lora-targets query needs --lora RANK
2 features train -m run --layer 1 --data data -o o --k 64 --latents 32 -> --k 64 & --latents 32
2 features train -m run --layer 9 --data data -o o -> layer 9 does not exist
3 features describe data -m run --annotations x.tsv -o o -> protlm features train has written
2 probe x.tsv -o o --seed -1 -> --seed & -1 & at least 0
2 probe x.tsv -o o --seed 18446744073709551616 -> --seed & 184467440737 & below 2^63
2 finetune x.tsv -o o --learning-rate inf -> --learning-rate & inf & below 2^63
2 finetune x.tsv -o o --learning-rate nan -> --learning-rate & nan & above 0
2 generate -m run -o o --number 1000000000000000000000000000000 -> --number & 100000000000
2 embed x.fasta -o o.h5 --processes 1000000000 -> --processes & 1000000000 & 1000
2 embed x.fasta -m '' -o o.h5 -> the value of -m is empty
2 prepare x.fasta --out data -o '' -> the value of -o is empty
2 embed x.fasta --output= -> the value of --output is empty
2 train seed=-1 run_dir=o -> seed=-1 must be at least 0
2 train seed=18446744073709551616 run_dir=o -> must be below 2^63
2 train optimizer.learning_rate=inf run_dir=o -> optimizer.learning_rate=inf must be below 2^63
2 prepare '' --out o -> an argument is empty
2 train '' -> an argument is empty
2 '' -> an argument is empty
4 score x.fasta --scan -m run -o . -> exists
4 predict x.fasta -p run -o . -> exists
2 embedd -> embedd & --help
2 models ~no-such-user/x -> there is no user no-such-user
2 embed x.fasta -> --output
2 embed x.fasta -m run -o o.h5 --include median -> median & mean
2 embed x.fasta -m run -o o.h5 --repr-layers 7 -> layer 7 does not exist
2 embed x.fasta -m run -o o.h5 --include ranges -> --ranges TABLE.tsv
2 embed x.fasta -m run -o o.h5 --merge --dry-run -> --merge and --dry-run exclude each other
2 embed x.fasta -m run -o o.h5 --executor slurm --merge -> computes and merges all shares
2 embed - -m run -o o.h5 --executor slurm --processes 2 -> --executor reads the sequences several
2 embed - -m run -o o.h5 --processes 2 -> --processes reads the sequences several times
2 embed x.fasta -m run -o o.h5 --dtype bfloat16 -> --format hdf5 has no bfloat16
2 embed x.fasta -m run -o o.parquet --format parquet --dtype bfloat16 -> parquet has no bfloat16
2 embed x.fasta -m run -o o.parquet --format parquet --include mean per_tok -> --format ragged
2 embed x.fasta -m run -o o.h5ad -> is an HDF5 file, not .h5ad & or: --format anndata
2 embed x.fasta -m run -o o.csv -> the output is an HDF5 file, not .csv; type: -o o.h5
2 embed x.fasta -m run -o o.h5 --format npz -> is a NumPy archive, not .h5; type: -o o.npz
2 embed x.fasta -m run -o o.npz -> type: -o o.h5, or: --format npz
2 embed x.fasta -m run -o o.pt --format pt -> is a folder of .pt files, not .pt
3 embed none.fasta -m none -o o.h5 -> none.fasta: no such file
3 score v.csv none.csv -m none -o s --wild-type x.fasta -> none.csv: no such file
3 probe none.tsv -m none -o o -> none.tsv: no such file
4 inspect x.fasta -m none -o v.csv -> v.csv exists already
2 generate -o g.fasta -> only a causal model & type --start SEQUENCES.fasta
3 embed x.fasta -m none -o o.h5 -> none
3 embed x.fasta -m hybird-6m -o o.h5 -> hybird-6m: no such model (did you mean hybrid-6m?); give
3 embed x.fasta -m broken -o o.h5 -> step-00000004.ckpt
4 embed x.fasta -m run -o x.fasta -> x.fasta
4 embed x.fasta -m run -o x.fasta/o.h5 -> x.fasta
2 attention x.fasta -m run -o o.h5 --layers 9 -> 9
2 generate -m run -o o.fasta -> objective=causal & type --start SEQUENCES.fasta
4 generate -m run -o x.fasta -> x.fasta
2 generate -m run -o o.fasta --temperature -1 -> -1
2 generate -m run -o o.fasta --top-p 0 -> top-p 0
3 generate -m causal -o o.fasta --prefix MK1 -> the prefix: '1' at residue 3
2 score x.fasta -m run -o o.csv --wild-type x.fasta -> --scan & --wild-type x.fasta
2 score v.csv -m run -o o.csv --estimator esm -> esm & masked-marginals
2 score v.csv -m run -o o.csv --estimator masked_marginal -> (did you mean masked-marginals?)
2 score x.fasta --scan -m run -o o.h5 -> o.csv
2 score x.fasta --scan -m run -o o.csv --estimator causal-likelihood -> masked model & marginals
2 score x.fasta two.fasta --scan -m run -o o.csv -> one sequence file
2 score v.csv -m run -o o.csv --figure o.png -> --scan
3 data verify none -> none
2 data export data --split tset -> tset & test
3 prepare none.fasta --out o -> none.fasta
4 prepare x.fasta --out broken -> broken
2 prepare x.fasta --out o --test-fraction 1.5 -> 1.5
2 prepare x.fasta --out o --split-table t.tsv --family-table f.tsv -> --split-table & --family-table
2 prepare x.fasta --out o --ood-families PF00069 PF00001 -> --family-table & uniprot.org
3 prepare x.fasta --out o --cluster-table none.tsv -> none.tsv
3 data leakage none -> none & protlm prepare
2 data leakage data --min-shared 50 -> 50 & 1
2 prepare x.fasta --out o --workers 0 -> --workers 0
2 prepare x.fasta --out o --max-reject-rate nan -> --max-reject-rate nan & at most 1
2 generate --start x.fasta -o o --mask-fraction 0 -> --mask-fraction 0 & above 0 and at most 1
2 prepare x.fasta --out o --min-length 9 --max-length 3 -> --min-length 9 & --max-length 3
3 prepare x.fasta --out o --organism 9606 -> none of the 1 records is left & organism
3 prepare rows.a3m --out o -> rows.a3m, line 1: this is an alignment & type --allow-gaps
2 prepare x.fasta --out o --executor pbs -> --executor pbs is not slurm
2 prepare x.fasta --out o --executor local -> is not slurm & prepare: --workers N
2 prepare x.fasta --out o --slurm time=1 -> --slurm time=1 & --executor slurm
3 prepare run --out o -> run
2 data merge data data --out o -> once
3 data merge none --out o -> none & protlm prepare
3 checkpoint verify broken -> step-00000004.ckpt
3 checkpoint info none -> none
2 train data.dirr=data -> data.dirr & data.dir
2 train model=tyni run_dir=o -> model=tyni does not exist (did you mean model=tiny?); & esm2_8m
2 evaluate --cfg job evaluation=contact -> contact does not exist (did you mean evaluation=contacts?
2 evaluate evaluation.relatives.number=[0,1] -> type evaluation=[relatives], too
2 train 'run_dir=$J' trainer.max_steps=1 -> $J & ${oc.env:NAME}
2 train data.dir=data data.train_split=tran run_dir=o -> tran & train
2 train trainer.accumulate_grad_batches=3 data.dir=data run_dir=run -> run_dir
3 evaluate -m none data.dir=data -o o.json -> none: no such model
2 train 'trainer.max_steps=5 run_dir=x' -> 5 run_dir=x' & two settings & without quotes
2 evaluate ./run -> checkpoint=./run
3 checkpoint info x.fasta -> x.fasta & .ckpt
3 contacts x.fasta -m run -o o.h5 --fit none -> none
2 train trainer.accelerator=cpu trainer.devices=9999 run_dir=o -> trainer.devices=9999 & processors
2 train trainer.accelerator=gpu trainer.devices=99 -> GPUs
2 train trainer.num_nodes=2 data.dir=data run_dir=o -> torchrun --nnodes=2 & slurm/train.sbatch
2 train model.num_layers=0 run_dir=o -> model.num_layers=0
2 evaluate checkpoint=run data.dir=data 'split=[]' -> split
4 train data.dir=data run_dir=x.fasta -> x.fasta
2 train trainer.precision=16-mixed run_dir=o -> 16-mixed
2 train model.positions=learned data.max_length=4096 run_dir=o -> data.max_length
2 train attention=linformer objective=causal run_dir=o -> objective=masked & performer_relu & hybrid
2 train attention=hybrid attention.widow=8 run_dir=o -> did you mean attention.window? & mechanism
2 train attention=hybrid 'attention.options={decay: learned}' run_dir=o -> +attention.options.decay=
2 train attention=hybrid attention.options.decay=learned run_dir=o -> +attention.options.decay=VALUE
2 train attention=alternating attention.window=8 run_dir=o -> +attention.options.MECHANISM.window=
2 train attention=aft_full data.max_length=4096 run_dir=o -> data.max_length=4096 & model.max_length
2 train --multirun trainer.devices=2 seed=0,1 run_dir=o data.dir=data -> --multirun
2 train --multirun seed=0,1 'run_dir=o-${seed}' data.dir=data hydra/launcher=pbs -> submitit_slurm
2 train --multirun seed=0,1 'run_dir=o-${seed}' hydra/launcher=submitit_slurm -> srun and sbatch
2 evaluate 'evaluation=[masked]' -> data.dir=DIR
2 evaluate checkpoint=hybrid-6m -> data.dir=DIR
3 evaluate checkpoint=broken data.dir=data split=test output=o.json -> step-00000004.ckpt
3 embed unusable.fasta -m run -o o.h5 -> unusable.fasta: none of the 2 & 2: digit, line 3
3 inspect unusable.fasta -m run -o o.html -> unusable.fasta: none of the 2 & 2: digit, line 3
2 score v.csv -m run -o s -> neither is given
2 score v.csv -m run -o s --wild-type x.fasta --reference other.csv -> both are given
3 score v.csv -m run -o s --wild-type two.fasta -> has 2 proteins; give a file of one protein
3 score v.csv -m run -o s --reference other.csv -> has no row with the DMS_id v
3 score zero.csv -m run -o s.csv --wild-type x.fasta --skip-invalid \
    -> 3 of 3 rows fit & by chance & type --first-residue 0
3 score other_value.csv -m run -o s.csv --wild-type x.fasta \
    -> other_value.csv, line 4: DMS_score is 2, and in line 2, of the same variant, 1
3 score v.csv -m run -o s.csv --wild-type x.fasta --label fit \
    -> mutant; the label fit is not one & type --label COLUMN
3 probe uniprot.tsv -m run -o p -> Entry, Reviewed, Sequence, not label
3 probe map.json -m run -o p -> map.json: this is JSON, not
3 probe book.xlsx -m run -o p -> book.xlsx: this is a zip archive & or an Excel workbook (save
3 score bytes.csv -m run -o s.csv --wild-type x.fasta -> bytes.csv: this is a binary file, not a
3 score comments.csv -m run -o s.csv --wild-type x.fasta -> comments.csv, line 5: M9A: position 9
3 embed states.fasta -m run -o o.h5 -> letters CEH alone: these look like secondary structures
3 prepare states.fasta --out o -> letters CEH alone
3 score states.fasta --scan -m run -o s.csv -> letters CEH alone
3 contacts states.fasta -m run -o c.h5 -> letters CEH alone
3 embed sequences.csv -m run -o o.h5 -> table & r['id'], r['seq'] & > SEQUENCES.fasta
3 embed folder -m run -o o.h5 -> folder is a folder & the sequences of structures (docs/embed.md)
2 generate -m run -o g.fasta --start x.fasta --temperature 0,7 -> --temperature 0,7 & write 0.7
2 embed x.fasta -m run -o o.h5 --toks-per-batch 4,5 -> 4,5 is not a whole number
2 probe x.tsv -m run -o o --seed=4.5 -> --seed 4.5 is not a whole number
2 generate -m run -o g.fasta --number 1e9 -> --number 1000000000 must be at least 1 and at most
2 finetune labels.tsv -m run -o new --epochs 1,000 -> --epochs 1,000 is not a whole number
2 train optimizer.learning_rate=0,0001 run_dir=o -> write 0.0001
3 score utf16.csv -m run -o s.csv --wild-type x.fasta \
    -> iconv -f UTF-16 -t UTF-8 utf16.csv > utf16.utf8.csv
3 score v.csv wrong.csv -m run -o s --wild-type x.fasta -> wrong.csv, line 3: A2P: position 2 of
2 score v.csv indel.csv -m run -o s --wild-type x.fasta -> indel.csv: the estimator masked-marg
2 score v.csv -m none -o s.csv --json ./s.csv --wild-type x.fasta -> would write the same file
2 score v.csv -m none -o s --json s/v.csv --wild-type x.fasta -> would write the same file
2 score v.csv -m none -o s --json s --wild-type x.fasta -> would write the same file
2 score x.fasta --scan -m none -o s.csv --figure s.jpg -> s.jpg is not a figure & --figure s.png
4 score x.fasta --scan -m none -o s.csv --figure old.png -> old.png exists already
3 score x.fasta --scan -m none -o s.csv --figure s.PDF -> none: no such model
4 score v.csv -m run -o wrong.csv --wild-type x.fasta -> wrong.csv exists already
2 score scored.csv -m run -o s.csv --wild-type x.fasta -> already has a column masked-marginals
2 score v.csv folder/v.csv -m run -o s --wild-type x.fasta -> v is the name of several tables
2 score v.csv wrong.csv -m run -o s.csv --wild-type x.fasta -> is the name of one table & are 2
2 generate -m causal -o g.fasta --start x.fasta -> --start is for models that predict masked
2 generate -m run -o g.fasta --start x.fasta --prefix MK -> --prefix is for causal models & --start
2 generate -m run -o g.fasta --start x.fasta --max-length 9 -> --max-length is for causal models
2 generate -m causal -o g.fasta --sweeps 2 -> need sequences; type --start
2 attention x.fasta -m run -o m.h5 --heads 3 -> head 3 does not exist
2 attention x.fasta -m run -o m.png -> the output is an HDF5 file, not .png; type: -o m.h5
2 attention two.fasta -m run -o m.h5 --figure m.png -> --figure draws one protein
2 attention x.fasta -m run -o m.h5 --dtype bfloat16 -> bfloat16 is not one of float32, float16
2 contacts x.fasta -m run -o c.h5 --figure c.jpg -> c.jpg is not a figure by its name
2 contacts x.fasta -m run -o c.h5 --chain Z \
    -> a PDB or mmCIF file, and x.fasta is & leave --chain out
3 contacts x.fasta again.fasta -m run -o c.h5 -> again.fasta: the identifier P1 is also in
2 inspect x.fasta -m run -o p.html --layers 3 -> layer 3 does not exist
2 inspect x.fasta -m run -o p.html --heads 3 -> head 3 does not exist
2 inspect x.fasta -m run -o p.html --chain A -> leave --chain out & PDB or mmCIF file
2 inspect x.fasta -m run -m run -m run -o p.html -> compares two models, and 3 are given
3 inspect two.fasta -m run -o p.html -> has 2 proteins, and a page shows one
3 score twice.fasta -m run --scan -o s.csv -> has 2 proteins; give a file of one protein
3 contacts twice.fasta -m run -o c.h5 -> twice.fasta, line 3: the identifier P1 & --duplicates
3 embed uniprot.tsv -m run -o o.h5 -> r['Entry'], r['Sequence'] & delimiter='\\t'
2 embed x.fasta -m run -o o.h5 --executor local -> --executor local is not slurm & --processes N
2 attention x.fasta -m run -o o.h5 --layers 1,x -> --layers 1,x is not a number & --layers all
2 inspect long.fasta -m run -o p.html -> 2,100 residues, and a page shows at most 2,048
2 inspect x.fasta -m run -o p.h5 -> is an HTML page; type: -o p.html
2 checkpoint convert run -o new --attention reformer -> the keys of reformer are its queries
2 checkpoint convert run -o new --attention performer_relu -> already has attention=performer_relu
2 checkpoint convert run -o new --attention softmx -> attention=softmx & mean attention=softmax?
2 checkpoint convert run -o new --attention softmax --set nothing=1 \
    -> attention.nothing is not a & --set OPTION=VALUE
2 checkpoint convert run -o new --attention performer_softmax --set num_features \
    -> type --set num_features=VALUE
2 checkpoint convert run -o new --attention performer_softmax --set =3 -> =3 is not OPTION=VALUE
2 checkpoint convert run -o new --attention performer_softmax --set num_features=0 \
    -> type attention.num_features=256 & --set OPTION=VALUE
2 checkpoint convert run -o new --attention softmax --seed -1 -> --seed -1 must be at least 0
2 checkpoint convert my.attention.v2 -o new --attention reformer -> my.attention.v2/
3 checkpoint convert none -o new --attention softmax -> none
4 checkpoint convert run -o run --attention softmax -> run
2 checkpoint export run -o new --dtype float16 -> --dtype float16 is not one of float32, bfloat16
2 checkpoint export run -o new --format hf --dtype bfloat16 -> bfloat16 needs --format protlm
2 checkpoint export run -o new --fit x.json -> --fit x.json needs --format hf
4 data export data -o x.fasta -> x.fasta exists already
2 finetune labels.tsv -m run -o new --lora 1000000000 -> --lora 1000000000 must be at most 64
2 finetune labels.tsv -m run -o new --devices 9999 -> devices=9999: this machine has
2 finetune labels.tsv -m run -o new --devices 2 --batch-size 1 \
    -> 2 divide the batch of 1 & type --batch-size 2
2 finetune labels.tsv -m run -o new --lora 2 --lora-targets nothing \
    -> no layer is named 'nothing' & --lora-targets LAYERS
2 probe labels.tsv -m run -o new --layers 9 -> layer 9 does not exist
4 probe labels.tsv -m run -o x.fasta -> x.fasta exists already
3 probe labels.tsv -m run -o new --task number -> 'c0' is not a number & type --task class
3 probe labels.tsv -m run -o new --task per-residue -> 2 labels for the 6 residues of P0
2 probe labels.tsv -m run -o new --cluster --cluster-table v.csv -> omit one of them
2 probe labels.tsv -m run -o new --task letters -> letters & per-residue
2 probe labels.tsv -m run -o new --separator : -> --separator & ;
"""
MISTAKES = [tuple(line.split(" -> ")) for line in TABLE.strip().splitlines()]
# An interpreter takes seconds to start: one mistake for each way in which a command is begun.
IN_A_PROCESS = (
    "2 embedd",
    "3 embed x.fasta -m broken -o o.h5",
    "4 prepare x.fasta --out broken",
    "2 train data.dirr=data",
    "3 evaluate checkpoint=broken data.dir=data split=test output=o.json",
)


@pytest.fixture
def place(workplace: Path, causal_run: Path) -> Path:
    """The workplace with more files."""
    for name, text in FILES.items():
        (workplace / name).parent.mkdir(exist_ok=True)
        (workplace / name).write_text(text)
    (workplace / "causal").symlink_to(causal_run)
    (workplace / "my.attention.v2").symlink_to(workplace / "run")
    return workplace


def assert_one_sentence(run: Command, typed: str, words: str, folder: Path) -> None:
    """Makes a mistake, and looks at what is said, at the exit code and at the folder."""
    code, *arguments = shlex.split(typed)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = run(*arguments, cwd=folder, code=int(code))
    assert "Traceback" not in done.stderr + done.stdout
    told = [line for line in done.stderr.splitlines() if line.startswith("protlm: ")]
    assert len(told) == 1, done.stderr
    for word in words.split(" & "):
        assert word.strip() in told[0]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(("typed", "words"), slow_but(MISTAKES, *MISTAKES[::8]))
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    typed: str, words: str, place: Path, protlm_in_process: Command
) -> None:
    assert_one_sentence(protlm_in_process, typed, words, place)


@pytest.mark.slow
@pytest.mark.parametrize("typed", IN_A_PROCESS)
def test_a_mistake_ends_a_process_with_one_sentence(
    typed: str, place: Path, protlm_command: Command
) -> None:
    assert_one_sentence(protlm_command, typed, dict(MISTAKES)[typed], place)


def test_values_without_end_are_mistakes(place: Path, protlm_in_process: Command) -> None:
    for typed, words in (
        (f"2 embed x.fasta -o o.h5 --shard {'9' * 5000}", "I/N"),
        (f"4 embed x.fasta -m run -o {'n' * 246}.h5", "a name has at most & bytes, as .NAME."),
        (f"4 prepare x.fasta --out {'é' * 124}", "bytes, as .NAME."),
    ):
        assert_one_sentence(protlm_in_process, typed, words, place)
