"""Exported models: transformers computes the same without protlm, and what it saves is read.

Their code is a bundle: it computes what the modules compute, and has nothing that is not used.
"""

import ast
import json
import math
import re
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import protlm
from protlm import attention, interop
from protlm.checkpoints.description import ModelDescription
from protlm.checkpoints.format import Checkpoint
from protlm.config import (
    Activation,
    Frame,
    HeadKind,
    ModelConfig,
    Norm,
    Objective,
    Positions,
    QueryKeyWidth,
    Relatives,
    TrainConfig,
)
from protlm.config.composition import compose, to_plain
from protlm.data.dataset import collate
from protlm.data.masking import IGNORE
from protlm.data.records import Tally
from protlm.data.records.record import residues
from protlm.data.vocabulary import VOCABULARY, vocabulary_of
from protlm.interop import hugging_face
from protlm.interop.bundle import Bundle, Name
from protlm.interop.hugging_face import is_esm
from protlm.model.transformer import build_network
from protlm.options.prepare import ReadOptions
from tests.fixtures.commands import ROOT, run_python
from tests.interop.example import Example
from tests.interop.families import ESM, ESM_1V
from tests.interop.test_families import assert_same, outputs

PROGRAM = Path(__file__).parent / "programs" / "use_exported.py"
TWO = Frame(("<bos>", "1"), ("2", "<eos>"), ("<bos>", "1", "2"))
SEQUENCES = ["MKTVRQERLKSIVRILERSKEPVSX", "MK", "ACDEFGHIKLMNPQRSTVWY"]


def model_with(
    mechanism: str,
    *,
    objective: Objective = Objective.masked,
    frame: Frame | None = None,
    **changes: Any,
) -> Checkpoint:
    options = dict(to_plain(compose(TrainConfig, [f"attention={mechanism}"]))["attention"])
    settings = {"num_layers": 2, "num_heads": 2, "model_dim": 16, "feedforward_dim": 24}
    settings |= {"max_length": 64, "positions": Positions.rotary, "norm": Norm.rms}
    config = ModelConfig(**(settings | changes))
    words = vocabulary_of(frame)
    network = build_network(config, options, seed=0, vocabulary=words)
    del options["name"]
    description = ModelDescription(
        vocabulary=words.hash,
        objective=objective,
        model=config,
        attention=mechanism,
        attention_options=options,
        seed=0,
        max_length=64,
        frame=frame,
    )
    return Checkpoint(Path("x"), description, network.state_dict())


def exported(model: Checkpoint, folder: Path) -> Path:
    """Exports a model, with its outputs in `inputs.pt`."""
    hugging_face.export(model, folder, None)
    described, causal = model.description, model.description.objective is Objective.causal
    words = vocabulary_of(described.frame)
    network = build_network(described.model, described.attention_config, seed=1, vocabulary=words)
    network.eval().load_state_dict(model.weights)
    encoded = [VOCABULARY.encode(sequence) for sequence in SEQUENCES]
    tokens_BL, mask_BL = collate(encoded, vocabulary=words)
    states, found, logits_BLV = outputs(network, tokens_BL, mask_BL, causal=causal)
    rows = mask_BL[:, None, :, None]
    labels_BL = tokens_BL.masked_fill(~mask_BL, IGNORE)
    # A causal model predicts the token after a position.
    last, distance = tokens_BL.shape[1] - int(causal), int(causal)
    predicted_NV = logits_BLV[:, :last].flatten(0, 1)
    expected = {
        "labels": labels_BL,
        "loss": F.cross_entropy(predicted_NV, labels_BL[:, distance:].flatten()),
        "sequences": SEQUENCES,
        "tokens": tokens_BL,
        "mask": mask_BL,
        "inner": [words.inner.start, words.inner.stop],
        "causal": causal,
        "logits": logits_BLV[mask_BL],
        "hidden": [state_BLD[mask_BL] for state_BLD in states],
        "maps": [x[rows.expand_as(x)] for x in found],
    }
    torch.save(expected, folder / "inputs.pt")
    return folder


def use_exported(*folders: Path, libraries: Path | None = None) -> None:
    """Loads the folders in a process that cannot import protlm, by the libraries of a folder."""
    environment = {"OMP_NUM_THREADS": "1", "HOME": str(folders[0]), "HF_HOME": str(folders[0])}
    if libraries is not None:
        environment["PYTHONPATH"] = str(libraries)
    done = run_python(PROGRAM, *folders, cwd=folders[0], env=environment)
    assert done.stdout.count("good") == len(folders)


