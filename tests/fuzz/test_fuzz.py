"""Some hundred damaged programs and data files; ``make fuzz`` runs thousands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.child import CRASH, HANG
from tests.fuzz.mutate import KINDS, case, indices
from tests.fuzz.run import fuzz, run_batch

ROOT = Path(__file__).parents[2]


def test_damaged_programs_end_in_an_error_or_a_run() -> None:
    """OP3, OP4: every failure is a typed exception that says what to do; nothing crashes, nothing hangs."""
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


@pytest.mark.parametrize("name", ["split_cuda", "cnn_xnnpack", "branch", "external_weights"])
def test_every_field_of_every_table_may_be_missing(name: str) -> None:
    """OP3, OP5: one after the other, in a guarded child; the one that ends it is named."""
    code = """
import sys
from tests.contract import delegates
from tests.fuzz import child, mutate
delegates.install(delegates.OneCall)
(seed,) = [s for s in mutate.seeds() if s.name == sys.argv[1]]
slots = [s for s in seed.slots if s.role == "vtable"]
for slot in slots:
    data = bytearray(seed.program)
    slot.write(data, 0)
    print(slot.path, flush=True)
    print("  ", child.run(mutate.Case(slot.path, bytes(data), seed.data)), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, name], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    assert len(lines) > 50 and "   ProgramError" in lines
