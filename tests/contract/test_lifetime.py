"""LT: objects dropped in any order, with work in flight, from any thread, at the interpreter's end."""

from __future__ import annotations

import textwrap
import threading
from typing import Any

import numpy as np
import pytest

import headrace
from tests.conftest import run_python, succeeded

from . import delegates
from .conftest import Devices, golden

# A child that calls `program` on a device whose work is late, so that all of it is in flight.
PRELUDE = """
import gc, itertools, os, sys, threading, time
import numpy as np
import headrace
from tests.contract import delegates
from tests.contract.conftest import golden
delegates.install(delegates.WAYS[sys.argv[2] if len(sys.argv) > 2 else "one call"])
SCHEDULE = sys.argv[1] if len(sys.argv) > 1 else "late"
SCHEDULE = int(SCHEDULE) if SCHEDULE.isdecimal() else SCHEDULE
R, H = golden("split_cuda_resident"), golden("split_cuda")
def sim(): return headrace.device("sim", schedule=SCHEDULE)
"""


def child(code: str, *arguments: object, **options: Any) -> str:
    return succeeded(run_python(PRELUDE + textwrap.dedent(code), *arguments, **options))


PERMUTATIONS = """
    def scene():
        device = sim()
        stream = device.stream()
        program = R.load(device)
        method = program["forward"]
        inputs = [device.to_device(x) for x in R.inputs()]
        outputs = [method(*inputs, stream=stream)[0] for _ in range(2)]
        extra = device.stream(), stream.record()
        return dict(program=program, method=method, stream=stream, device=device, inputs=inputs, outputs=outputs,
                    extra=extra)

    count = 0
    for order in itertools.permutations(["program", "method", "stream", "device", "inputs", "outputs"]):
        for until in (range(6) if SUFFIX else (6,)):
            held = scene()
            for name in order[:until]:
                if name == "program" and count % 2:
                    held[name].close()
                if name == "stream" and count % 3 == 0:
                    held[name].close()
                del held[name]
            if "outputs" in held:
                assert all(R.right([y]) for y in held["outputs"]), order
            held.clear()
            count += 1
    gc.collect()
    print(count)
"""


@pytest.mark.parametrize("schedule", ["late", "3"])
def test_every_order_of_dropping_with_work_in_flight(schedule: str) -> None:
    """LT3: program, method, stream, device, inputs and outputs, all 720 orders; the outputs are right for as long as
    they are held."""
    assert child("SUFFIX = False\n" + textwrap.dedent(PERMUTATIONS), schedule) == "720\n"


@pytest.mark.parametrize("way", list(delegates.WAYS))
def test_every_order_of_dropping_whatever_way_the_delegates_work(way: str) -> None:
    """LT3: the first to be dropped, in each order, with the outputs read in between."""
    code = (
        textwrap.dedent(PERMUTATIONS)
        .replace("itertools.permutations(", "list(itertools.permutations(")
        .replace('"outputs"]):', '"outputs"]))[::30]:')
    )
    assert child("SUFFIX = True\n" + code, "late", way) == "144\n"


def test_dropping_from_other_threads(late: Any) -> None:
    """LT3: each object by a thread of its own, with work in flight."""
    program = golden("split_cuda_resident")
    for _ in range(20):
        loaded = program.load(late)
        stream = late.stream()
        inputs = [late.to_device(x) for x in program.inputs()]
        (out,) = loaded["forward"](*inputs, stream=stream)
        boxes = [[loaded], [stream], [inputs], [out]]
        del loaded, stream, inputs, out
        threads = [threading.Thread(target=box.clear) for box in boxes]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    late.synchronize()
    late.trim()
    late.synchronize()
    assert late.memory()["current_nbytes"] == 0


