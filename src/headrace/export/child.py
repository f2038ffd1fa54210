"""A function in a forked child process, for what would change this one."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

from ..errors import ExportError

__all__ = ["in_child"]

T = TypeVar("T")


def in_child(what: str, function: Callable[[], T]) -> T:
    """What ``function()`` returns, which has to be picklable. It sees a copy of this process and may change
    whatever it likes there: nothing of that is left afterwards.

    Raises ExportError as ``function`` does, with its ``node``; also where it raises something else, or the child dies,
    naming ``what``. The child is ended when this call is left by an exception.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, in a process with threads. The child starts no thread that one of them could block:
        # it has a lock of its own for all that it calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _answer(writing, what, function)
    os.close(writing)
    waited = False
    try:
        with os.fdopen(reading, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(pid, 0)
        waited = True
    finally:
        if not waited:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if status != 0 or not raw:
        code = os.waitstatus_to_exitcode(status)
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        raise ExportError(
            f"{what}: expected an answer of the process that compiles, got {end}; what it printed, if anything, says "
            "more; report this with the model"
        )
    kind, *answer = pickle.loads(raw)
    if kind == "value":
        value: T = answer[0]
        return value
    message, node = answer
    raise ExportError(message, node=node)


def _answer(writing: int, what: str, function: Callable[[], object]) -> None:
    """In the child: write the answer and end, without the parent's exit handlers."""
    status = 1
    try:
        answer: tuple[object, ...]
        try:
            answer = ("value", function())
        except ExportError as error:
            answer = ("error", str(error), error.node)
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-3:])
            answer = (
                "error",
                f"{what}: expected to compile, got {type(error).__name__}: {error}\n{text}",
                None,
            )
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
