"""The cases of every mechanism, for the tests that ask for them."""

from collections.abc import Callable

import pytest

import protlm.attention
from protlm.attention.base import Recurrent
from protlm.attention.linearized.base import Performer
from protlm.attention.relatives import SeesRelatives
from tests.attention.cases import Case, all_cases, case_id


def _is(case: Case, kind: type) -> bool:
    return issubclass(protlm.attention.mechanism(case.name), kind)


KINDS: dict[str, Callable[[Case], bool]] = {
    "case": lambda case: True,
    "causal_case": lambda case: True in case.modes,
    "recurrent_case": lambda case: _is(case, Recurrent),
    "performer": lambda case: _is(case, Performer),
    # Of one kind of heads, which all see the family.
    "across_case": lambda case: (
        case.name not in ("hybrid", "window")
        and _is(case, SeesRelatives)
        and not case.create().relatives_refusal(later=False, apart=False, runs=False)
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a test each case of the kind it asks for, in each mode if it asks `causal`.

    A kind, such as `case`, has the cases of the whole contract; `any_case` has the others, too,
    which are slow.
    """
    has_modes = "causal" in metafunc.fixturenames
    for argument in metafunc.fixturenames:
        kind = argument.removeprefix("any_")
        if kind not in KINDS:
            continue
        whole, further = all_cases()
        rows = []
        for case in filter(KINDS[kind], whole + further * (kind != argument)):
            marks = [pytest.mark.slow] * (case in further)
            for mode in [(causal,) for causal in case.modes] if has_modes else [()]:
                names = [case_id(case), *("causal" if x else "bidirectional" for x in mode)]
                rows.append(pytest.param(case, *mode, id="-".join(names), marks=marks))
        metafunc.parametrize([argument, "causal"][: 1 + has_modes], rows)
