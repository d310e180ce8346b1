"""The cases of every mechanism, for the tests that ask for them."""

from collections.abc import Callable

import pytest

import protlm.attention
from protlm.attention.base import Recurrent
from protlm.attention.linearized.base import Performer
from tests.attention.cases import Case, all_cases, case_id


def _is(case: Case, kind: type) -> bool:
    return issubclass(protlm.attention.mechanism(case.name), kind)


KINDS: dict[str, Callable[[Case], bool]] = {
    "case": lambda case: True,
    "causal_case": lambda case: True in case.modes,
    "recurrent_case": lambda case: _is(case, Recurrent),
    "performer": lambda case: _is(case, Performer),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a test each case of the kind it asks for, in each mode if it asks `causal`.

    A kind, such as `case`, has the cases of the whole contract; `further_case` has the others, and
    `any_case` has both.
    """
    for argument in metafunc.fixturenames:
        kind = argument.removeprefix("further_").removeprefix("any_")
        if kind not in KINDS:
            continue
        whole, further = all_cases()
        asked = whole * (not argument.startswith("further_")) + further * (kind != argument)
        cases = [case for case in asked if KINDS[kind](case)]
        if "causal" not in metafunc.fixturenames:
            metafunc.parametrize(argument, cases, ids=case_id)
            continue
        pairs = [(case, causal) for case in cases for causal in case.modes]
        ids = [f"{case_id(c)}-{'causal' if causal else 'bidirectional'}" for c, causal in pairs]
        metafunc.parametrize((argument, "causal"), pairs, ids=ids)
