"""TensorRT's delegate on a GPU. Its stand-in computes by CuPy's kernels, on any GPU; an engine that TensorRT for RTX built
runs where it supports the GPU and is refused, by name, where not."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.delegate import Context, nvinfer
from headrace.delegate.tensorrt import TensorRTBackend
from headrace.pte import tensorrt as blob
from headrace.testing import check_delegate
from headrace.testing.tensorrt import Tensor, bindings, build, stand_in
from tests import programs
from tests.conftest import run_python, succeeded
from tests.tensorrt.test_modules import ENGINE
from tests.tensorrt.test_programs import given, right, tensorrt_islands

from . import kernels

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::headrace.LaneWarning")]

REPEATS = 1000
NAMES = programs.TENSORRT_CUDA.names()


def test_it_conforms_on_a_gpu(gpu: Any) -> None:
    """DE2, DE3: the public kit, with a stream of the engine's own."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    engine = build(
        inputs=[Tensor("x", "float32", (-1, 4))],
        outputs=[Tensor("y", "float32", (-1, 4))],
        steps=[{"op": "mul", "out": "y", "args": ["x", 2.5]}],
        profiles=[{"x": ((1, 4), (3, 4), (8, 4))}],
        auxiliary=1,
    )
    with stand_in():
        payload = blob.write(engine, bindings(engine))
        check_delegate(
            TensorRTBackend, payload=payload, inputs=[x], outputs=[x * np.float32(2.5)], device=gpu
        )


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_eager(name: str, gpu: Any, stream: Any) -> None:
    """DE2, CS1, OR2: split over TensorRT and AOTInductor, on every kind of stream."""
    program = programs.TENSORRT_CUDA.load(name)
    with stand_in() as module, program.open(device=gpu) as loaded:
        for call in program.calls:
            right(loaded["forward"](*given(call, gpu, program), stream=stream), call, program)
    gc.collect()
    assert (module.contexts, module.dropped_early) == (0, 0)


def test_a_thousand_runs_of_26_islands_have_the_same_bits(gpu: Any) -> None:
    """OR4, SY1, SY4: right first, then equal; behind work that takes its time, without a wait of the host."""
    program = programs.TENSORRT_CUDA.load("chain")
    stream = gpu.stream()
    with stand_in(), program.open(device=gpu) as loaded:
        method, call = loaded["forward"], program.calls[0]
        (x,) = given(call, gpu, program)
        (first,) = method(x, stream=stream)
        right([first], call, program)
        wanted = first.numpy().tobytes()
        for number in range(REPEATS):
            if number % 100 == 0:
                kernels.slow(stream, 2)
            (got,) = method(x, stream=stream)
            if number % 10 == 0:
                assert got.numpy().tobytes() == wanted, number
        last = method.stats.last
        assert (last.synchronizations, last.bytes_to_device, last.bytes_to_host) == (0, 0, 0)


@pytest.mark.parametrize("name", ["alone", "sizes", "chain"])
def test_one_graph_over_all_islands_replays_right(name: str, gpu: Any) -> None:
    """GR1, GR2: captured as the first call; other shapes; calls in between; each graph keeps its contexts."""
    program = programs.TENSORRT_CUDA.load(name)
    with stand_in() as module, program.open(device=gpu) as loaded:
        method = loaded["forward"]
        inputs = [given(c, gpu, program) for c in program.calls]
        graph = method.capture(*inputs[0])
        for _ in range(20):
            for call, arrays in zip(program.calls, inputs, strict=True):
                right(graph.replay(*arrays), call, program)
                right(method(*arrays), call, program)
        shapes = {arrays[0].shape for arrays in inputs}
        assert module.contexts == len(tensorrt_islands(program)) * (1 + len(shapes))
        graph.close()
    del graph, method
    gc.collect()
    assert (module.contexts, module.dropped_early) == (0, 0)


def test_graph_of_a_lane_is_right_there(gpu: Any) -> None:
    """GR3, GC5: in a green context, eagerly and in replays, the engine's own stream in it too."""
    program = programs.TENSORRT_CUDA.load("chain")
    lane = gpu.partition(sms=8)
    with stand_in(), program.open(device=gpu) as loaded, headrace.caller_stream(lane.stream()):
        method = loaded["forward"]
        (x,) = given(program.calls[0], gpu, program)
        right(method(x), program.calls[0], program)
        graph = method.capture(x)
        for _ in range(20):
            right(graph.replay(x), program.calls[0], program)


def test_real_engine_runs_or_is_refused_by_name(gpu: Any, tmp_path: Path) -> None:
    """DE2: a matrix product by TensorRT for RTX where it supports this GPU; else: built for X, running Y."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("tensorrt_rtx_bindings is not installed")
    path = tmp_path / "engine"
    assert succeeded(run_python(ENGINE, path)) == "built\n"
    payload = blob.write(path.read_bytes(), [blob.Binding("x", True), blob.Binding("output0", False)])
    made = TensorRTBackend()
    context = Context("forward", 0, 1, {}, {}, gpu, lambda key: b"")
    try:
        made.load(payload, context)
        refused = ""
    except headrace.DelegateUnavailable as e:
        refused = str(e)
    if refused:
        (here,) = (i for i in nvinfer.installed() if i.kind == "tensorrt_rtx")
        assert f"built for tensorrt_rtx {here.version}" in refused
        assert f"{here.version} on cuda:0, compute capability" in refused
        return
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    stream = gpu.stream()
    out = gpu.empty((2, 4), stream=stream)
    with headrace.caller_stream(stream):
        made.run((gpu.to_device(x),), (out,), stream)
    np.testing.assert_array_equal(out.numpy(), x)
