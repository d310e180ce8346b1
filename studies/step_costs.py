"""Step costs: what a token costs in a training step of each twin, at several lengths.

    python -m studies.step_costs [--mechanisms NAME ...] [--lengths 512 4096 32768] [--quick]

The models of `twins` take turns on rows of random residues, of 4,096 tokens in all or one row:
forward, backward, clipping and AdamW, in bf16 autocast where the processor has bf16 products. Run
it on an idle machine. Costs are seconds per token; those of rows of 512, times 4,096, are the
`--step-seconds` of `twins` but for its optimizer.
"""

from collections.abc import Sequence

from benchmarks.attention_passes import timed
from benchmarks.gpu_rates import Form, Step
from benchmarks.harness import (
    CPU,
    QUICK,
    Comparison,
    Pace,
    median_table,
    options,
    report,
    speed_table,
    take_turns,
)
from protlm.system.errors import exit_with_message
from studies.twins import COMMON, MECHANISMS, SOFTMAX, TOKENS_PER_STEP

LENGTHS, QUICK_LENGTHS = (512, 4096, 32_768), (64,)
MODEL = tuple(setting for setting in COMMON if setting.startswith("model"))
THOROUGH = Pace(seconds=90.0, fewest=3, most=9)


def compare(mechanisms: Sequence[str], length: int, tokens: int, pace: Pace) -> Comparison:
    """Compares the steps of the mechanisms on rows of `length` tokens."""
    tokens = max(tokens, length)
    forms = {
        name: Form((*MODEL, *MECHANISMS[name]), tokens=tokens, length=length) for name in mechanisms
    }
    steps = {name: Step(form, CPU, is_compiled=False) for name, form in forms.items()}
    runs = {name: lambda step=step: timed(step, CPU) / tokens for name, step in steps.items()}
    return take_turns(f"L={length:,}", runs, pace)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes the JSON file.

    Raises:
        OutputError: the JSON file cannot be written.
    """
    parser = options("step_costs", "a training step by the length of rows")
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--lengths", nargs="+", type=int)
    given = parser.parse_args(arguments)
    pace, tokens = (QUICK, 128) if given.quick else (THOROUGH, TOKENS_PER_STEP)
    lengths = given.lengths or (QUICK_LENGTHS if given.quick else LENGTHS)
    held = [compare(given.mechanisms, length, tokens, pace) for length in lengths]
    report(
        given.json,
        {"training step": held},
        (SOFTMAX,),
        speed_table("A training step", held, SOFTMAX),
        median_table("Microseconds per token", held, scale=1e6),
    )


if __name__ == "__main__":
    exit_with_message(main)
