"""Mean embeddings per second, beside Hugging Face's `EsmModel` of the same size.

    python -m benchmarks.embedding [--quick] [--proteins 200] [--lengths 8192] [--json FILE]

All models have the size of ESM-2 8M and random weights. `EsmModel` embeds the proteins of the
sample twice: in batches of 8 in the order of the file, and in protlm's batches.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.attention_contenders import installed
from benchmarks.harness import (
    QUICK,
    Comparison,
    Pace,
    Run,
    median_table,
    options,
    report,
    speed_table,
    take_turns,
)
from benchmarks.language_models import Sizes
from protlm.checkpoints.description import ModelDescription
from protlm.config import Activation, ModelConfig, Objective, Positions
from protlm.data.dataset import collate
from protlm.data.records import Tally, read_records
from protlm.data.vocabulary import STANDARD, VOCABULARY
from protlm.loading import network_of
from protlm.model.embedding import Embedder, batches
from protlm.model.pretrained import PretrainedModel
from protlm.options.embed import Pooling
from protlm.system.paths import sample_dir

ESM_2_8M = Sizes(num_layers=6, model_dim=320, num_heads=20, feedforward_dim=1280)
TINY = Sizes(num_layers=1, model_dim=32, num_heads=2, feedforward_dim=64)
IN_ORDER, SORTED = "EsmModel, 8 in the file's order", "EsmModel, protlm's batches"
Means = Callable[[Sequence[str]], list[Tensor]]
OURS = ("softmax", "performer_relu", "performer_softmax")
_TOKENS_PER_BATCH = 4_096


def esm(sizes: Sizes) -> nn.Module:
    """Returns `EsmModel` with rotary positions and SDPA, without the heads of other tasks."""
    package = installed("transformers", "bench-embedding")
    config = package.EsmConfig(
        vocab_size=len(VOCABULARY),
        pad_token_id=VOCABULARY.pad,
        mask_token_id=VOCABULARY.mask,
        hidden_size=sizes.model_dim,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.feedforward_dim,
        max_position_embeddings=sizes.max_length,
        position_embedding_type="rotary",
        attn_implementation="sdpa",
    )
    return package.EsmModel(config, add_pooling_layer=False).eval()


def ours(attention: str, sizes: Sizes) -> PretrainedModel:
    """Returns a protlm model of the same size."""
    config = ModelConfig(
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        model_dim=sizes.model_dim,
        feedforward_dim=sizes.feedforward_dim,
        max_length=sizes.max_length,
        positions=Positions.rotary,
        activation=Activation.gelu,
    )
    described = ModelDescription(
        VOCABULARY.hash, Objective.masked, config, attention, {}, 0, sizes.max_length
    )
    rebuild = partial(network_of, described)
    return PretrainedModel(rebuild(0), described, rebuild=rebuild)


def in_order(sequences: Sequence[str]) -> Iterator[list[str]]:
    """Yields eight sequences at a time."""
    for start in range(0, len(sequences), 8):
        yield list(sequences[start : start + 8])


def by_length(
    sequences: Sequence[str], tokens_per_batch: int = _TOKENS_PER_BATCH
) -> Iterator[list[str]]:
    """Yields the batches of `protlm embed`."""
    for some in batches([len(one) for one in sequences], tokens_per_batch):
        yield [sequences[index] for index in some]


@torch.inference_mode()
def esm_means(
    model: nn.Module,
    batched: Callable[[Sequence[str]], Iterator[list[str]]],
    sequences: Sequence[str],
) -> list[Tensor]:
    """Returns the mean over the residues of each sequence, as users of `EsmModel` compute it."""
    found, device = [], next(model.parameters()).device
    for some in batched(sequences):
        both = collate([VOCABULARY.encode(one) for one in some])
        tokens_BL, mask_BL = (x.to(device) for x in both)
        hidden_BLD = model(input_ids=tokens_BL, attention_mask=mask_BL.long()).last_hidden_state
        found += [hidden_BLD[row, 1 : len(one) + 1].mean(0) for row, one in enumerate(some)]
    return found


def our_means(model: PretrainedModel, sequences: Sequence[str]) -> list[Tensor]:
    """Returns the mean over the residues of each sequence, as `protlm embed` computes it."""
    embedder, last = Embedder(model, (Pooling.mean,), (model.num_layers,)), model.num_layers
    found = [one for some in by_length(sequences) for one in embedder.vectors(some)]
    return [one[Pooling.mean, last] for one in found if one is not None]


def contenders(sizes: Sizes, sequences: Sequence[str]) -> dict[str, Run]:
    """Returns the runs of all models on these sequences."""
    peer = esm(sizes)
    models = {attention: partial(our_means, ours(attention, sizes)) for attention in OURS}
    peers = {
        IN_ORDER: partial(esm_means, peer, in_order),
        SORTED: partial(esm_means, peer, by_length),
    }
    return runs({**peers, **models}, sequences)


def runs(embed: Mapping[str, Means], sequences: Sequence[str]) -> dict[str, Run]:
    """Returns functions that embed all sequences once and return the seconds per residue."""
    residues = sum(map(len, sequences))

    def timed(name: str) -> float:
        start = time.perf_counter()
        assert len(embed[name](sequences)) == len(sequences)
        return (time.perf_counter() - start) / residues

    return {name: partial(timed, name) for name in embed}


def works(number: int, lengths: Sequence[int]) -> dict[str, list[str]]:
    """Returns the proteins of the sample, and a random protein of each length."""
    name = "uniprot_tiny" if number < 100 else "uniprot_sample"
    records = islice(read_records(sample_dir() / f"{name}.fasta.gz", Tally()), number)
    found = {f"{number} proteins": [record.sequence for record in records]}
    rng = np.random.default_rng(0)
    drawn = {f"L = {one:,}": ["".join(rng.choice(list(STANDARD), one))] for one in lengths}
    return found | drawn


def main() -> None:
    """Measures, prints the tables, and writes the figures."""
    parser = options("benchmark_embedding", "mean embeddings beside EsmModel")
    parser.add_argument("--proteins", type=int, default=200)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8_192])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each comparison")
    given = parser.parse_args()
    pace = QUICK if given.quick else Pace(seconds=given.seconds, fewest=3, most=15)
    sizes = TINY if given.quick else ESM_2_8M
    held: list[Comparison] = [
        take_turns(work, contenders(sizes, sequences), pace)
        for work, sequences in works(given.proteins, given.lengths).items()
    ]
    tables = [speed_table("embeddings", held, peer) for peer in (SORTED, IN_ORDER)]
    times = median_table("microseconds per residue", held, scale=1e6)
    report(given.json, {"embeddings": held}, (SORTED, IN_ORDER), *tables, times)


if __name__ == "__main__":
    main()
