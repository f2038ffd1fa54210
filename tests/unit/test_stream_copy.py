"""What delegates build on: copies in stream order, and the partition that a stream is in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace

X = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize("schedule", ["eager", "late", 1, 2])
def test_copy_is_in_stream_order_and_does_not_wait(schedule: Any) -> None:
    """DE3, OR5: behind what is on the stream, before what follows; known to whoever uses the memory, and to a record."""
    sim = headrace.device("sim", schedule=schedule)
    stream = sim.stream()
    source, target = sim.empty((8,), stream=stream), sim.empty((12,), stream=stream)
    with headrace.record() as record:
        stream.call(lambda: source.numpy().__setitem__(..., X), writes=[source])
        waits = sim.calls("synchronize_stream") + sim.calls("synchronize_event")
        stream.copy(source, target)
        stream.copy(source, target, 4)
        assert sim.calls("synchronize_stream") + sim.calls("synchronize_event") == waits
        stream.call(lambda: source.numpy().fill(0), writes=[source])
        np.testing.assert_array_equal(target.numpy()[:8], X)
        sim.synchronize()
    assert record.check().accesses > 0


def test_copy_goes_between_host_and_device() -> None:
    sim, cpu = headrace.device("sim", schedule="late"), headrace.device("cpu")
    stream = sim.stream()
    there, back = sim.empty((8,), stream=stream), cpu.empty((8,))
    stream.copy(cpu.to_device(X), there)
    stream.copy(there, back)
    stream.synchronize()
    np.testing.assert_array_equal(back.numpy(), X)
    cpu.stream().copy(back, other := cpu.empty((8,)))
    np.testing.assert_array_equal(other.numpy(), X)


def test_what_cannot_be_copied_is_refused() -> None:
    """OP5: room and device; nothing is enqueued."""
    sim, other = headrace.device("sim"), headrace.device("sim")
    stream = sim.stream()
    small, large = sim.empty((4,)), sim.empty((8,))
    sim.synchronize()
    for source, target, nbytes in ((large, small, None), (small, large, 17), (large, small, 17)):
        with pytest.raises(
            headrace.InputError, match=r"Stream\.copy: expected room for \d+ bytes, got a source of"
        ):
            stream.copy(source, target, nbytes)
    with pytest.raises(headrace.DeviceError, match=r"Stream\.copy, writes: expected memory of sim:0"):
        stream.copy(small, other.empty((8,)))
    with pytest.raises(
        headrace.InputError, match=r"Stream\.copy, reads: expected Buffers, got numpy\.ndarray"
    ):
        stream.copy(X, large)
    assert sim.pending == 0


def test_stream_knows_its_partition() -> None:
    """GC1: the same one for every stream of it, equal to the one that made it; none for others."""
    sim = headrace.device("sim")
    one, two = sim.split([8, 16])
    for lane in (one, two):
        assert lane.stream().partition == lane and hash(lane.stream().partition) == hash(lane)
        assert lane.stream().partition.sm_count == lane.sm_count
        stream = lane.stream()
        with headrace.caller_stream(stream):
            assert headrace.current_stream().partition == lane
    assert one != two and one != 3
    assert sim.stream().partition is None and headrace.device("cpu").stream().partition is None


def test_what_a_capture_used_is_kept_by_its_graph() -> None:
    """LT4, DE3: Delegate.captured() is asked once for each capture, and what it gives lives as long as the graph."""
    import gc
    import weakref

    from tests import programs

    class Held:
        pass

    class Keeps(headrace.Delegate):
        held: list[Any] = []  # noqa: RUF012
        raises = False

        def load(self, payload: bytes, context: Any) -> None:
            pass

        def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
            stream.call(lambda: [o.numpy().fill(1) for o in outputs], writes=outputs)

        def captured(self) -> Any:
            if self.raises:
                raise RuntimeError("on purpose")
            held = Held()
            self.held.append(weakref.ref(held))
            return held

    for name in ("TestA", "TestB"):
        type(name, (Keeps,), {}, name=name)
    from pathlib import Path

    path = Path(programs.__file__).parent / "committed" / "two_islands.pte"
    calls = programs.read_calls(path.with_suffix(".npz"))
    sim = headrace.device("sim")
    with headrace.load(path, device=sim) as program:
        inputs = [v.data for v in calls[0].inputs]
        inputs = [sim.to_device(x) for x in inputs]
        graph = program["forward"].capture(*inputs)
        assert len(Keeps.held) == 2 and all(ref() is not None for ref in Keeps.held)
        graph.replay(*inputs)
        assert len(Keeps.held) == 2
        graph.close()
        program["forward"](*inputs)
        gc.collect()
        assert all(ref() is None for ref in Keeps.held)
        Keeps.raises = True
        program["forward"].capture(*inputs).replay(*inputs)
