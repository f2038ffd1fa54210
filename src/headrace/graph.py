"""A method as one graph: `Method.capture` records it, `Graph.replay` runs it again at the cost of one launch."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .engine import core
from .errors import OptionError
from .stats import Counts, GraphStats

__all__ = ["Graph", "GraphStats"]


class Graph:
    """One method captured as one graph over all its islands. Get it from `Method.capture`.

    Replays from any thread are safe: they run one after the other, and one after the other with calls of the same
    instance of the method. It keeps its method alive, and is a context manager that closes it.
    """

    __slots__ = ("_native", "_outputs", "_replay")

    def __init__(self, native: core.Graph, outputs: tuple[Any, ...]) -> None:
        self._native = native
        self._replay = native.replay
        self._outputs = outputs

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the one step returned that `Method.capture` ran: as from a call with the examples."""
        return self._outputs

    def replay(
        self, *inputs: Any, stream: Any = None, out: Sequence[Any] | None = None, borrow: bool = False
    ) -> tuple[Any, ...]:
        """Run the method on ``inputs``, as a call of it would: the same checks, outputs and rule about waiting.

        Inputs are copied to memory of the graph's, in order on the stream of the call, whether they lie on the host
        or on the device; the graph is launched there; outputs are copied from its memory. It waits for the device
        before it returns if an input lies on the host, or an output does, or no stream was given or selected.

        Shapes that were not captured yet, or a stream in another partition, are captured now; that run is this
        replay's, and it waits. `stats` counts it, and why.

        Args:
            stream: as for a call. The graph runs in the partition of that stream.
            out: one array (or None) for each output to write to.
            borrow: give outputs on the device as the graph's own memory, without a copy. They are right until the
                next replay of the same shapes; read through headrace after that, they raise InputError.

        Raises:
            InputError: an argument does not fit, or is a borrowed output that was written over; nothing was run.
            CaptureError: the graph was closed, the stream captures, or this replay had to capture and could not
                (``step``). After the latter, replays run as ordinary calls.
            DelegateError, DeviceError, ProgramError: as a call.
        """
        if not isinstance(borrow, bool):
            raise OptionError(f"borrow: expected a bool, got {type(borrow).__name__}; pass True or False")
        return self._replay(inputs, stream, out, borrow)

    @property
    def stats(self) -> GraphStats:
        """Counts so far, over all threads."""
        raw = self._native.stats()
        last, total = Counts(**raw.pop("last")), Counts(**raw.pop("total"))
        return GraphStats(**raw, last=last, total=total)

    def close(self) -> None:
        """Give its memory back, behind the work that is in flight. Later replays raise CaptureError.

        Waits for replays that are being enqueued, not for the device. Outputs that are still held stay right.
        Closing twice is fine.
        """
        self._native.close()

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats
        return f"<headrace.Graph: {stats.kept} kept, {stats.replays} replays>"
