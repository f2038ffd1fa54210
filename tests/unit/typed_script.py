"""What a user writes who checks types: run by test_types.py, and checked there by mypy --strict as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import headrace

ROOT = Path(__file__).parents[2]


class Scale(headrace.Delegate, name="Scale"):
    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        assert_type(context.device, headrace.Device)
        self.factor = np.float32(payload)

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: headrace.Stream) -> None:
        x: headrace.Buffer = inputs[0]
        y: headrace.Buffer = outputs[0]

        def work() -> None:
            np.multiply(x.numpy(), self.factor, out=y.numpy())

        stream.call(work, reads=[x], writes=[y])


def memory(device: headrace.Device, x: NDArray[np.float32]) -> None:
    buffer = device.to_device(x)
    assert_type(buffer, headrace.Buffer)
    assert_type(buffer.shape, tuple[int, ...])
    assert_type(device.empty((2, 3), "bfloat16"), headrace.Buffer)
    assert_type(device.memory(), dict[str, int])
    host: NDArray[np.float32] = buffer.numpy()
    assert np.asarray(buffer).tolist() == host.tolist() == x.tolist()
    assert np.from_dlpack(headrace.Buffer.from_float32(x).float32()).tolist() == x.tolist()


def work(device: headrace.Device, x: NDArray[np.float32]) -> None:
    lane = device.partition(sms=8)
    assert_type(lane, headrace.Partition)
    assert_type(device.split([8, 16]), list[headrace.Partition])
    stream = lane.stream()
    assert_type(stream, headrace.Stream)
    assert_type(stream.partition, headrace.Partition | None)
    with headrace.load(ROOT / "examples/scale.pte", device=device, lane=lane) as program:
        assert_type(program, headrace.Program)
        method = program["forward"]
        assert_type(method, headrace.Method)
        assert_type(method.device, headrace.Device)
        with headrace.caller_stream(stream), headrace.record() as recorded:
            (y,) = method(device.to_device(x, stream))
            event = stream.record()
        assert_type(event, headrace.Event)
        event.synchronize()
        assert y.numpy().tolist() == (x * 6).tolist()
        assert recorded.check().accesses > 0
        graph = method.capture(device.to_device(x), stream=stream)
        assert_type(graph, headrace.Graph)
        graph.replay(device.to_device(x + 1), stream=stream)
        assert graph.stats.replays == 1
    selected = headrace.current_stream()
    assert_type(selected, headrace.Stream | None)
    assert selected is None


def main() -> None:
    device = headrace.device("sim", schedule="late")
    assert_type(device, headrace.Device)
    x = np.arange(4, dtype=np.float32)
    memory(device, x)
    work(device, x)
    print("done")


if __name__ == "__main__":
    main()
