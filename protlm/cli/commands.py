"""The commands: a sentence, the function that does the work, and what is typed for its parameters.

The functions, and the options classes that bring most of the flags, are imported when their command
is typed: `module:name` says where they are.
"""

import os
from dataclasses import MISSING, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from protlm.cli.flags import group
from protlm.config.fields import ANY_NUMBER, at_least, flag
from protlm.options import shared
from protlm.system.paths import check_output, existing_file

# The name of a parameter, the type of its values, and the field that is or brings its flags.
Parameter = tuple[str, Any, Any]


class Command(NamedTuple):
    """What a command does, and what is typed for the parameters of its function."""

    sentence: str
    function: str = ""
    parameters: tuple[Parameter, ...] = ()

    @property
    def options(self) -> type:
        """The class of what is typed."""
        return make_dataclass("Options", self.parameters, kw_only=True)


def _existing(text: str, what: str, *, or_folder: bool = False) -> Path:
    path = Path(text)
    return path if path == Path("-") else existing_file(path, what, or_folder=or_folder)


def _new(text: str, *, or_folder: bool = False) -> Path:
    path = Path(text)
    # That of `Path` raises an error if the name is too long.
    if path != Path("-") and not (or_folder and os.path.isdir(path)):  # noqa: PTH112
        check_output(path)
    return path


def _shipped_model() -> Path:
    from protlm.checkpoints.format import announced_default

    return announced_default("-m MODEL")


# One output has these names in all commands.
OUTPUT_NAMES = ("--output", "--out", "-o")
MODEL_NAMES = ("--model", "-m")
_MODEL_HELP = (
    "A run, a .ckpt file, an exported or foreign model (docs/interop.md), OWNER/MODEL of the "
    "Hugging Face Hub, or a shipped model's name; default: hybrid-6m."
)
_MODEL: Parameter = ("model_path", Path, flag(_MODEL_HELP, _shipped_model, *MODEL_NAMES))
_DIRECTORY: Parameter = ("directory", Path, flag("A data set.", MISSING, "DIRECTORY"))
_PATH: Parameter = ("path", Path, flag("A run, a checkpoint or a model.", MISSING, "PATH"))
_STRUCTURE = "a sequence file, or of a PDB or mmCIF structure"
_LABELS: Parameter = (
    "labels",
    tuple[str, ...],
    flag("TSV, CSV or FASTA files of labels, or SPLIT=FILE each.", MISSING, "LABELS"),
)
_JOBS: Parameter = ("submission", Any, group("protlm.options.jobs:Submission", default=None))


def _models(name: str, help: str) -> Parameter:
    return name, tuple[Path, ...], flag(help, lambda: (_shipped_model(),), *MODEL_NAMES)


def _files(
    name: str,
    help: str,
    shown: str,
    what: str = "a sequence file",
    *,
    kind: Any = tuple[Path, ...],
    or_folder: bool = False,
) -> Parameter:
    read = partial(_existing, what=what, or_folder=or_folder)
    return name, kind, flag(help, MISSING, shown, read=read)


def _output(help: str, default: Any = MISSING, *, or_folder: bool = False) -> Parameter:
    return (
        "output",
        Path,
        flag(help, default, *OUTPUT_NAMES, read=partial(_new, or_folder=or_folder)),
    )


def _options(name: str, *, of: str = "options", without: tuple[str, ...] = ()) -> Parameter:
    return of, Any, group(f"protlm.options.{name}", without=without)