def test_a_stream_may_end_before_its_work(sims: Devices) -> None:
    """LT1: destroying the caller's stream at once; the next call is ordered behind the event, not the stream."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            inputs = [[device.to_device(x) for x in program.inputs(k)] for k in range(2)]
            results = []
            for k in range(4):
                stream = device.stream()
                results.append(loaded["forward"](*inputs[k % 2], stream=stream))
                stream.close()
            for k, result in enumerate(results):
                assert program.right(result, k % 2)


def test_a_program_waits_for_its_last_call_before_it_goes(late: Any, classes: dict[str, Any]) -> None:
    """LT1: on the event of that call: work that others put on the same stream afterwards is not waited for."""
    program, ran = golden("split_cuda_resident"), []
    loaded = program.load(late)
    inputs = [late.to_device(x) for x in program.inputs()]
    stream = late.stream()
    (out,) = loaded["forward"](*inputs, stream=stream)
    stream.call(lambda: ran.append(1))
    pending = late.pending
    loaded.close()
    assert late.pending < pending and ran == [] and not stream.query()
    assert program.right([out]) and ran == []
    stream.synchronize()
    assert ran == [1]


EXITS = {
    "everything in globals, in flight": """
        device = sim(); stream = device.stream(); program = R.load(device)
        inputs = [device.to_device(x) for x in R.inputs()]
        (out,) = program["forward"](*inputs, stream=stream)
        selection = headrace.caller_stream(stream); selection.__enter__()
        event = stream.record(); lane = device.partition(sms=8); inside = lane.stream()
        """,
    "a host function that never ran": """
        device = sim(); stream = device.stream(); buffer = device.empty(4)
        stream.call(lambda: buffer.numpy(), writes=[buffer])
        """,
    "in a cycle": """
        class Box: pass
        box = Box(); box.me = box; box.device = sim(); box.stream = box.device.stream(); box.program = R.load(box.device)
        box.out = box.program["forward"](*(box.device.to_device(x) for x in R.inputs()), stream=box.stream)
        """,
    "in an exit handler": """
        import atexit
        device = sim(); program = R.load(device); stream = device.stream()
        inputs = [device.to_device(x) for x in R.inputs()]
        def last():
            assert R.right(program["forward"](*inputs, stream=stream))
        atexit.register(last)
        """,
    "in a destructor at the very end": """
        class Late:
            def __init__(self):
                self.device = sim(); self.program = R.load(self.device); self.stream = self.device.stream()
                self.inputs = [self.device.to_device(x) for x in R.inputs()]
            def __del__(self):
                self.program["forward"](*self.inputs, stream=self.stream)
                self.program.close()
        sys.late = Late()
        """,
    "daemon threads in calls": """
        device = sim(); program = H.load(device, instances=2)
        def go(k):
            own = device.stream()
            while True: program["forward"](*H.inputs(), stream=own if k % 2 else None)
        for k in range(4): threading.Thread(target=go, args=(k,), daemon=True).start()
        time.sleep(0.1)
        """,
    "daemon threads with a device each": """
        def go():
            device = sim(); program = R.load(device); own = device.stream()
            inputs = [device.to_device(x) for x in R.inputs()]
            while True:
                outs = [program["forward"](*inputs, stream=own)[0] for _ in range(4)]
                outs[-1].numpy()
        for _ in range(3): threading.Thread(target=go, daemon=True).start()
        time.sleep(0.1)
        """,
    "daemon threads in host functions and waits": """
        device = sim()
        def go():
            own = device.stream()
            while True:
                own.call(lambda: time.sleep(0.001))
                own.synchronize()
        for _ in range(4): threading.Thread(target=go, daemon=True).start()
        time.sleep(0.1)
        """,
    "daemon threads loading": """
        def go():
            while True:
                device = sim()
                with H.load(device) as loaded: loaded["forward"](*H.inputs())
        for _ in range(3): threading.Thread(target=go, daemon=True).start()
        time.sleep(0.1)
        """,
    "an exception in flight": """
        device = sim(); program = R.load(device)
        inputs = [device.to_device(x) for x in R.inputs()]
        def go():
            with headrace.caller_stream(device.stream()):
                program["forward"](*inputs)
                raise KeyError
        try: go()
        except KeyError as e: kept = e
        """,
}


@pytest.mark.parametrize("schedule", ["late", "5"])
@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_ends_well(how: str, schedule: str) -> None:
    """LT3: live globals and daemon threads: exit status 0 and nothing on stderr."""
    child(EXITS[how], schedule)


def test_two_hundred_cycles_are_flat() -> None:
    """LT3: the device's memory, resident memory and descriptors; a device kept, and one for each cycle."""
    out = child(
        """
        kept = sim()
        def cycle(device):
            with R.load(device) as r, H.load(device, instances=2) as h:
                stream = device.stream()
                inputs = [device.to_device(x) for x in R.inputs()]
                for _ in range(2):
                    assert R.right(r["forward"](*inputs, stream=stream))
                    assert H.right(h["forward"](*H.inputs()))
                r["forward"](*inputs, stream=stream)
            loaded = R.load(device)
            loaded["forward"](*inputs, stream=device.stream())
        def now():
            gc.collect(); kept.synchronize(); kept.trim()
            return (kept.memory()["current_nbytes"], int(open("/proc/self/statm").read().split()[1]) * 4,
                    len(os.listdir("/proc/self/fd")), kept.pending)
        for _ in range(30): cycle(kept); cycle(sim())
        before = now()
        for _ in range(100): cycle(kept); cycle(sim())
        after = now()
        print(before, after)
        assert before[0] == after[0] == 0 and before[3] == after[3]
        assert after[1] - before[1] < 2048 and after[2] == before[2]
        """,
        environment={"MALLOC_ARENA_MAX": "1"},
    )
    assert out


