"""headrace: exported PyTorch programs on the one CUDA stream the caller chose, without libtorch."""

from .engine import core as _core
from .engine import num_threads, set_num_threads
from .errors import (
    AuditError,
    CaptureError,
    DelegateError,
    DelegateUnavailable,
    DeviceError,
    EngineError,
    ExportError,
    HeadraceError,
    InputError,
    NotSupported,
    OptionError,
    OrderingError,
    OutOfDeviceMemory,
    ProgramError,
)
from .program import Method, Program, load

Buffer = _core.Buffer

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "Buffer",
    "CaptureError",
    "DelegateError",
    "DelegateUnavailable",
    "DeviceError",
    "EngineError",
    "ExportError",
    "HeadraceError",
    "InputError",
    "Method",
    "NotSupported",
    "OptionError",
    "OrderingError",
    "OutOfDeviceMemory",
    "Program",
    "ProgramError",
    "load",
    "num_threads",
    "set_num_threads",
]