def assert_read_again(folder: Path, model: Checkpoint) -> None:
    """What is exported, and what transformers has saved of it, is the same model."""
    has_code = any(folder.glob("*.py"))
    # A bare ESM has lost its output layer.
    saved = sorted(folder.glob("saved_*" if has_code else "saved_*MaskedLM"))
    assert len(saved) == (4 if has_code else 1)
    for path in (folder, *saved):
        found = interop.read(path)
        assert found.description.model == model.description.model
        assert not has_code or found.description == model.description
        assert_same(found.weights, model.weights)


def esm(folder: Path, example: Example = ESM) -> interop.ForeignModel:
    tensors = {name: value.float() for name, value in example.tensors().items()}
    return interop.read(example.save(folder, tensors))


EXTRAS: dict[str, Any] = {
    "positions": Positions.sinusoidal,
    "activation": Activation.swiglu,
    "head": HeadKind.dense_norm,
    "tied_head": True,
    "qk_norm": True,
    "token_dropout": True,
    "embedding_norm": True,
    "convolution": 3,
    "output_gate": True,
    "value_embedding": True,
}


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "extras": ("performer_softmax", EXTRAS),
    "skips": ("softmax", {"positions": Positions.learned, "unet_skips": True}),
    "chunked": ("linear", {"feedforward_chunk": 7}),
    "hybrid": ("hybrid", {"qk_norm": True}),
    "alternating": ("alternating", {"num_layers": 4, "qk_norm": True}),
    "width": ("softmax", {"qk_norm": True, "qk_norm_width": QueryKeyWidth.layer}),
    "stored": ("performer_relu", {"stored_frequencies": True}),
    "relatives": ("hybrid", {"relatives": Relatives.full, "relatives_every": 2}),
    "causal": ("performer_relu", {"objective": Objective.causal, "qk_norm": True}),
    "frame": ("softmax", {"frame": TWO}),
    "bases": ("softmax", {"global_every": 2, "qkv_clip": 0.5, "head": HeadKind.dense_layer_norm}),
}


@pytest.mark.peers
@pytest.mark.slow
def test_transformers_loads_a_model_without_protlm_and_computes_the_same(tmp_path):
    """Every mechanism, all parts of a model, and an ESM without code, in one process."""
    models: dict[str, Any] = {name: model_with(name) for name in attention.names()}
    models |= {f"with_{part}": model_with(one, **more) for part, (one, more) in PARTS.items()}
    models |= {
        "esm2": esm(tmp_path / "esm2_source"),
        "esm1v": esm(tmp_path / "esm1v_source", ESM_1V),
    }
    folders = {name: exported(model, tmp_path / name) for name, model in models.items()}
    use_exported(*folders.values())
    for name, folder in folders.items():
        assert_read_again(folder, models[name])
        assert len(list(folder.glob("*.py"))) == (not name.startswith("esm"))
    folder = next(iter(folders.values()))
    model, base = protlm.load(folder / "merged"), protlm.load(folder)
    tokens_BL, mask_BL = (torch.load(folder / "inputs.pt")[key] for key in ("tokens", "mask"))
    merged_NV, base_NV = (
        one.network(tokens_BL, mask_BL, causal=False).logits_BLV[mask_BL] for one in (model, base)
    )
    assert (merged_NV - torch.load(folder / "merged.pt")).abs().max() < 1e-5
    assert (merged_NV - base_NV).abs().max() > 0.01
    adapted, merged = interop.read(folder / "adapter", folder), interop.read(folder / "merged")
    torch.testing.assert_close(adapted.weights, merged.weights, rtol=0, atol=1e-6)


OLDER = [path.stem for path in sorted(Path(__file__).parent.glob("transformers-*.txt"))]


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_older_versions_of_transformers_compute_the_same(version, tmp_path):
    libraries = ROOT / "build" / version
    assert (libraries / ".installed").exists(), f"type make build/{version}/.installed"
    frequencies = {"rotary.frequency": torch.tensor([1.0, 1 / 3, 1e-3, 0.7], dtype=torch.float64)}
    stored = model_with("softmax", stored_frequencies=True)
    models = {
        "hybrid": model_with("hybrid"),
        "causal": model_with("performer_relu", objective=Objective.causal),
        "stored": replace(stored, weights={**stored.weights, **frequencies}),
    }
    folders = {name: exported(model, tmp_path / name) for name, model in models.items()}
    use_exported(*folders.values(), libraries=libraries)
    for name, folder in folders.items():
        assert_read_again(folder, models[name])


@pytest.mark.slow
def test_a_config_names_the_oldest_version_of_transformers(tmp_path):
    hugging_face.export(model_with("linear"), tmp_path / "x", None)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["transformers_version"] == "4.48.0"
    assert config["protlm_version"] == protlm.__version__
    done = run_python("-c", TOO_OLD, cwd=tmp_path, HF_HOME=str(tmp_path))
    assert done.stdout.strip() == (
        "ImportError transformers 4.47.1 is too old for this model: type "
        "pip install 'transformers>=4.48'"
    )


