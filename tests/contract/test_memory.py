"""DM: where memory lies, whose it is, and when it is used again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import Devices, golden


def test_planned_buffers_lie_where_the_program_says(devices: Devices) -> None:
    """DM1: what islands are handed is memory of the bound device; on the cpu it is the host's."""
    seen: list[Any] = []

    class Looks(delegates.OneCall, name="TestA"):
        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            seen.extend((self.context.device, b.device, stream.device) for b in (*inputs, *outputs))
            super().enqueue(inputs, outputs, stream)

    program = golden("two_islands")
    for device in devices:
        before = device.memory()["current_nbytes"]
        with program.load(device) as loaded:
            planned = [(u.device, u.nbytes) for u in loaded.memory().uses if u.what == "planned"]
            assert {name for name, _ in planned} == {"cpu", device.name}
            assert all(nbytes for _, nbytes in planned)
            took = device.memory()["current_nbytes"] - before
            there = sum(nbytes for name, nbytes in planned if name != "cpu")
            # A GPU's driver counts in larger steps.
            assert took == (there + 63) // 64 * 64 or (device.name == "cuda:0" and took >= there)
            assert program.right(loaded["forward"](*program.inputs()))
        assert len(seen) == 3 and all(d is device for three in seen for d in three)
        seen.clear()


@pytest.mark.parametrize("name", ["two_on_cuda1", "split_two_devices"])
def test_programs_for_other_indices_run_on_any_device(name: str, devices: Devices) -> None:
    """DM1: planned for cuda:1; for two devices."""
    program = golden(name)
    for device in devices:
        with program.load(device) as loaded:
            for k in range(2):
                assert program.right(loaded["forward"](*program.inputs(k), stream=device.stream()), k)


def test_a_program_that_plans_device_tensors_on_the_host_is_refused(devices: Devices) -> None:
    """DM1, DM2: islands would be handed host memory as a device's."""
    for device in devices:
        with pytest.raises(
            headrace.ProgramError,
            match="expected device memory that the caller brings, got an input planned on cuda:0",
        ):
            golden("split_cuda_unplanned_device").load(device)


def test_a_delegate_that_needs_device_memory_says_so(devices: Devices) -> None:
    """DM2: given host memory it is refused by name at the call, before run() sees an address."""
    ran: list[int] = []

    class Needs(delegates.OneCall, name="TestA"):
        requires_device = True

        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            ran.append(1)
            super().enqueue(inputs, outputs, stream)

    for device in devices:
        with golden("split_host").load(device) as loaded:
            with pytest.raises(
                headrace.DelegateError, match="'TestA': expected device memory, got host memory"
            ):
                loaded["forward"](*golden("split_host").inputs())
            assert ran == []
        with golden("split_cuda").load(device) as loaded:
            assert golden("split_cuda").right(loaded["forward"](*golden("split_cuda").inputs()))
            assert ran == [1]
            ran.clear()


def test_device_resident_arguments_are_bound_with_no_copy(sims: Devices) -> None:
    """DM3: the islands see the caller's own addresses, for inputs and for out=."""
    seen: list[int] = []
    program = golden("chain1")

    class Looks(delegates.OneCall, name="TestA"):
        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            seen.extend(b.address for b in (*inputs, *outputs))
            super().enqueue(inputs, outputs, stream)

    for device in sims:
        with program.load(device) as loaded:
            x, out = device.to_device(program.inputs()[0]), device.empty(program.inputs()[0].shape)
            copies = device.calls("copy")
            loaded["forward"](x, out=[out], stream=device.stream())
            assert device.calls("copy") == copies and seen == [x.address, out.address]
            (fresh,) = loaded["forward"](x, stream=device.stream())
            assert seen[2:] == [x.address, fresh.address]
            assert program.right([out]) and program.right([fresh])
        seen.clear()


