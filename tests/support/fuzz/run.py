"""Runs many random cases, and shrinks the first that fails."""

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings


def fuzz(strategy, examine, cases, *, new=False, blob=None, shrink=True):
    """Draws so many cases and examines each; the same ones every time unless `new`. Returns how
    many ran.

    The first that fails is shrunk, and its error has a note with the case and the blob that draws
    it again.
    """
    ran = []

    def one(case):
        ran.append(case)
        examine(case)

    phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])]
    options = {} if new else {"database": None}
    test = settings(
        max_examples=cases, deadline=None, derandomize=not new, phases=phases, print_blob=True,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck), **options,
    )(given(strategy)(one))  # fmt: skip
    if blob:
        test = hypothesis.reproduce_failure(hypothesis.__version__, blob.encode())(test)
    test()
    return len(ran)
