"""Whether a program stays in its lane: the multiprocessors that its stream's work ran on, and where each kernel of its graph
runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..device import Partition, current_stream
from ..device import Stream as DeviceStream
from ..engine import core
from ..errors import CaptureError, HeadraceError, InputError, NotSupported, OptionError
from ..graph import Graph
from ..ordering import Kind, Log, Stream, record
from ..program import Method, Source, load
from .latency import Tenant

__all__ = ["Confinement", "confinement", "sms_seen"]

_WORK = {Kind.COPY, Kind.FILL, Kind.CALL, Kind.LAUNCH}


def sms_seen(stream: DeviceStream, *, replayed: bool = False) -> frozenset[int]:
    """The numbers of the multiprocessors on which work of a stream runs, as blocks of a small kernel see them; on `sim`
    those of the stream's partition.

    Args:
        stream: a `Stream`. Nobody has to keep off it meanwhile.
        replayed: capture the kernel first, on a stream of its own in the same partition, and launch the graph on ``stream``.

    Waits for the stream. There are 16 blocks for each multiprocessor of the GPU, each of which stays for 20 µs: 2.6 ms in a
    lane of 8 of an H200's 132; and the driver compiles the kernel each time.

    Raises:
        OptionError: not a `Stream`.
        DeviceError: the device has no multiprocessors, or its driver could not compile or run the kernel.
        CaptureError: the stream captures.
        NotSupported: (``replayed``) the stream is in a green context that headrace did not make.
    """
    look = getattr(stream, "_sms_seen", None)
    if look is None:
        raise OptionError(
            f"sms_seen: expected a Stream, as Device.stream() or Partition.stream() gives it, got {type(stream).__name__}; make one there"
        )
    return frozenset(look(replayed))


@dataclass(frozen=True)
class Confinement:
    """What `confinement` saw of one method in one lane. ``str()`` of it says so in a few words, and names what escaped.

    Attributes:
        tenant, method, device: what was run, and where.
        granted: multiprocessors of the lane.
        eager: those that probes saw on the stream of the calls: before them, after each, and after all.
        replayed: those that a probe saw which was captured in that lane and replayed.
        kernels: how many kernels of the method's graph were looked at, its child graphs' included (on `sim`: calls,
            copies and fills); 0 where there was no graph.
        untold_kernels: kernels of the graph of which the driver does not tell where they run.
        untold: other work in it that the driver does not tell of: copies and fills.
        escaped: each kernel of the graph that runs outside the lane wherever the graph is launched, by name, and each
            operation of a call or of the capture that went to a stream outside the lane, as far as headrace saw it.
        not_looked: why the graph's kernels were not looked at, so that calls were checked alone; empty where they were.
    """

    tenant: str
    method: str
    device: str
    granted: int
    eager: tuple[frozenset[int], ...]
    replayed: frozenset[int]
    kernels: int
    untold_kernels: int
    untold: int
    escaped: tuple[str, ...]
    not_looked: str = ""

    @property
    def sms(self) -> frozenset[int]:
        """All that any probe saw."""
        return self.replayed.union(*self.eager)

    @property
    def confined(self) -> bool:
        """Whether nothing that was looked at ran outside the lane."""
        return not self.escaped and 0 < len(self.sms) <= self.granted

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, with `confined`; numbers of multiprocessors ascending."""
        return {
            **asdict(self),
            "eager": [sorted(seen) for seen in self.eager],
            "replayed": sorted(self.replayed),
            "confined": self.confined,
        }

    def __str__(self) -> str:
        seen = f"{len(self.sms)} SMs seen of {self.granted} granted"
        if self.not_looked:
            graph = f"calls alone were checked: {self.not_looked}"
        else:
            graph = f"{self.kernels} kernels of its graph are in the lane"
            if self.untold_kernels:
                graph += f", {self.untold_kernels} are not told"
            if self.untold:
                graph += f", {self.untold} copies and fills are not told"
        head = f"{self.tenant}, {self.method}: "
        if self.confined:
            return f"{head}stays in its lane: {seen}, in calls and replayed; {graph}"
        lines = list(self.escaped)
        if len(self.sms) > self.granted:
            lines.insert(0, f"work of the lane's stream ran on {len(self.sms)} SMs: {sorted(self.sms)}")
        if not self.sms:
            lines.append("no probe saw any SM")
        if self.not_looked:
            lines.append(graph)
        return f"{head}leaves its lane of {self.granted} SMs:\n" + "\n".join(f"  {line}" for line in lines)