def test_memory_of_another_device_is_refused(sims: Devices) -> None:
    """DM3: naming both devices; nothing is copied between them."""
    program = golden("split_cuda_resident")
    for device in sims:
        other = headrace.device("sim:1")
        strange = [other.to_device(x) for x in program.inputs()]
        with program.load(device) as loaded:
            copies = device.calls("copy")
            with pytest.raises(headrace.DeviceError, match=r"sim:0 or of the host, got memory of sim:1"):
                loaded["forward"](*strange)
            assert device.calls("copy") == copies
            with pytest.raises(headrace.DeviceError, match="sim:"):
                device.to_device(strange[0])
            assert program.right(loaded["forward"](*(x.numpy() for x in strange)))
    with (
        program.load("cpu") as loaded,
        pytest.raises(headrace.DeviceError, match=r"of cpu .*, got memory of sim:1"),
    ):
        loaded["forward"](*strange)


def test_a_dropped_buffer_s_memory_is_used_again_only_after_its_work(sims: Devices) -> None:
    """DM4, LT1: inputs and outputs dropped at once, many calls in flight, few blocks of memory."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            kept = []
            streams = [device.stream() for _ in range(3)]
            for k in range(24):
                (out,) = loaded["forward"](
                    *(device.to_device(x) for x in program.inputs(k)), stream=streams[k % 3]
                )
                if k % 4 == 0:
                    kept.append((k, out))
                del out
            for k, out in kept:
                assert program.right([out], k)
            # 24 outputs, 8 of them held or in the ring at a time.
            outputs = sum(u.nbytes for u in loaded.memory().uses if u.what == "outputs")
            assert outputs <= 12 * 256


def test_outputs_stay_right_after_later_calls(devices: Devices) -> None:
    """DM4: for as long as they are held; host and device outputs."""
    for name in ("split_cuda", "split_cuda_resident", "fork"):
        program = golden(name)
        for device in devices:
            with program.load(device) as loaded:
                held = [
                    loaded["forward"](
                        *(device.to_device(x) if name.endswith("resident") else x for x in program.inputs(k)),
                        stream=device.stream(),
                    )
                    for k in range(6)
                ]
                loaded.close()
                for k, results in enumerate(held):
                    assert program.right(results, k)


def test_memory_says_current_and_peak_use_of_the_device() -> None:
    """DM4: Program.memory(): item by item, and the device's own books."""
    device = headrace.device("sim")
    program = golden("split_cuda")
    with program.load(device) as loaded:
        loaded["forward"](*program.inputs())
        memory = loaded.memory()
        assert memory.current_nbytes == device.memory()["current_nbytes"] > 0
        extra = device.empty(1 << 16)
        del extra
        gc.collect()
        device.trim()
        after = loaded.memory()
        assert after.current_nbytes == memory.current_nbytes
        assert after.peak_nbytes >= memory.peak_nbytes + (1 << 18)
    with program.load("cpu") as loaded:
        assert (loaded.memory().current_nbytes, loaded.memory().peak_nbytes) == (0, 0)


def test_empty_is_ordered_before_whoever_uses_it(sims: Devices) -> None:
    """DM4: the memory exists from the allocation on, in stream order: a call on another stream comes behind it."""
    program = golden("chain1")
    for device in sims:
        with program.load(device) as loaded:
            x = device.to_device(program.inputs()[0])
            for _ in range(4):
                out = device.empty(x.shape, stream=device.stream())
                loaded["forward"](x, out=[out], stream=device.stream())
                assert program.right([out])
                device.trim()


def test_host_arrays_of_any_layout_come_in(devices: Devices) -> None:
    """DM3: a call copies what is not dense; the counts say so."""
    program = golden("split_cuda")
    for device in devices:
        with program.load(device) as loaded:
            x, y = program.inputs()
            wide = np.repeat(x, 2, axis=1)[:, ::2]
            assert program.right(loaded["forward"](wide, np.asfortranarray(y)))
            assert loaded["forward"].stats.last.repacked_bytes == x.nbytes + y.nbytes
            assert program.right(loaded["forward"](x, y)) and loaded["forward"].stats.last.repacked_bytes == 0
