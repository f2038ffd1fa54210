"""Running checks, and telling which one failed and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ..errors import HeadraceError

__all__ = ["Array", "ConformanceError", "Failed", "expect", "expect_equal", "expect_raises", "run_checks"]

Array = np.ndarray[Any, Any]


class ConformanceError(HeadraceError, AssertionError):
    """A device or delegate does not keep its contract. ``check`` is the name of the check that failed."""

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check


class Failed(Exception):
    """What a check expected and what it got."""


def expect(truth: object, expected: str, got: object) -> None:
    if not truth:
        raise Failed(f"expected {expected}, got {got}")


def expect_raises(kinds: type[Exception] | tuple[type[Exception], ...], function: Callable[[], Any]) -> None:
    names = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        got = function()
    except kinds:
        return
    except Exception as e:
        raise Failed(f"expected {names}, got {type(e).__name__}: {e}") from e
    raise Failed(f"expected {names}, got {got!r} and no error")


def expect_equal(got: Array, want: Array, what: str) -> None:
    same = got.shape == want.shape and got.dtype == want.dtype
    expect(same, f"{what} of {want.dtype}{list(want.shape)}", f"{got.dtype}{list(got.shape)}")
    kind = want.dtype.kind in "fc"
    expect(np.array_equal(got, want, equal_nan=kind), f"{what} {want.ravel()[:4]}…", f"{got.ravel()[:4]}…")


def run_checks(subject: str, checks: Sequence[tuple[str, Callable[[], Any]]]) -> tuple[str, ...]:
    def fail(name: str, what: str, cause: Exception) -> NoReturn:
        raise ConformanceError(f"{subject}, {name.replace('_', ' ')}: {what}", check=name) from cause

    ran = []
    for name, check in checks:
        try:
            check()
        except Failed as e:
            fail(name, str(e), e)
        except Exception as e:
            fail(name, f"expected no error, got {type(e).__name__}: {e}", e)
        ran.append(name)
    return tuple(ran)
