"""Delegates: who computes one island of a program.

A delegate in Python is a class with a name. Programs that call the name find it:

    class Scale(headrace.Delegate, name="Scale"):
        def load(self, payload, context):
            self.factor = float(payload)

        def run(self, inputs, outputs, stream):
            (x,), (y,) = inputs, outputs
            stream.call(lambda: np.multiply(x.numpy(), self.factor, out=y.numpy()), reads=[x], writes=[y])

`load` runs once for each island and instance of the program, `run` at each call. `run` enqueues work on
`stream`, the stream of the call, and returns: it does not wait, and it touches no memory itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..device import Buffer, Device, Stream
from ..engine import core
from ..errors import OptionError

__all__ = ["Context", "Delegate"]


@dataclass(frozen=True)
class Context:
    """What a delegate is told when it loads.

    ``method`` and ``island`` (the index in the method's instructions) say whose it is; the first ``num_inputs``
    of its arguments are inputs. ``specs`` are the compile specs that the exporter wrote, ``options`` those of
    `headrace.load`. ``device`` is where the program's device memory lies. ``named_data(key)`` gives bytes from
    the program or its data files while `load` runs; it raises KeyError.
    """

    method: str
    island: int
    num_inputs: int
    specs: Mapping[str, bytes]
    options: Mapping[str, bool | int | str]
    device: Device
    named_data: Callable[[str], bytes]


def provide(name: str | None) -> bool:
    """Make a delegate of ours known that is in Python and was not needed so far; whether there is such a one.

    It is defined when a program asks, so that a process which has another under its name keeps that, and pays for
    nothing."""
    if name != "TensorRTBackend":
        return False
    from .tensorrt import TensorRTBackend

    core.define_delegate(name, TensorRTBackend, TensorRTBackend.payload_is_code)
    return True


class Delegate:
    """Base of delegates written in Python. Defining a subclass with ``name=`` makes it known under that name, for
    programs loaded from then on; defining the name again replaces the class.

    The engine has 16 slots for names and frees none; XNNPACK takes one.
    """

    requires_device: ClassVar[bool] = False
    """Whether its tensors must lie in device memory. A program that gives it host memory is then refused at the
    call, naming the delegate."""

    payload_is_code: ClassVar[bool] = False
    """Whether loading a payload runs code that it carries: `headrace.load(..., allow_native_code=False)` then
    refuses programs that need this delegate."""

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is None:
            return
        if not isinstance(name, str) or not name or len(name.encode()) > 63:
            raise OptionError(
                f"delegate {cls.__name__}: expected a name of 1 to 63 bytes, got {name!r}; choose another"
            )
        core.define_delegate(name, cls, cls.payload_is_code)

    def load(self, payload: bytes, context: Context) -> None:
        """Prepare one island. ``payload`` is what the exporter's side of the delegate wrote.

        Raise to refuse it: the program's load fails with a DelegateError that carries the exception. A ProgramError,
        OptionError, InputError, DelegateUnavailable or OutOfDeviceMemory keeps its class and its words.
        """

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Stream) -> None:
        """Enqueue the island's work on ``stream``.

        Tensors are `Buffer`s, lent until the call's work is done; numbers and None come as they are. Outputs have
        the greatest shape of the plan; where it is less this time, say so with ``output.resize(shape)``.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method run(), got none; define it")

    def capturable(self) -> bool | str:
        """Whether `run` may be recorded into a graph (`Method.capture`): True, or the reason why not.

        What `run` enqueues on its stream, or on streams that it forks from it and joins again, is recorded once and
        done again at each replay, on the same memory. What `run` does in Python is done at the capture alone, and so
        is a choice that it makes by the content of its inputs: say why not then. Memory that work uses must be there
        already (make it in `load`, or in the first run) and stay. In a capture, waiting for the device fails.
        """
        return True

    def state(self) -> tuple[Buffer, ...]:
        """The `Buffer`s that runs change and that are kept from run to run, such as a cache of keys and values.

        A capture may run the method more than once; it puts their content back where a run must not count, and
        where the capture fails. A graph is captured anew when they lie elsewhere. Other memory of the delegate's
        need not be named.
        """
        return ()

    def captured(self) -> object:
        """What the graph that was captured just now uses of this delegate's and what further runs might change: the
        graph keeps it until it is gone and its last launch is done. None, as here, where there is nothing of the kind.

        Called after each capture that succeeded. Work that runs in the graph must find it as it was: keep using other
        objects after it.
        """
        return None

    @staticmethod
    def stage() -> str:
        """What the `run` that the calling thread is in is for: ``"call"``, ``"warm-up"`` (before a capture: what
        may be allocated has to be, now) or ``"capture"``."""
        return core.capture_stage()
