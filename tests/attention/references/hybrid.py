"""Hybrid heads: softmax of a band in the first heads, the linear mechanism in the others."""

from importlib import import_module

import torch
from torch import Tensor

from tests.attention.truth import Given, outputs, shipped_options, softmax


@outputs(
    {"window": 16},
    {"window": 150, "options": {"num_features": 20, "kernel_epsilon": 0.25, "redraw_every": 10}},
    further=[
        {"window": 16, "mechanism": name, "options": options}
        for name, options in {
            "performer_generalized": {"kernel": "elu", "kernel_epsilon": 0.0, "num_features": None},
            "performer_softmax": {"num_features": 20},
            "rfa": {"gate": True, "num_features": 20},
            "aft_simple": {},
            "linear": {},
        }.items()
    ],
    linear=lambda options: not options["mechanism"].startswith("aft"),
)
def hybrid(given: Given) -> Tensor:
    """The outputs of both kinds of heads."""
    local, name = given.options["local_heads"], given.options["mechanism"]
    reach = given.options["window"] if given.causal else given.options["window"] // 2
    near = given.distances().abs() <= reach
    weights = softmax(given.logits()[:, :local], given.visible() & near)
    others = given._replace(
        **{field: getattr(given, field)[:, local:] for field in ("q_BHLK", "k_BHLK", "v_BHLC")},
        options=shipped_options(name) | given.options["options"],
        tensors={key.removeprefix("linear."): x for key, x in given.tensors.items()},
    )
    reference = getattr(import_module(f"tests.attention.references.{name}"), name)
    return torch.cat([weights @ given.v_BHLC[:, :local], reference.of(others)], dim=1)