_FASTA = _files(
    "fasta", "A sequence file, plain or gzip; - reads standard input.", "FASTA", kind=Path
)
_MAPS = _output("The HDF5 file to write.")
# What `protlm GROUP` prints above its commands.
GROUPS = {
    "data": "Verify, describe, merge or export prepared data sets.",
    "checkpoint": "Describe, verify, import, export or convert a model.",
    "features": "Learn sparse features of a layer, and name them.",
}
COMMANDS = {
    "prepare": Command(
        "Convert FASTA, .dat or XML files to HDF5 shards; resumable.",
        "protlm.data_prep.prepare:prepare_files",
        (
            (
                "sources",
                tuple[Path, ...],
                flag("Sequence files or folders; - reads standard input.", MISSING, "SOURCES"),
            ),
            ("out", Path, flag("The folder of the new data set.", MISSING, *OUTPUT_NAMES)),
            _options("prepare:SplitOptions", of="split"),
            _options("prepare:PrepareOptions"),
            _JOBS,
        ),
    ),
    # Hydra reads the arguments of these two.
    "train": Command("Train a model or continue a run: protlm train [key=value ...]."),
    "evaluate": Command("Evaluate a model: protlm evaluate checkpoint=RUN [...]."),
    "embed": Command(
        "Embed the proteins of sequence files; resumable.",
        "protlm.commands.embed:embed",
        (
            _files("sources", "Sequence files, plain or gzip; - reads standard input.", "FASTA"),
            _output("The file to write, or the folder of --format pt."),
            _MODEL,
            _options("embed:EmbedOptions"),
            _JOBS,
        ),
    ),
    "attention": Command(
        "Write exact attention maps, computed in blocks of rows.",
        "protlm.commands.attention:attention_maps",
        (_FASTA, _MAPS, _MODEL, _options("look:MapOptions")),
    ),
    "contacts": Command(
        "Predict contact maps from attention maps.",
        "protlm.commands.contacts:contacts",
        (
            _files(
                "sources",
                "Files of proteins, PDB or mmCIF structures, or folders of structures.",
                "PROTEINS",
                _STRUCTURE,
                or_folder=True,
            ),
            _MAPS,
            _MODEL,
            _options("look:ContactOptions"),
        ),
    ),
    "inspect": Command(
        "Write one page that shows a model, or two, on a protein.",
        "protlm.commands.inspect:inspect",
        (
            _files(
                "source",
                "A sequence file of one protein, or a PDB or mmCIF structure.",
                "PROTEIN",
                _STRUCTURE,
                kind=Path,
            ),
            _output("The HTML page to write."),
            _models("model_paths", "A model; repeat to compare two. Default: hybrid-6m."),
            _options("look:InspectOptions"),
        ),
    ),
    "generate": Command(
        "Sample proteins from a causal or a masked model and write them as FASTA.",
        "protlm.commands.generate:generate",
        (
            _output("x.fasta or x.fasta.gz; - prints."),
            _MODEL,
            _options("generate:GenerateOptions"),
        ),
    ),
    "score": Command(
        "Score variants of a protein, and compare with measured scores.",
        "protlm.commands.score:score_files",
        (
            _files(
                "sources",
                "Tables with the column mutant (A1P:D2N) or mutated_sequence.",
                "VARIANTS",
                "a table",
            ),
            _output("x.csv or x.tsv; or a folder, for several tables.", or_folder=True),
            _MODEL,
            _options("score:ScoreOptions"),
        ),
    ),
    "models": Command(
        "List the models that come with protlm.", "protlm.commands.checkpoint:print_models"
    ),
    "doctor": Command(
        "Check this machine, a model and an input before a job.",
        "protlm.commands.doctor:doctor",
        (
            ("fasta", Path, flag("A sequence file to check as well.", None, "FASTA")),
            ("model_path", Path, flag(_MODEL_HELP, None, *MODEL_NAMES)),
            ("as_json", bool, flag("Print JSON.", False, "--json")),
            ("device", str, shared.device()),
        ),
    ),
    "probe": Command(
        "Predict labels from frozen embeddings, and compare with baselines.",
        "protlm.commands.probe:probe",
        (
            _LABELS,
            _output("The new folder of the probe."),
            _MODEL,
            _options("labels:LabelOptions", of="reading"),
            _options("labels:ProbeOptions"),
            _options("labels:ProbeRunOptions", of="run"),
        ),
    ),
    "finetune": Command(
        "Train all weights, or LoRA, on labels; resumable.",
        "protlm.commands.finetune:finetune_files",
        (
            _LABELS,
            ("output", Path, flag("The folder of the run.", MISSING, *OUTPUT_NAMES)),
            _MODEL,
            _options("labels:LabelOptions", of="reading", without=("fold",)),
            _options("labels:FinetuneOptions"),
            ("device", str, shared.device()),
        ),
    ),
    "predict": Command(
        "Predict labels of proteins or residues by a probe.",
        "protlm.commands.probe:predict",
        (
            _FASTA,
            ("probe_dir", Path, flag("A folder of protlm probe.", MISSING, "--probe", "-p")),
            _output("x.tsv or x.csv."),
            (
                "model_path",
                Path,
                flag("The model of the probe; default: as the probe names it.", None, *MODEL_NAMES),
            ),
            _options("labels:PredictOptions"),
        ),
    ),
    "benchmark": Command(
        "Run a benchmark's tasks, beside baselines and published figures; resumable.",
        "protlm.commands.benchmark:benchmark",
        (
            ("name", str, flag("flip, pbc, proteingym or contacts.", MISSING, "NAME")),
            (
                "folder",
                Path,
                flag(
                    "A folder of its published files; of contacts, structures.", MISSING, "FOLDER"
                ),
            ),
            _output("The new folder of results."),
            _models("paths", "A model; repeat for several. Default: hybrid-6m."),
            _options("labels:BenchmarkOptions"),
        ),
    ),
    "data merge": Command(
        "Merge data sets that were split by the same rule.",
        "protlm.data_prep.merge:merge",
        (
            (
                "parts",
                tuple[Path, ...],
                flag("Data sets, in the order of the result.", MISSING, "PARTS"),
            ),
            _output("The folder of the new data set."),
        ),
    ),
    "data verify": Command(
        "Verify every shard against the manifest.", "protlm.commands.data:verify", (_DIRECTORY,)
    ),
    "data info": Command(
        "Print splits, lengths, sources, and counts of rejected and changed records.",
        "protlm.commands.data:info",
        (_DIRECTORY,),
    ),
    "data export": Command(
        "Write the sequences as FASTA.",
        "protlm.commands.data:export",
        (
            _DIRECTORY,
            _output("x.fasta or x.fasta.gz; default: print.", None),
            (
                "splits",
                tuple[str, ...],
                flag(
                    "A split; repeatable. Default: all.",
                    (),
                    "--split",
                    words=r"train|valid|test(_(iid|ood|remote)\w*)?",
                ),
            ),
        ),
    ),
    "data leakage": Command(
        "Count the sequences of each split that are similar to a training sequence.",
        "protlm.data_prep.leakage:leakage",
        (_DIRECTORY, _options("prepare:LeakageOptions")),
    ),
    "checkpoint info": Command(
        "Describe a run, a checkpoint or an exported model.",
        "protlm.commands.checkpoint:info",
        (_PATH,),
    ),
    "checkpoint verify": Command(
        "Verify the SHA-256 of one checkpoint, or of all checkpoints of a run.",
        "protlm.commands.checkpoint:verify",
        (_PATH,),
    ),
    "checkpoint export": Command(
        "Export the weights and their description to a new folder, or the network to an ONNX file.",
        "protlm.commands.checkpoint:export_model",
        (
            _PATH,
            _output("The folder to write; a file with --format onnx."),
            _options("checkpoint:ExportOptions"),
        ),
    ),
    "checkpoint import": Command(
        "Convert a foreign model to model.safetensors and config.json; docs/interop.md lists them.",
        "protlm.commands.checkpoint:import_model",
        (
            ("path", Path, flag("A model of another program.", MISSING, "SOURCE")),
            _output("The folder to write."),
            ("base", Path, flag("The model that an adapter of PEFT was made for.", None)),
        ),
    ),
    "checkpoint convert": Command(
        "Replace the attention of a model, and keep all other weights.",
        "protlm.commands.checkpoint:convert_model",
        (
            _PATH,
            _output("The folder to write."),
            ("attention", str, flag("The new mechanism; docs/mechanisms.md lists them.")),
            (
                "settings",
                tuple[str, ...],
                flag(
                    "OPTION=VALUE of the new mechanism; repeatable.", (), "--set", words=r"\w+=.+"
                ),
            ),
            ("seed", int, flag("Seed of the new weights.", None, allowed=at_least(0))),
        ),
    ),
    "features train": Command(
        "Train a sparse autoencoder on the hidden states of a layer; resumable.",
        "protlm.commands.features:train_features",
        (
            (
                "layer",
                int,
                flag(
                    "The layer: 0 is the embedding, n the output of block n, -1 the last.",
                    allowed=ANY_NUMBER,
                ),
            ),
            (
                "data",
                Path,
                flag("A data set of protlm prepare; its split train is read."),
            ),
            ("output", Path, flag("The new folder of the features.", MISSING, *OUTPUT_NAMES)),
            _MODEL,
            _options("features:FeatureOptions"),
            ("device", str, shared.device()),
            ("break_lock", bool, shared.break_lock()),
        ),
    ),
    "features describe": Command(
        "Name features by annotations, beside controls and chance.",
        "protlm.commands.features:describe_features",
        (
            ("folder", Path, flag("A folder of protlm features train.", MISSING, "FEATURES")),
            (
                "annotations",
                Path,
                flag("UniProt .dat or .xml, labels of residues, or a folder of structures."),
            ),
            _output("The new folder of tables."),
            _MODEL,
            _options("features:DescribeOptions"),
        ),
    ),
}