def test_frequencies_are_read_from_the_weights_of_older_exports(tmp_path):
    model = model_with("softmax", stored_frequencies=True)
    folder = tmp_path / "x"
    hugging_face.export(model, folder, None)
    config = json.loads((folder / "config.json").read_text())
    frequency = torch.tensor(config.pop("frequencies"), dtype=torch.float64)
    assert torch.equal(frequency, model.weights["rotary.frequency"])
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"network.rotary.frequency": frequency}, folder / "model.safetensors")
    assert_same(interop.read(folder).weights, model.weights)


def test_maps_have_a_graph_where_the_page_says_so():
    tokens_BL = torch.randint(4, 24, (1, 9))
    found = set()
    for name in attention.names():
        described = model_with(name, num_layers=1).description
        network = build_network(described.model, described.attention_config, seed=0)
        ((_, x),) = network.attention_inputs(tokens_BL, tokens_BL > 0, causal=False)
        if network.mechanism(1).attention_map(x.q_BHLK, x.k_BHLK, x.context).requires_grad:
            found.add(name)
    page = (ROOT / "docs" / "interop.md").read_text()
    (says,) = re.findall(r"gradient can be taken of the maps(.*?)have windows", page, re.DOTALL)
    assert found == set(re.findall(r"`(\w+)`", says)) - {"output_attentions"}


TOO_OLD = """
import os, transformers
os.environ["HF_HUB_OFFLINE"] = "1"
transformers.__version__ = "4.47.1"
try:
    transformers.AutoModel.from_pretrained("x", trust_remote_code=True)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("frame", [TWO, Frame(prefix=()), Frame((), ())])
def test_the_tokenizer_has_the_frame(frame, tmp_path):
    from tokenizers import Tokenizer

    model = model_with("softmax", frame=frame)
    hugging_face.export(model, tmp_path / "x", None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "x" / "tokenizer.json"))
    words = vocabulary_of(frame)
    assert tokenizer.encode("MKV").ids == words.framed(VOCABULARY.encode("MKV")).tolist()
    # A letter is not a token of the frame, or a gap, by its name.
    inner = tokenizer.encode("1.-2M").ids[words.inner]
    assert inner == [*[VOCABULARY["<unk>"]] * 4, VOCABULARY["M"]]
    assert_same(interop.read(tmp_path / "x").weights, model.weights)
    assert interop.read(tmp_path / "x").description == model.description


def test_the_card_of_a_model_of_relatives_says_that_proteins_are_alone(tmp_path):
    for name, relatives in (("alone", None), ("seen", Relatives.ordered)):
        hugging_face.export(model_with("hybrid", relatives=relatives), tmp_path / name, None)
    assert not (tmp_path / "alone" / "README.md").exists()
    assert "a model of single proteins" in (tmp_path / "seen" / "README.md").read_text()


def test_an_encoder_is_exported_as_one(tmp_path):
    model = model_with("softmax", head=HeadKind.none)
    hugging_face.export(model, tmp_path / "x", None)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["architectures"] == ["ProtlmModel"]
    assert not {"AutoModelForMaskedLM", "AutoModelForCausalLM"} & set(config["auto_map"])
    assert interop.read(tmp_path / "x").description == model.description


def test_the_tokenizer_reads_what_protlm_reads(tmp_path):
    """Every printable letter, alone and in a sequence: the same tokens, or unknown."""
    from tokenizers import Tokenizer

    hugging_face.export(model_with("linear"), tmp_path / "x", None)
    config, settings = (
        json.loads((tmp_path / "x" / name).read_text())
        for name in ("config.json", "tokenizer_config.json")
    )
    assert config["vocab_size"] is None
    assert (settings["tokenizer_class"], settings["padding_side"]) == ("ProtlmTokenizer", "right")
    tokenizer = Tokenizer.from_file(str(tmp_path / "x" / "tokenizer.json"))
    assert [tokenizer.id_to_token(n) for n in range(33)] == list(VOCABULARY.tokens)
    forms = [form for c in string.printable for form in (c, f"MK{c}t", f"{c}MKt", f"MKt{c}{c}")]
    for text in [*forms, "M K\tT\n", "mkt*", "  ", "***", "\xdf", "a\xdfb"]:
        found = tokenizer.encode(text).ids
        sequence, refused = residues(text, Tally(), ReadOptions())
        if refused:
            assert VOCABULARY["<unk>"] in found, text
        else:
            assert found[1:-1] == VOCABULARY.encode(sequence).tolist(), text
        assert (found[0], found[-1]) == (VOCABULARY.cls, VOCABULARY.eos)
    assert tokenizer.encode("M<mask> <mask>-").ids == [0, 20, 32, 32, 3, 2]


@pytest.mark.parametrize(
    ("mechanism", "used"),
    [
        ("performer_relu", ["performer_relu"]),
        ("reformer", ["reformer"]),
        ("alternating", ["hybrid", "performer_relu", "window"]),
    ],
)
def test_the_code_of_a_mechanism_defines_it(mechanism, used):
    """Without transformers, the code can be compiled and not run."""
    text = hugging_face._code(model_with(mechanism, num_layers=3).description)
    compile(text, "modeling_protlm.py", "exec")
    defined = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert defined >= {attention.mechanism(name).__name__ for name in used}
    assert re.findall(r"^    '(\w+)': \w+,$", text, re.M) == used
    assert "from protlm" not in text and "import protlm" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": Activation.relu},
        {"norm": Norm.rms},
        {"tied_head": False},
        {"convolution": 3},
        {"positions": Positions.sinusoidal},
    ],
)
def test_other_architectures_are_exported_with_code(changes, tmp_path):
    described = esm(tmp_path / "source").description
    described = replace(described, model=replace(described.model, stored_frequencies=False))
    assert is_esm(described)
    assert not is_esm(replace(described, model=replace(described.model, **changes)))
    assert not is_esm(replace(described, attention="performer_relu"))
    assert not is_esm(replace(described, objective=Objective.causal))


PACKAGE = "package_under_test"


@pytest.fixture
def write_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes the modules of a package: `write_modules(name="source", ...)`."""
    monkeypatch.setattr("protlm.interop.bundle._PACKAGE", PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / PACKAGE).mkdir()

    def write(**sources: str) -> None:
        for name, source in {"__init__": "", **sources}.items():
            (tmp_path / PACKAGE / f"{name}.py").write_text(source)

    yield write
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def at(module: str, name: str) -> Name:
    return Name(f"{PACKAGE}.{module}" if module else PACKAGE, name)


