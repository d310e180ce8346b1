"""Rates of `benchmarks/gpu.py speed`: training steps, attention and embedding, beside their peers.

    python -m benchmarks.gpu_rates training FORM | attention | embedding [--device cuda] [...]

Each prints lines of JSON. A step is timed twice: `sync` waits for the device after each one, and
`free` only after the last one. `card` is the sum of the times of the kernels. With `--warm`, a form
of training only makes one step, so that its graphs are in the cache of the compiler.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from pytorch_lightning.utilities import move_data_to_device
from torch.profiler import ProfilerActivity, profile

from benchmarks import attention_contenders as peers
from benchmarks.attention_passes import Case, Pass, standard_normal_inputs, timed
from benchmarks.embedding import by_length, esm, esm_means
from benchmarks.gpu_step import precision, random_batch, report
from benchmarks.harness import UnavailableError
from benchmarks.language_models import Esm, Sizes, mean_loss, training_step
from benchmarks.training_batches import Proteins, batches
from protlm.checkpoints.format import default_model
from protlm.config import TrainConfig
from protlm.config.composition import compose
from protlm.data.batching.strategies import WholeProteins
from protlm.data.dataset import Batch
from protlm.data.records import Tally, read_records
from protlm.loading import load_model
from protlm.model.embedding import Embedder, embed_all
from protlm.model.pretrained import TokenBatch
from protlm.model.transformer import ProteinLM, build_network, num_parameters
from protlm.options.embed import Pooling
from protlm.system.paths import sample_dir
from protlm.training.callbacks.hooks import compile_model

SAMPLE = sample_dir() / "uniprot_sample.fasta.gz"
LENGTHS, QUICK_LENGTHS = (512, 2048, 8192, 32_768), (64,)
TOKENS_OF_A_BATCH, PROTEINS = 65_536, 5_000


@dataclass(frozen=True)
class Form:
    """A model in training, and the rows of its steps.

    Attributes:
        settings: those of protlm's model.
        sizes: those of `EsmForMaskedLM` in its place.
        tokens: the tokens of a step.
        length: the tokens of a row.
        is_packed: whether the rows are filled with whole proteins.
    """

    settings: tuple[str, ...] = ()
    sizes: Sizes | None = None
    tokens: int = 65_536
    length: int = 512
    is_packed: bool = False


HYBRID = ("model=medium_8", "attention=hybrid")
_142M = ("model=paper_36", "model.num_layers=29", "model.num_heads=10", "model.model_dim=640")
# The sizes of hybrid-6m, and those of 142 M parameters.
_SMALL = Sizes(num_layers=8, model_dim=256, num_heads=4, feedforward_dim=912)
_LARGE = Sizes(num_layers=29, model_dim=640, num_heads=10, feedforward_dim=2560)
FORMS = {
    "hybrid-6m": Form(HYBRID),
    "hybrid-6m packed": Form(HYBRID, length=16_384, is_packed=True),
    "EsmForMaskedLM 6M": Form(sizes=_SMALL),
    "142M": Form(
        (*_142M, "model.feedforward_dim=2560", "attention=hybrid"), tokens=32_768, length=1024
    ),
    "EsmForMaskedLM 142M": Form(sizes=_LARGE, tokens=32_768, length=1024),
}
QUICK = Form(("model=tiny", "attention=hybrid"), tokens=1024, length=256)


class Step:
    """A training step of a form: forward, backward, clipping and AdamW, in mixed precision."""

    def __init__(self, form: Form, device: torch.device, *, is_compiled: bool) -> None:
        self.batch, self._device = _batch(form, device), device
        self.model: ProteinLM | Esm = Esm(form.sizes) if form.sizes else _network(form)
        self.model.to(device).train()
        if is_compiled and isinstance(self.model, ProteinLM):
            compile_model(self.model)
        elif is_compiled:
            self.model.compile(dynamic=False)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._form = form

    def __call__(self) -> None:
        """Makes one step."""
        training_step(
            self._loss,
            self.model,
            self._optimizer,
            device=self._device,
            is_mixed=precision(self._device) == torch.bfloat16,
            clip=1.0,
        )

    def _loss(self) -> torch.Tensor:
        if isinstance(self.model, Esm):
            return self.model(self.batch, is_whole=True)
        return mean_loss(self.model, self.batch, is_whole=not self._form.is_packed)


def _network(form: Form) -> ProteinLM:
    limit = f"model.max_length={form.length}"
    config = compose(TrainConfig, [*form.settings, limit])
    return build_network(config.model, config.attention, seed=0)


def _batch(form: Form, device: torch.device) -> Batch:
    """Returns rows of random residues, or the first full rows of packed proteins."""
    if form.is_packed:
        rule = WholeProteins(form.tokens, min(form.length, 512), row=form.length)
        batch = next(batches(Proteins(SAMPLE), rule))
    else:
        batch = random_batch(form.tokens // form.length, form.length)
    return move_data_to_device(batch, device)


def training(name: str, device: torch.device, *, quick: bool, warm: bool) -> None:
    """Reports the rates of a form, in tokens that are not padding."""
    form = replace(QUICK, is_packed=FORMS[name].is_packed) if quick else FORMS[name]
    step = Step(form, device, is_compiled=not quick)
    step()
    if warm:
        return
    step()
    number, useful = (2 if quick else 20), int(step.batch.mask_BL.sum())
    sync = [timed(step, device) for _ in range(number)]
    free = timed(lambda: [step() for _ in range(number)], device)
    card, launches = on_card(step, device)
    facts = {"form": name, "parameters": num_parameters(step.model), "tokens_of_a_step": useful}
    rates = {"sync": useful * number / sum(sync), "free": useful * number / free}
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    report({**facts, **rates, "card_ms": card * 1e3, "launches": launches, "memory_gb": memory})


def on_card(work: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Returns the seconds of the kernels of `work` and their number; of operators, on a CPU."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        timed(work, device)
    events = [one for one in profiler.events() or () if one.device_type.name == kind.name]
    on_cuda = device.type == "cuda"
    times = (one.self_device_time_total if on_cuda else one.self_cpu_time_total for one in events)
    return sum(times) / 1e6, len(events)


def attention(device: torch.device, *, quick: bool) -> None:
    """Reports the time of a pass of attention, forward and backward, at each length."""
    contenders: dict[str, Callable[[Case], Any]] = {
        "SDPA": peers.sdpa,
        "performer_relu": partial(peers.ours, "performer_relu"),
        "performer_softmax": partial(peers.ours, "performer_softmax", features=256),
    }
    dtype = "bf16" if precision(device) == torch.bfloat16 else "fp32"
    for length in QUICK_LENGTHS if quick else LENGTHS:
        for causal in (False, True):
            case = Case(causal, length, dtype, device)
            for name, make in contenders.items():
                one = Pass(make(case), standard_normal_inputs(case))
                for _ in range(3):
                    one.seconds()
                wall = min(one.seconds() for _ in range(5))
                card, _ = on_card(one.seconds, device)
                facts = {"contender": name, "mode": case.mode, "length": length}
                report({**facts, "wall_ms": wall * 1e3, "card_ms": card * 1e3})


def embedding(device: torch.device, *, quick: bool) -> None:
    """Reports the residues a second of mean vectors: the default model, its forward pass, ESM."""
    records = islice(read_records(SAMPLE, Tally()), 9 if quick else PROTEINS)
    # As many residues as ESM-2 takes.
    texts = [record.sequence[:1022] for record in records]
    model = load_model(default_model(), device=str(device))
    embedder = Embedder(model, (Pooling.mean,), (model.num_layers,), precision(device))
    rows = [model.batch_of(some) for some in by_length(texts, TOKENS_OF_A_BATCH)]
    runs: dict[str, Callable[[], object]] = {
        "protlm": lambda: list(embed_all(embedder, texts, TOKENS_OF_A_BATCH)),
        "its forward pass": lambda: _forward_alone(embedder, rows),
    }
    try:
        peer = esm(_SMALL).to(device)
        batched = partial(by_length, tokens_per_batch=TOKENS_OF_A_BATCH)
        runs["EsmModel"] = lambda: esm_means(peer, batched, texts)
    except UnavailableError as error:
        report({"contender": "EsmModel", "failure": str(error)})
    residues, mixed = sum(map(len, texts)), precision(device) == torch.bfloat16
    for contender, run in runs.items():
        cast = torch.autocast(device.type, torch.bfloat16, enabled=mixed)
        with cast if contender == "EsmModel" else nullcontext():
            run()
            seconds = min(timed(run, device) for _ in range(2))
        found = {"contender": contender, "proteins": len(texts)}
        report({**found, "residues_per_second": residues / seconds})


@torch.inference_mode()
def _forward_alone(embedder: Embedder, rows: Sequence[TokenBatch]) -> None:
    """Runs the passes of `embed_all` on batches that are on the device."""
    dtype = embedder.compute_dtype
    with torch.autocast(rows[0].tokens_BL.device.type, dtype, enabled=dtype != torch.float32):
        for batch in rows:
            embedder.model.hidden_states(batch, embedder.layers)


def main() -> None:
    """Measures one kind of rates."""
    parser = argparse.ArgumentParser(description="A part of benchmarks/gpu.sh.")
    parser.add_argument("step", choices=("training", "attention", "embedding"))
    parser.add_argument("form", nargs="?", default="hybrid-6m", choices=FORMS)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--warm", action="store_true", help="only compile")
    given = parser.parse_args()
    if given.step == "training":
        training(given.form, given.device, quick=given.quick, warm=given.warm)
    else:
        measure = attention if given.step == "attention" else embedding
        measure(given.device, quick=given.quick)


if __name__ == "__main__":
    main()
