"""Programs bound to a lane, and programs measured side by side."""

from __future__ import annotations

from typing import Any

import pytest

import headrace
from headrace import lanes
from tests.contract.conftest import Golden, golden

from . import kernels
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
