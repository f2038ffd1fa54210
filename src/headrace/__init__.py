"""headrace: exported PyTorch programs on the one CUDA stream the caller chose, without libtorch."""

from .audit import audit
from .delegate import Delegate
from .device import (
    Buffer,
    Device,
    Event,
    LaneWarning,
    Partition,
    Stream,
    caller_stream,
    current_stream,
    device,
)
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
from .export import export
from .graph import Graph
from .ordering import Record, record
from .program import Method, Program, load

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "Buffer",
    "CaptureError",
    "Delegate",
    "DelegateError",
    "DelegateUnavailable",
    "Device",
    "DeviceError",
    "EngineError",
    "Event",
    "ExportError",
    "Graph",
    "HeadraceError",
    "InputError",
    "LaneWarning",
    "Method",
    "NotSupported",
    "OptionError",
    "OrderingError",
    "OutOfDeviceMemory",
    "Partition",
    "Program",
    "ProgramError",
    "Record",
    "Stream",
    "audit",
    "caller_stream",
    "current_stream",
    "device",
    "export",
    "load",
    "num_threads",
    "record",
    "set_num_threads",
]
