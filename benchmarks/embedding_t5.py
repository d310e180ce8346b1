"""Mean embeddings per second of a T5 encoder, beside Hugging Face's `T5EncoderModel`.

    python -m benchmarks.embedding_t5 [--quick] [--proteins 200] [--json FILE]

Both read one folder of random weights, 4 layers of ProtT5's widths, and embed the proteins of the
sample in protlm's batches. `T5EncoderModel` has SDPA. Before the first round their vectors are
compared.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import protlm
from benchmarks.attention_contenders import installed
from benchmarks.embedding import by_length, our_means, runs, works
from benchmarks.harness import (
    QUICK,
    Pace,
    Run,
    median_table,
    options,
    report,
    speed_table,
    take_turns,
)

PROT_T5 = {"d_model": 1024, "d_kv": 128, "num_heads": 32, "d_ff": 16_384, "num_layers": 4}
TINY = {"d_model": 32, "d_kv": 16, "num_heads": 4, "d_ff": 64, "num_layers": 1}
PEER, OURS = "T5EncoderModel", "protlm"
# ProtT5's alphabet, in which U, Z, O and B are read as X.
TOKENS = ["<pad>", "</s>", "<unk>", *(f"▁{x}" for x in "ALGVSREDTIPKFQNYMHWCXBOUZ")]
NUMBERS = {token[-1]: number for number, token in enumerate(TOKENS)}
NUMBERS |= dict.fromkeys("BOUZ", NUMBERS["X"])
# Of float32, relative to the largest number of a vector.
_TOLERANCE = 1e-4


def write_model(sizes: dict[str, int], folder: Path) -> None:
    """Writes a T5 encoder with random weights as Hugging Face does, and its alphabet."""
    package = installed("transformers", "bench-embedding")
    torch.manual_seed(0)
    config = package.T5Config(vocab_size=len(TOKENS), **sizes)
    package.T5EncoderModel(config).save_pretrained(folder)
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))


@torch.inference_mode()
def peer_means(model: nn.Module, sequences: Sequence[str]) -> list[Tensor]:
    """Returns the mean over the residues of each sequence, as users of ProtT5 compute it."""
    found = []
    for some in by_length(sequences):
        rows = [torch.tensor([*map(NUMBERS.__getitem__, one), 1]) for one in some]
        tokens_BL = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask_BL = (tokens_BL > 0).long()
        hidden_BLD = model(input_ids=tokens_BL, attention_mask=mask_BL).last_hidden_state
        found += [hidden_BLD[row, : len(one)].mean(0) for row, one in enumerate(some)]
    return found


def contenders(folder: Path, sequences: Sequence[str]) -> dict[str, Run]:
    """Returns the runs of both on these sequences, after their vectors are compared."""
    package = installed("transformers", "bench-embedding")
    peer = package.T5EncoderModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    model = protlm.load(folder)
    embed = {PEER: partial(peer_means, peer), OURS: partial(our_means, model)}
    expected, found = (torch.stack(one(sequences[:4])) for one in embed.values())
    assert (found - expected).abs().max() <= _TOLERANCE * expected.abs().max()
    return runs(embed, sequences)


def main() -> None:
    """Measures, prints the tables, and writes the figures."""
    parser = options("benchmark_embedding_t5", "mean embeddings of a T5 encoder")
    parser.add_argument("--proteins", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    pace = QUICK if given.quick else Pace(seconds=given.seconds, fewest=3, most=15)
    with tempfile.TemporaryDirectory() as folder:
        write_model(TINY if given.quick else PROT_T5, Path(folder))
        held = [
            take_turns(work, contenders(Path(folder), sequences), pace)
            for work, sequences in works(given.proteins, []).items()
        ]
    times = median_table("microseconds per residue", held, scale=1e6)
    speeds = speed_table("embeddings", held, PEER)
    report(given.json, {"embeddings": held}, (PEER,), speeds, times)


if __name__ == "__main__":
    main()
