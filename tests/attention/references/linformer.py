"""Linformer: softmax(q (E k)ᵀ / √K) F v, where padding is 0 (arXiv 2006.04768, section 4)."""

from torch import Tensor

from tests.attention.truth import Given, outputs


@outputs(
    {"projected_length": 16, "sharing": "none"},
    {"projected_length": 70, "sharing": "layers"},
    further=[
        {"projected_length": 5, "sharing": "heads"},
        {"projected_length": 16, "sharing": "key_value"},
    ],
    # The columns of F have any sum.
    sums_to_one=lambda _: False,
)
def linformer(given: Given) -> Tensor:
    e_HPL = given.tensors["key_projection"][..., : given.length]
    f_HPL = given.tensors.get("value_projection", given.tensors["key_projection"])
    weights = (given.q_BHLK @ (e_HPL @ given.k_BHLK).mT / given.head_dim**0.5).softmax(-1)
    return weights @ (f_HPL[..., : given.length] @ given.v_BHLC)
