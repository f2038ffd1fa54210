"""The ordering test's own process: see test_ordering.py."""

from __future__ import annotations

import json

import numpy as np

import headrace
from tests.unit.ordering_plants import chain, in_thread

RUNS = {"chain25_cuda": 1000, "chain25_cuda_resident": 1000, "chain25_single": 500}


def main(first: int, last: int) -> None:
    counts = dict.fromkeys(RUNS, 0)
    conflicts = 0
    for name, runs in RUNS.items():
        for seed in range(first, last):
            device = headrace.device("sim", schedule=seed)
            program, x, want = chain(device, name)
            left = runs // (last - first) + (seed - first < runs % (last - first))
            streams = [None, device.stream(), device.stream()]

            def call(number: int, program=program, x=x, device=device, name=name, streams=streams):
                given = device.to_device(x) if name.endswith("resident") else x
                (y,) = program["forward"](given, stream=streams[number % 3])
                return np.array(y.numpy() if isinstance(y, headrace.Buffer) else y)

            def some(call=call, left=left, want=want):
                with headrace.record() as record:
                    golden = call(0)
                    again = call(1)
                np.testing.assert_array_equal(golden, want)
                same = [golden.tobytes() == again.tobytes()]
                same += [call(number).tobytes() == golden.tobytes() for number in range(2, left + 1)]
                return same, len(record.check().conflicts)

            same, found = in_thread(some)
            assert all(same)
            counts[name] += len(same)
            conflicts += found
    print(json.dumps({"seeds": last - first, **counts, "conflicts": conflicts}))
