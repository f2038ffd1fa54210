"""Every exception that headrace raises.

::

    HeadraceError
    ├─ EngineError(ImportError)     ExecuTorch: another version, a second copy, a missing library
    ├─ ProgramError                 the file: not a program, truncated, unknown version, missing data file
    ├─ InputError(ValueError)       the caller's array: dtype, rank, size, stride, device, bound
    ├─ OptionError(ValueError)      unknown option, wrong type
    │  └─ NotSupported              a known option with a value that would not be honoured
    ├─ DelegateError                a delegate failed             .delegate .method .island .log
    │  └─ DelegateUnavailable       a delegate, kernel, library, shim, architecture or version is absent
    ├─ DeviceError                  a device operation failed     .device
    │  └─ OutOfDeviceMemory(MemoryError)
    ├─ CaptureError                 .step
    ├─ OrderingError                .conflicts
    ├─ ExportError                  .node
    └─ AuditError

The classes say who must act: whoever built the file, whoever passed the array, whoever installed the
machine. A message says where, what was expected, what came and what to do. Every exception carries
``log``: the engine's own log lines that belong to the failure, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AuditError",
    "CaptureError",
    "DelegateError",
    "DelegateUnavailable",
    "DeviceError",
    "EngineError",
    "ExportError",
    "HeadraceError",
    "InputError",
    "NotSupported",
    "OptionError",
    "OrderingError",
    "OutOfDeviceMemory",
    "ProgramError",
]


class HeadraceError(Exception):
    """The root. ``log`` holds the engine's log lines of this failure, oldest first; often empty."""

    def __init__(self, message: str, *, log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log: tuple[str, ...] = tuple(log)

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else ""
        if not self.log:
            return message
        return message + "".join(f"\n  engine: {line}" for line in self.log)


class EngineError(HeadraceError, ImportError):
    """ExecuTorch's libraries cannot be used: another version or build, a second copy, a missing file."""


class ProgramError(HeadraceError):
    """The program or data file is at fault: not a program, truncated, malformed, of an unknown version,
    or without the data files that it needs."""


class InputError(HeadraceError, ValueError):
    """The caller's argument is at fault: dtype, rank, size, stride, device, bound or count."""


class OptionError(HeadraceError, ValueError):
    """An option is unknown, of the wrong type, or out of range."""


class NotSupported(OptionError):
    """A known option has a value that cannot be honoured."""


class DelegateError(HeadraceError):
    """A delegate or kernel failed while it ran.

    ``delegate`` is its name, ``method`` the method it belongs to, ``island`` the index of the delegate
    call in the method's instruction list; each may be None where it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        delegate: str | None = None,
        method: str | None = None,
        island: int | None = None,
        log: Sequence[str] = (),
    ) -> None:
        super().__init__(message, log=log)
        self.delegate = delegate
        self.method = method
        self.island = island


class DelegateUnavailable(DelegateError):
    """A program needs a delegate, kernel, library, shim, architecture or version that is absent."""


class DeviceError(HeadraceError):
    """A device operation failed, or an object belongs to another device. ``device`` is its name."""

    def __init__(self, message: str, *, device: str | None = None, log: Sequence[str] = ()) -> None:
        super().__init__(message, log=log)
        self.device = device


class OutOfDeviceMemory(DeviceError, MemoryError):
    """A device has not enough memory left."""


class CaptureError(HeadraceError):
    """A method could not be captured into a graph, or a graph could not be replayed; ``step`` names
    where."""

    def __init__(self, message: str, *, step: str | None = None, log: Sequence[str] = ()) -> None:
        super().__init__(message, log=log)
        self.step = step


class OrderingError(HeadraceError):
    """Two accesses to one buffer are ordered by nothing; ``conflicts`` lists every such pair."""

    def __init__(self, message: str, *, conflicts: Sequence[Any] = (), log: Sequence[str] = ()) -> None:
        super().__init__(message, log=log)
        self.conflicts: tuple[Any, ...] = tuple(conflicts)


class ExportError(HeadraceError):
    """A model cannot be exported as asked; ``node`` names the graph node at fault."""

    def __init__(self, message: str, *, node: str | None = None, log: Sequence[str] = ()) -> None:
        super().__init__(message, log=log)
        self.node = node


class AuditError(HeadraceError):
    """What was to be audited cannot be read, or nothing in it could be inspected."""
