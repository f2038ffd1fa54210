"""Some hundred damaged programs and data files; ``make fuzz`` runs thousands."""

from __future__ import annotations

from tests.fuzz.child import CRASH, HANG
from tests.fuzz.mutate import KINDS, case, indices
from tests.fuzz.run import fuzz, run_batch


def test_damaged_programs_end_in_an_error_or_a_run() -> None:
    """OP3: every failure is a typed exception; nothing crashes, nothing hangs."""
    result = fuzz(1, indices(30 * len(KINDS)))
    assert not result.failures, "\n".join(result.failures)
    assert set(result.kinds) == set(KINDS)
    assert min(result.kinds.values()) >= 30
    # Some pass every check and run, and each of the usual errors comes up: the cases are not all alike.
    assert {"ran", "ProgramError", "DelegateError"} <= set(result.outcomes)


def test_damaged_data_files_end_in_an_error_or_a_run() -> None:
    result = fuzz(2, indices(200, "data_file"))
    assert not result.failures, "\n".join(result.failures)
    assert {"ran", "ProgramError"} <= set(result.outcomes)


def test_same_seed_gives_the_same_bytes() -> None:
    for index in indices(2 * len(KINDS)):
        assert case(7, index) == case(7, index)
    assert case(7, 0) != case(8, 0)


def test_the_runner_sees_a_crash_and_a_hang() -> None:
    """What follows a case that ended its process is still run."""
    ended = dict(run_batch(1, [0, CRASH, 1, HANG, 2], timeout_s=10))
    assert set(ended) == {0, CRASH, 1, HANG, 2}
    assert ended[CRASH].startswith("CRASH with status -6")
    assert ended[HANG].startswith("HANG after 10")
