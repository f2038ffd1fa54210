"""The conformance kit, for whoever makes a device or a delegate. It needs no test framework.

    from headrace.testing import check_delegate, check_device

    check_device(headrace.device("sim"))
    check_delegate(Scale, payload=b"2.0", inputs=[x], outputs=[x * 2])

Each function runs its checks one after the other, returns the names of those that ran, and raises
`ConformanceError` at the first that fails. A check that does not apply to a device is left out of what it returns.
"""

from .check import ConformanceError
from .delegate import check_delegate
from .device import check_device

__all__ = ["ConformanceError", "check_delegate", "check_device"]
