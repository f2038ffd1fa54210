"""Programs bound to a lane, and programs measured side by side."""

from __future__ import annotations

from typing import Any

import pytest

import headrace
from headrace import lanes
from headrace.testing.tensorrt import stand_in
from tests import programs
from tests.contract.conftest import Golden, golden

from . import kernels
from .test_aoti import given
from .test_graphs import held

pytestmark = pytest.mark.cuda


def test_a_program_stays_on_the_sms_of_its_lane(two: Golden, gpu: Any) -> None:
    """GC2, SY2, GR3: by the SM ids that the delegates' kernels saw, in calls without a stream and in replays."""
    kernels.Placed.loaded.clear()
    kernels.install(kernels.Placed)
    lane = gpu.partition(sms=8)
    with two.load(None, lane=lane) as program:
        placed = list(kernels.Placed.loaded)
        assert placed and program.device is gpu

        def seen() -> set[int]:
            gpu.synchronize()
            return {sm for one in placed for sm in kernels.cupy.asnumpy(one.seen).tolist()}

        for k in range(3):
            assert two.right(program["forward"](*two.inputs(k)), k)
        sms = seen()
        assert len(sms) == lane.sm_count == 8
        graph = program["forward"].capture(*two.inputs(0))
        for one in placed:
            one.seen[...] = 0xFFFFFFFF
        gpu.synchronize()
        for k in range(3):
            assert two.right(graph.replay(*two.inputs(k)), k)
        assert seen() == sms and graph.stats.recaptures == {}
        kernels.Placed.loaded.clear()


@pytest.mark.parametrize("replayed", [False, True])
def test_work_says_on_which_sms_it_runs(replayed: bool, gpu: Any) -> None:
    """GC2: as a kernel of CuPy's sees it, on the same streams."""
    small, large = gpu.split([8, 64])
    streams = [small.stream(), large.stream(), gpu.stream(), gpu.per_thread_stream()]
    seen = [lanes.sms_seen(stream, replayed=replayed) for stream in streams]
    assert seen == [frozenset(kernels.sms_seen(stream)) for stream in streams]
    assert [len(sms) for sms in seen] == [8, 64, gpu.sm_count, gpu.sm_count] and not seen[0] & seen[1]


class Aside(kernels.Captured):
    """On a stream of its own in no lane, joined as it should be: an engine's auxiliary stream that nobody gave it."""

    def load(self, payload: bytes, context: Any) -> None:
        super().load(payload, context)
        self.side = context.device.stream()

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        self.side.wait(stream.record())
        super().run(inputs, outputs, self.side)
        stream.wait(self.side.record())


def test_kernels_that_leave_their_lane_are_named(two: Golden, gpu: Any) -> None:
    """GC2: in the captured graph, whatever the calls looked like."""
    lane = gpu.partition(sms=8)
    kernels.install(kernels.Captured)
    kept = lanes.confinement(two.path, lane, two.inputs())
    assert kept.confined and kept.not_looked == "" and kept.kernels >= 2 and kept.untold_kernels == 0, str(
        kept
    )
    kernels.install(Aside)
    left = lanes.confinement(two.path, lane, two.inputs())
    assert not left.confined and left.not_looked == "" and left.kernels == kept.kernels, str(left)
    # The stream of the calls is the lane's all the same.
    assert left.sms == kept.sms and len(left.sms) == 8
    assert any(line.startswith("in its graph: ") for line in left.escaped), str(left)


# Every delegate there is: CuPy's in Python, AOTInductor's libraries of our exporter and of stock's, engines by TensorRT's
# stand-in, and these in turn.
LOOKED_AT = [
    *(("python", name) for name in ("two_islands", "chain10")),
    *(("aoti", name) for name in programs.CUDA.names()),
    # What is staged from the host by an engine has no work for a device as far as its file says, and no lane.
    *(("tensorrt", name) for name in programs.TENSORRT_CUDA.names() if name != "staged"),
]


@pytest.mark.parametrize(("kind", "name"), LOOKED_AT, ids=[f"{kind}-{name}" for kind, name in LOOKED_AT])
def test_every_delegate_stays_in_its_lane(kind: str, name: str, gpu: Any) -> None:
    """GC2, GR3: by the SM ids that its stream's work saw, in calls and in replays, and by the context of each kernel of
    its graph. A method that cannot be captured says why."""
    kernels.install(kernels.Captured)
    lane = gpu.split([8, 16])[1]
    before = held(gpu)
    if kind == "python":
        program = golden(name)
        tenant = lanes.Tenant(program.path, program.inputs(), name=name)
    else:
        exported = (programs.CUDA if kind == "aoti" else programs.TENSORRT_CUDA).load(name)
        inputs = [given(value) for value in exported.calls[0].inputs]
        tenant = lanes.Tenant(
            exported.path, inputs, data=exported.data, method=exported.calls[0].method, name=name
        )
    with stand_in():
        seen = lanes.confinement(tenant, lane)
    print(seen)
    assert seen.confined, str(seen)
    assert len(seen.sms) == seen.granted == 16 and seen.sms == seen.replayed
    assert seen.kernels > 0 or ", capture: expected " in seen.not_looked, str(seen)
    assert seen.untold_kernels == 0, str(seen)
    if kind != "aoti":
        assert seen.kernels > 0, str(seen)
    assert held(gpu) == before


def test_a_call_beside_lanes_and_in_none_is_warned_of(two: Golden, gpu: Any) -> None:
    """GC6."""
    lane = gpu.partition(sms=8)
    with two.load(gpu) as program:
        with pytest.warns(headrace.LaneWarning, match="outside every lane of cuda:0"):
            assert two.right(program["forward"](*two.inputs()))
        assert two.right(program["forward"](*two.inputs(), stream=lane.stream()))


def test_measuring_gives_everything_back(gpu: Any) -> None:
    """GC6, LT3: memory and SMs, as they were; each program in every setting."""
    kernels.install(kernels.Captured)
    before = held(gpu)
    names = ("two_islands", "chain10")
    tenants = [lanes.Tenant(golden(n).path, golden(n).inputs(), name=n) for n in names]
    found = lanes.side_by_side(tenants, [8, 64], device=gpu, calls=50)
    assert len({(one.tenant, one.sms, one.beside) for one in found}) == len(found) == 10
    proposal = lanes.propose(
        [lanes.Tenant(golden("chain10").path, golden("chain10").inputs(), target_us=1e6)],
        device=gpu,
        calls=20,
    )
    assert proposal.sms == (8,)
    assert [one.sms for one in proposal.curves[0]] == [
        gpu.partition(sms=n).sm_count for n in (8, 16, 32, 64, 128)
    ]
    assert held(gpu) == before
    assert gpu.partition(sms=gpu.sm_count).sm_count == gpu.sm_count