def test_pending_host_functions_can_be_dropped(late: Any) -> None:
    """LT3: a function that never ran keeps its buffers, and these the device; drop_pending() ends that. Work that was
    dropped counts as failed."""
    stream, buffer = late.stream(), late.empty(4)
    stream.call(lambda: buffer.numpy().fill(1), writes=[buffer])
    assert late.pending
    late.drop_pending()
    assert late.pending == 0
    with pytest.raises(headrace.DeviceError, match="dropped before it ran"):
        buffer.numpy()
    stream.call(lambda: buffer.numpy().fill(2), writes=[buffer])
    np.testing.assert_array_equal(buffer.numpy(), 2)
    with pytest.raises(headrace.DeviceError, match="expected a simulated device"):
        headrace.device("cpu").drop_pending()


def test_a_buffer_outlives_everything_else(sims: Devices) -> None:
    """LT3: its memory, device and pending writer are its own to keep."""
    program = golden("split_cuda_resident")
    for device in sims:
        loaded = program.load(device)
        (out,) = loaded["forward"](*(device.to_device(x) for x in program.inputs()), stream=device.stream())
        array = out.numpy()
        del loaded, device
        assert program.right([out]) and program.right([array])
        del out
        assert program.right([array])


GRAPHS = """
    def scene():
        device = sim()
        stream = device.stream()
        program = R.load(device)
        method = program["forward"]
        inputs = [device.to_device(x) for x in R.inputs()]
        graph = method.capture(*inputs, stream=stream)
        outputs = [graph.replay(*inputs, stream=stream, borrow=k == 1)[0] for k in range(2)]
        return dict(program=program, method=method, stream=stream, device=device, graph=graph, outputs=outputs)

    count = 0
    for order in itertools.permutations(["program", "method", "stream", "device", "graph", "outputs"]):
        held = scene()
        for name in order:
            if name in ("program", "graph") and count % 2:
                held[name].close()
            if name == "stream" and count % 3 == 0:
                held[name].close()
            if name == "outputs":
                assert all(R.right([y]) for y in held["outputs"]), order
            del held[name]
        count += 1
    gc.collect()
    print(count)
"""


@pytest.mark.parametrize("schedule", ["late", "3"])
def test_every_order_of_dropping_graphs_with_replays_in_flight(schedule: str) -> None:
    """LT3, LT4: program, method, stream, device, graph and outputs, all 720 orders, fresh and borrowed outputs: they
    are right for as long as they are held."""
    assert child(GRAPHS, schedule) == "720\n"


def test_graphs_in_globals_at_the_interpreter_s_end() -> None:
    """LT3: in a global, in a thread that replays, with work in flight: exit status 0, nothing on stderr."""
    code = """
    device = sim()
    program = R.load(device)
    stream = device.stream()
    graph = program["forward"].capture(*R.inputs(), stream=stream)
    inputs = [device.to_device(x) for x in R.inputs()]
    kept = [graph.replay(*inputs, stream=stream) for _ in range(3)]
    def work():
        while True:
            graph.replay(*inputs, stream=stream)
            time.sleep(0.001)
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)
    print("end")
    """
    assert child(code) == "end\n"


def test_cycles_of_load_capture_replay_and_close_are_flat(late: Any) -> None:
    """LT3: 100 of them hold what the first held."""
    program = golden("split_cuda_resident")
    held = set()
    for k in range(100):
        with program.load(late) as loaded:
            graph = loaded["forward"].capture(*program.inputs(k % 3))
            assert program.right(graph.replay(*program.inputs(1)), 1)
        if k % 2:
            graph.close()
        del graph, loaded
        late.trim()
        late.synchronize()
        held.add(late.memory()["current_nbytes"])
    assert held == {0}