def confinement(
    source: Source | Tenant, lane: Partition, inputs: Sequence[Any] = (), *, calls: int = 2
) -> Confinement:
    """Load a program bound to a lane, call it, capture it and replay it, and see where that ran.

    A program runs whatever its delegates launch, on whatever streams. So two things are asked. Blocks of a kernel enqueued
    on the stream of the calls, between them, say on which multiprocessors they are: that stream stays in the lane. And
    the method is captured as a graph, in which every kernel of every delegate has a node, also those that nobody can
    change: each node has to belong to the lane's context. Beside that, what went through headrace to a stream outside
    the lane is named.

    Args:
        source: a program as `headrace.load` takes it, or a `Tenant`.
        lane: a `Partition`.
        inputs: for its first method, on the host; a tenant has its own.
        calls: ordinary calls, and then as many replays.

    Returns:
        What was seen, whatever it was: see `Confinement.confined`. Waits for the device.

    Raises:
        OptionError: no `Partition`, fewer than 1 call, a thread with a selected stream (calls would go there), or a
            program without work for a device.
        CaptureError: a capture failed after it had begun (``step``). A method that cannot be captured at all is no error.
        DeviceError: as `sms_seen`, or a probe could not run.
        InputError, ProgramError, DelegateError: the program could not be loaded or called.
    """
    if not hasattr(lane, "sm_count") or not hasattr(lane, "stream"):
        raise OptionError(
            f"confinement: expected a Partition, as Device.partition() gives it, got {type(lane).__name__}; make one there"
        )
    if calls < 1:
        raise OptionError(f"calls: expected 1 or more, got {calls}; pass one")
    if current_stream() is not None:
        raise OptionError(
            "confinement: expected a thread with no selected stream, got one inside caller_stream(), where calls go to that; call it outside"
        )
    tenant = source if isinstance(source, Tenant) else Tenant(source, inputs)
    with load(
        tenant.source, data=tuple(tenant.data), device=lane.device, lane=lane, options=tenant.options
    ) as program:
        name = tenant.method or program.methods[0]
        if name not in program:
            raise InputError(
                f"method: expected one of {', '.join(program.methods)}, got {name!r}; name one of these"
            )
        return _look(tenant, program[name], lane, calls)


def _look(tenant: Tenant, method: Method, lane: Partition, calls: int) -> Confinement:
    stream = method._native.settled()
    replayed: frozenset[int] = frozenset()
    kernels, untold_kernels, untold, escaped, not_looked = 0, 0, 0, [], ""
    graph: Graph | None = None
    try:
        with record() as recorded:
            eager = [sms_seen(stream)]
            for _ in range(calls):
                method(*tenant.inputs)
                eager.append(sms_seen(stream))
            replayed = sms_seen(stream, replayed=True)
            try:
                graph = method.capture(*tenant.inputs)
            except CaptureError as error:
                if error.step != "check":
                    raise
                not_looked = str(error)
            for _ in range(calls if graph is not None else 0):
                assert graph is not None
                graph.replay(*tenant.inputs)
            eager.append(sms_seen(stream))
            if graph is not None:
                try:
                    pieces, untold_kernels, untold = graph._native.work()
                except NotSupported as error:
                    not_looked = str(error)
                else:
                    kernels = len(pieces)
                    escaped = [_kernel(piece) for piece, inside in pieces if not inside]
        escaped += _elsewhere(recorded.log, stream, lane)
    finally:
        if graph is not None:
            graph.close()
    if graph is not None and not kernels and not not_looked:
        not_looked = (
            f"{method.name}: expected a driver that tells where a graph's kernels run, got one that does not for any of "
            f"{untold_kernels}"
            if untold_kernels
            else f"{method.name}: expected a graph with kernels, got one with none"
        )
    return Confinement(
        tenant.label,
        method.name,
        lane.device.name,
        lane.sm_count,
        tuple(eager),
        replayed,
        kernels,
        untold_kernels,
        untold,
        tuple(dict.fromkeys(escaped)),
        not_looked,
    )


def _kernel(name: str) -> str:
    return f"in its graph: {name or 'a kernel whose name the driver does not tell'} runs outside the lane"


def _elsewhere(log: Log, stream: DeviceStream, lane: Partition) -> list[str]:
    """What calls of this program enqueued on streams outside the lane. Its own stream tells its calls from others'."""
    here = lane.device
    own = {
        number for number, s in log.streams.items() if s.handle == stream.handle and s.device_id == here._id
    }
    mine = {entry.call for entry in log.entries if entry.kind == Kind.BEGIN_CALL and entry.stream in own}
    refused = {entry.object for entry in log.entries if entry.kind == Kind.REFUSED}
    found = []
    for entry in log.entries:
        if entry.kind not in _WORK or not entry.call or entry.call not in mine or entry.number in refused:
            continue
        where = log.streams[entry.stream]
        if entry.stream in own or where.device_id != here._id or _inside(where, lane):
            continue
        island = log.islands.get(entry.island)
        who = f"instruction {island.instruction}, delegate '{island.delegate}'" if island else "the method"
        what = entry.name or Kind(entry.kind).name.lower()
        found.append(f"{who}: {what} on {where}, outside the lane")
    return found


def _inside(where: Stream, lane: Partition) -> bool:
    try:
        return core.stream_on(lane.device, where.handle).partition == lane
    except HeadraceError:  # gone by now: its size is what is left of it
        return where.sm_count == lane.sm_count