FROM_FIRST = f"from {PACKAGE}.first import"
# The modules, what is bundled, what replaces what, an expression and its value, and what is absent.
BUNDLES: list[tuple[dict[str, str], str, dict[Name, Name], str, object, list[str]]] = [
    (
        {
            "first": "_X = 1\n\ndef f(x=_X):\n    return x + _X\n",
            "second": f"{FROM_FIRST} f as g\n\n_X = 20\n\nclass C:\n    size = _X\n"
            "    def f(self):\n        return g(), g(7), f'{_X}'\n",
        },
        *("C", {}, "C.size, C().f()", (20, (2, 8, "20")), []),
    ),
    (
        {
            "first": "import json\nimport math\n\ndef unused():\n    return json\n\nPI = math.pi\n",
            "second": f"from {PACKAGE} import f\n\nclass Base:\n    pass\n\nclass C(Base):\n"
            "    value = f()\n",
            "__init__": f"{FROM_FIRST} PI\n\ndef f():\n    return PI\n",
        },
        *("C", {}, "C.value", math.pi, ["unused", "json"]),
    ),
    (
        {
            "first": "def f():\n    return 1\n\ndef g():\n    return f()\n",
            "second": f"{FROM_FIRST} g\n\ndef other():\n    return 2\n\ndef h():\n    return g()\n",
        },
        *("h", {at("first", "f"): at("second", "other")}, "h()", 2, ["def f("]),
    ),
]


@pytest.mark.parametrize("modules, name, replaced, expression, value, absent", BUNDLES)
def test_a_bundle_computes_what_its_modules_do_and_has_nothing_that_is_not_used(
    modules, name, replaced, expression, value, absent, write_modules
):
    write_modules(**modules)
    bundle, values = Bundle([at("second", name)], replaced), {}
    source = bundle.source()
    assert source == bundle.source()
    exec(source, values)
    assert eval(expression, values) == value
    assert not [text for text in (PACKAGE, *absent) if text in source]


@pytest.mark.parametrize(
    "source, message",
    [
        ("def f():\n    import math\n    return math\n", "move the import up"),
        (f"from {PACKAGE} import first\ndef f():\n    return first._X\n", "names of .*first"),
        (
            f"from {PACKAGE}.first import _X as y\n_X = 2\ndef f(_X):\n    return y, g()\n"
            "def g():\n    return _X\n",
            "_X has two meanings",
        ),
    ],
)
def test_what_cannot_be_bundled_is_refused(source, message, write_modules):
    write_modules(first="_X = 1\n", second=source)
    with pytest.raises(AssertionError, match=message):
        Bundle([at("second", "f")], {}).source()
