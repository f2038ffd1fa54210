"""DE2: how ``TensorRTBackend`` treats an engine, shown with engines of the stand-in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.delegate import Context, nvinfer
from headrace.delegate.tensorrt import TensorRTBackend
from headrace.pte.tensorrt import Aliased, Binding, Built, write
from headrace.testing import check_delegate
from headrace.testing.tensorrt import StandIn, Tensor, bindings, build, stand_in

F = "float32"
X = np.arange(12, dtype=np.float32).reshape(3, 4)
DOUBLE: dict[str, Any] = {
    "inputs": [Tensor("x", F, (-1, 4))],
    "outputs": [Tensor("y", F, (-1, 4))],
    "steps": [{"op": "mul", "out": "y", "args": ["x", 2.0]}],
    "profiles": [{"x": ((1, 4), (4, 4), (8, 4))}],
}


def island(
    engine: bytes,
    device: Any,
    *,
    aliased: Sequence[Aliased] = (),
    specs: Mapping[str, bytes] | None = None,
    options: Mapping[str, Any] | None = None,
    module: StandIn | None = None,
    num_inputs: int | None = None,
    named: Sequence[Binding] | None = None,
    **fields: Any,
) -> TensorRTBackend:
    """The delegate, loaded with the engine."""
    module = module or StandIn()
    named = bindings(engine) if named is None else named
    count = sum(b.is_input for b in bindings(engine)) if num_inputs is None else num_inputs
    made = TensorRTBackend()
    with stand_in(module.kind, module):
        made.load(
            write(engine, named, aliased, **fields),
            Context("forward", 0, count, specs or {}, options or {}, device, lambda key: b""),
        )
    return made


def run(made: TensorRTBackend, stream: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    with headrace.caller_stream(stream):
        made.run(tuple(inputs), tuple(outputs), stream)


def double(made: TensorRTBackend, device: Any, rows: int = 3) -> Any:
    """One call of the engine DOUBLE; the answer."""
    stream = device.stream()
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    out = device.empty(x.shape, stream=stream)
    run(made, stream, [device.to_device(x)], [out])
    stream.synchronize()
    np.testing.assert_array_equal(out.numpy(), 2 * x)
    return out


@pytest.mark.parametrize("kind", nvinfer.KINDS)
@pytest.mark.parametrize("auxiliary", [0, 3])
def test_it_conforms(kind: str, auxiliary: int) -> None:
    """DE2, DE3: the public kit for delegates, over each kind of run time, with streams of its own and without."""
    engine = build(**DOUBLE, auxiliary=auxiliary)
    module = StandIn(kind)
    built = Built("tensorrt" if kind == "tensorrt_lean" else kind, "1.0.0.0", version_compatible=True)
    with stand_in(kind, module):
        ran = check_delegate(
            TensorRTBackend,
            payload=write(engine, bindings(engine), built=built),
            options={"runtime": kind},
            inputs=[X],
            outputs=[2 * X],
        )
    assert len(ran) == 9 and (module.contexts, module.dropped_early) == (0, 0)


# -------------------- profiles and shapes


def test_nearest_profile_that_admits_the_shapes_is_taken() -> None:
    """DE2: by ratio to its best shapes; back again when the shapes are."""
    profiles = [{"x": ((1, 4), (n, 4), (most, 4))} for n, most in ((8, 64), (1, 2), (30, 64))]
    sim = headrace.device("sim", schedule="late")
    made = island(build(**{**DOUBLE, "profiles": profiles}), sim)
    for rows, profile in ((1, 1), (2, 1), (3, 0), (20, 2), (64, 2), (1, 1), (8, 0)):
        double(made, sim, rows)
        assert made._execution is not None and made._execution.context.profile == profile  # type: ignore[attr-defined]


def test_shapes_out_of_every_profile_are_refused() -> None:
    """OP5: the input, its shape, and what is admitted; the next call is right."""
    sim = headrace.device("sim")
    two = {**DOUBLE, "inputs": [Tensor("x", F, (-1, 4)), Tensor("z", F, (-1, 4))]}
    two["steps"] = [{"op": "add", "out": "y", "args": ["x", "z"]}]
    small, large = ((1, 4), (1, 4), (2, 4)), ((3, 4), (4, 4), (8, 4))
    made = island(build(**{**two, "profiles": [{"x": small, "z": small}, {"x": large, "z": large}]}), sim)
    stream = sim.stream()

    def call(*rows: int) -> None:
        given = [sim.to_device(np.ones((n, 4), np.float32)) for n in rows]
        run(made, stream, given, [sim.empty((rows[0], 4))])

    says = r"input 1 'z': expected a shape from \[1, 4\] to \[2, 4\] or \[3, 4\] to \[8, 4\].*got \[9, 4\]; "
    with pytest.raises(headrace.DelegateError, match=says):
        call(2, 9)
    with pytest.raises(
        headrace.DelegateError, match=r"2 optimization profiles admits together, got \[1, 4\], \[4, 4\]"
    ):
        call(1, 4)
    call(2, 2)
    with pytest.raises(
        headrace.DelegateError, match=r"expected shapes that the engine can compute with, got x .*inferShapes"
    ):
        call(3, 4)
    call(4, 4)


def test_nothing_and_a_single_number_have_their_shapes() -> None:
    """DE2: a tensor without elements has no memory, and TensorRT has one dimension for what has none."""
    sim = headrace.device("sim")
    made = island(build(**{**DOUBLE, "profiles": [{"x": ((0, 4), (4, 4), (8, 4))}]}), sim)
    for rows in (0, 2, 0):
        double(made, sim, rows)
    scalar = build(inputs=[Tensor("x", F)], outputs=[Tensor("y", F)], steps=DOUBLE["steps"])
    made, stream = island(scalar, sim), sim.stream()
    out = sim.empty(())
    run(made, stream, [sim.to_device(np.float32(3.5).reshape(()))], [out])
    assert out.numpy() == 7


@pytest.mark.parametrize("schedule", ["eager", "late", 4])
def test_shapes_that_are_data_are_read_on_the_host(schedule: Any) -> None:
    """DE2: an input and an output that the engine has on the host, new values at each call."""
    sim = headrace.device("sim", schedule=schedule)
    engine = build(
        inputs=[Tensor("x", F, (3, 4)), Tensor("size", "int64", (2,), on_host=True)],
        outputs=[Tensor("output0", F, (-1, -1)), Tensor("output1", "int64", (2,), on_host=True)],
        steps=[
            {"op": "view", "out": "output0", "args": ["x", "size"]},
            {"op": "shape", "out": "output1", "args": ["output0"]},
        ],
    )
    made, stream = island(engine, sim), sim.stream()
    x, size = sim.to_device(X), sim.empty((2,), "int64", stream=stream)
    for wanted in ((4, 3), (2, 6), (12, 1), (12, 1)):
        stream.call(lambda n=wanted: size.numpy().__setitem__(..., n), writes=[size])
        out, shape = sim.empty(wanted, stream=stream), sim.empty((2,), "int64", stream=stream)
        run(made, stream, [x, size], [out, shape])
        np.testing.assert_array_equal(out.numpy(), X.reshape(wanted))
        np.testing.assert_array_equal(shape.numpy(), wanted)
    assert "'size' on the host" in str(made.capturable())


def test_sizes_that_depend_on_content_are_refused() -> None:
    sim = headrace.device("sim")
    made = island(build(**{**DOUBLE, "outputs": [Tensor("y", F, (-1, 4), open=True)]}), sim)
    with pytest.raises(
        headrace.DelegateError, match=r"output 'y': expected a shape that follows.*depends on their content"
    ):
        double(made, sim)


def test_result_that_does_not_fit_the_plan_is_refused() -> None:
    sim = headrace.device("sim")
    made = island(build(**DOUBLE), sim)
    with pytest.raises(headrace.DelegateError, match=r"within the plan's \[2, 4\], got \[3, 4\]"):
        run(made, sim.stream(), [sim.to_device(X)], [sim.empty((2, 4))])


# -------------------- outputs over inputs

CACHE: dict[str, Any] = {
    "inputs": [Tensor("x", F, (3, 4)), Tensor("cache", F, (3, 4))],
    "outputs": [Tensor("y", F, (3, 4)), Tensor("updated", F, (3, 4), alias="cache")],
    "steps": [
        {"op": "add", "out": "updated", "args": ["cache", "x"]},
        {"op": "mul", "out": "y", "args": ["updated", 1.0]},
    ],
}


def cache(**changed: Any) -> bytes:
    return build(
        **{**CACHE, "outputs": [CACHE["outputs"][0], dataclasses.replace(CACHE["outputs"][1], **changed)]}
    )


@pytest.mark.parametrize(("kind", "declared"), [("kv_cache_update", True), ("user", False)])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_update_in_place_is_kept(device: str, kind: str, declared: bool) -> None:
    """DE2: the caller's memory has it, and so has the output, call after call."""
    on = headrace.device(device)
    made = island(cache(declared=declared), on, aliased=[Aliased("updated", "cache", kind)])
    stream, kept = on.stream(), on.to_device(np.zeros((3, 4), np.float32))
    for step in (1, 2, 3):
        y, updated = on.empty((3, 4)), on.empty((3, 4))
        inputs = (on.to_device(X), kept)
        if device == "cpu":
            made.run(inputs, (y, updated), stream)
        else:
            run(made, stream, inputs, [y, updated])
        for buffer in (y, updated, kept):
            np.testing.assert_array_equal(buffer.numpy(), step * X)
    assert "memory that a capture could not put back" in str(made.capturable())


def test_update_of_memory_of_the_host_is_refused() -> None:
    """DE2: staged, it would be lost; nothing is enqueued, and the memory is as it was."""
    sim, cpu = headrace.device("sim"), headrace.device("cpu")
    made = island(cache(), sim, aliased=[Aliased("updated", "cache")])
    inputs = [cpu.to_device(X), cpu.to_device(np.ones((3, 4), np.float32))]
    with pytest.raises(
        headrace.DelegateError, match=r"input 1 'cache': expected memory of sim:0, .* got memory of the host"
    ):
        made.run(tuple(inputs), (cpu.empty((3, 4)), cpu.empty((3, 4))), cpu.stream())
    assert (inputs[1].numpy() == 1).all() and not sim.pending


@pytest.mark.parametrize(
    ("engine", "aliased"),
    [
        (cache(), []),  # the engine writes over it, and the payload does not say so
        (cache(declared=False), [Aliased("updated", "cache")]),
        (cache(), [Aliased("updated", "cache", "user")]),
        (cache(), [Aliased("updated", "x")]),
    ],
)
def test_engine_and_payload_have_to_agree_on_aliases(engine: bytes, aliased: list[Aliased]) -> None:
    with pytest.raises(
        headrace.ProgramError, match=r"output 'updated': expected to be written over .*, got aliased_io of"
    ):
        island(engine, headrace.device("sim"), aliased=aliased)


def test_alias_has_the_shape_of_its_input() -> None:
    with pytest.raises(
        headrace.ProgramError, match=r"expected the shape and dtype of input 'cache'.*got int32\[3, 4\]"
    ):
        island(
            cache(declared=False, dtype="int32"),
            headrace.device("sim"),
            aliased=[Aliased("updated", "cache", "user")],
        )


# -------------------- what engine and program have to agree on


@pytest.mark.parametrize(
    ("engine", "given", "says"),
    [
        ({}, {"num_inputs": 2}, "expected 2 inputs, as the program has them, got an engine with 1"),
        ({}, {"named": [Binding("q", True), Binding("y", False)]}, r"got inputs \['q'\] and outputs \['y'\]"),
        ({}, {"named": [Binding("y", True), Binding("x", False)]}, r"expected the bindings of the engine, inputs \['x'\]"),
        ({}, {"named": [Binding("x", True, "int32"), Binding("y", False)]}, "input 'x': expected float32.*got int32"),
        ({}, {"named": [Binding("x", True, F, (-1, 5)), Binding("y", False)]}, r"got float32\[-1, 5\]"),
        ({}, {"named": [Binding("x", True, F, (4,)), Binding("y", False)]}, r"got float32\[4\]"),
        ({"inputs": [Tensor("x", "int4", (-1, 4))]}, {"named": []}, "expected an element type that tensors have, got INT4"),
        ({"inputs": [Tensor("x", F, (-1, 4), vectorized=1)]}, {}, "expected a linear layout"),
        ({}, {"target_platform": "windows_x86_64"}, "got one built for windows_x86_64"),
        ({}, {"built": Built("tensorrt_next", "3")}, "got one built with 'tensorrt_next'"),
    ],
)  # fmt: skip
def test_disagreement_is_told(engine: dict[str, Any], given: dict[str, Any], says: str) -> None:
    """DE2, OP4: ProgramError, with what the engine has and what the program says."""
    with pytest.raises(headrace.ProgramError, match=says):
        island(build(**{**DOUBLE, **engine}), headrace.device("sim"), **given)


def test_names_may_be_the_engine_s() -> None:
    """DE2: where the payload names no binding, the engine's order is that of the arguments."""
    sim = headrace.device("sim")
    double(island(build(**DOUBLE), sim, named=[]), sim)


def test_arguments_that_do_not_fit_are_refused() -> None:
    """OP5: dtype, layout and count, by name."""
    sim = headrace.device("sim")
    made, stream = island(build(**DOUBLE), sim), sim.stream()
    x = sim.to_device(X)
    for inputs, says in (
        ([x.numpy().astype("f8")], "input 0 'x': expected float32, as the engine has it, got float64"),
        ([3.0], "got float"),
        ([x, x], "expected 1 inputs, got 2"),
    ):
        with pytest.raises(headrace.DelegateError, match=says):
            run(made, stream, inputs, [sim.empty((3, 4))])
    strided = island(build(**{**DOUBLE, "outputs": [Tensor("y", F, (-1, 4), strides=(1, 8))]}), sim)
    with pytest.raises(
        headrace.DelegateError, match=r"expected contiguous memory, got an engine with strides \[1, 8\]"
    ):
        double(strided, sim)


# -------------------- which run time


def test_engine_for_another_version_or_gpu_says_so() -> None:
    """DE2: built for X, running Y, and what to do."""
    sim = headrace.device("sim")
    for kind, module, built, says in (
        (
            "tensorrt",
            StandIn("tensorrt", "2.0.0.0"),
            Built("tensorrt", "1.0.0.0"),
            r"built for tensorrt 1\.0\.0\.0, running headrace.testing.tensorrt \(tensorrt\) 2\.0\.0\.0 on sim:0: "
            r"deserializeCudaEngine: VERSION_MISMATCH; install of version 1\.0\.0\.0: 'pip install tensorrt'",
        ),
        (
            "tensorrt_rtx",
            StandIn("tensorrt_rtx", "2.0.0.0", "8.9"),
            Built("tensorrt_rtx", "1.0.0.0"),
            r"running headrace.testing.tensorrt \(tensorrt_rtx\) 2\.0\.0\.0 on sim:0, compute capability 8\.9: VERSION_MISMATCH",
        ),
        (
            "tensorrt_rtx",
            StandIn("tensorrt_rtx", "1.0.0.0", "9.0"),
            Built("tensorrt_rtx", "1.0.0.0", ("8.6", "8.9")),
            r"built for tensorrt_rtx 1\.0\.0\.0, compute capability 8\.6 or 8\.9, running .*, compute capability 9\.0: a GPU that",
        ),
    ):
        assert module.kind == kind
        with pytest.raises(headrace.DelegateUnavailable, match=says):
            island(build(**DOUBLE), sim, module=module, built=built)
    refused = build(**DOUBLE, capabilities=["8.6"])
    with pytest.raises(headrace.DelegateUnavailable, match=r"compute capability 9\.0: UNSUPPORTED_CC; "):
        island(
            refused,
            sim,
            module=StandIn("tensorrt_rtx", compute_capability="9.0"),
            built=Built("tensorrt_rtx", "1.0.0.0"),
        )


def test_lean_run_time_reads_version_compatible_engines_alone() -> None:
    """DE2: whichever is installed and fits."""
    sim = headrace.device("sim")
    lean = StandIn("tensorrt_lean")
    double(
        island(
            build(**DOUBLE), sim, module=lean, built=Built("tensorrt", "1.0.0.0", version_compatible=True)
        ),
        sim,
    )
    with pytest.raises(headrace.DelegateUnavailable, match="expected a GPU"):
        island(build(**DOUBLE), sim, module=lean, built=Built("tensorrt", "1.0.0.0"))
    # Both there: the first that takes it.
    with stand_in("tensorrt", StandIn("tensorrt", "9.0.0.0")):
        made = island(
            build(**DOUBLE), sim, module=lean, built=Built("tensorrt", "1.0.0.0", version_compatible=True)
        )
    assert made._loaded.kind == "tensorrt_lean"


GPU = SimpleNamespace(name="cuda:0", ordinal=0)
"""A GPU by its name, where there is none."""


def test_missing_run_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """DE2, DE5, OP3: none installed: for what it was built, what to install."""
    from headrace.pte.tensorrt import read

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    blob = read(write(b"engine", [Binding("y", False)], built=Built("tensorrt_rtx", "1.7.1.116", ("8.6",))))
    with pytest.raises(headrace.DelegateUnavailable) as e:
        nvinfer.load_engine(blob, GPU)
    text = str(e.value)
    assert (
        "built for tensorrt_rtx 1.7.1.116, compute capability 8.6, got none (tensorrt_rtx: not installed)"
        in text
    )
    assert "of version 1.7.1.116: 'pip install tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs'" in text
    assert [(i.kind, i.module, i.problem) for i in nvinfer.installed()] == [
        (k, "", "not installed") for k in nvinfer.KINDS
    ]
    # An engine that does not say: by its first bytes, else both that read TensorRT's own.
    for engine, says in (
        (b"vtrt".ljust(24, b"\0") + bytes([1, 7, 1, 116]), r"built for tensorrt_rtx 1\.7\.1\.116, got none"),
        (
            b"ftrt",
            r"a TensorRT that the program does not name, got none \(tensorrt: not installed; tensorrt_lean: not inst",
        ),
    ):
        with pytest.raises(headrace.DelegateUnavailable, match=says):
            nvinfer.load_engine(read(write(engine, [Binding("y", False)])), GPU)


def test_module_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """OP3: a package whose library is missing, and an empty one."""
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.11: cannot open shared object file')")
    (tmp_path / "tensorrt_lean.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = {i.kind: i for i in nvinfer.installed()}
    assert found["tensorrt"].problem == (
        "tensorrt does not load: OSError: libnvinfer.so.11: cannot open shared object file"
    )
    assert found["tensorrt_lean"].problem.startswith("tensorrt_lean does not load: AttributeError: ")


def test_run_time_that_cannot_be_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """OP3: TensorRT gives an object that would end the process, and logs why: the log is what counts."""
    module = StandIn()

    def broken(logger: Any) -> Any:
        logger.log(StandIn.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
        return object()

    monkeypatch.setattr(module, "Runtime", broken)
    with pytest.raises(headrace.DelegateUnavailable, match="CUDA initialization failure with error: 35"):
        island(build(**DOUBLE), headrace.device("sim"), module=module)


# -------------------- weight streaming


@pytest.mark.parametrize(
    ("option", "spec", "budget"),
    [
        (None, None, 500),  # the automatic one
        (None, b"300", 300),
        ("200", b"300", 200),
        (200, None, 200),
        ("", b"300", 300),
        ("0", None, 0),
        ("5000000000", None, 1000),  # no more than there is
        (None, b"400\0", 400),
    ],
)
def test_budget_of_streamed_weights(option: Any, spec: bytes | None, budget: int) -> None:
    """DE2: bytes in decimal; load option over compile spec over TensorRT's own; before there is a context."""
    sim = headrace.device("sim")
    options = {} if option is None else {"weight_streaming_budget": option}
    specs = {} if spec is None else {"weight_streaming_budget": spec}
    made = island(build(**DOUBLE, streamable_nbytes=1000), sim, options=options, specs=specs)
    assert made._loaded.engine.weight_streaming_budget_v2 == budget
    double(made, sim)
    # Without weights to stream there is nothing to set.
    made = island(build(**DOUBLE), sim, options=options, specs=specs)
    assert made._loaded.engine.weight_streaming_budget_v2 == 0


def test_budget_that_is_no_number_is_refused() -> None:
    sim = headrace.device("sim")
    for spec in (b"", b"-1", b"12 ", b"0x10", b"9" * 30, b"\xff"):
        if spec:
            with pytest.raises(
                headrace.ProgramError, match="compile spec 'weight_streaming_budget': expected bytes"
            ):
                island(build(**DOUBLE), sim, specs={"weight_streaming_budget": spec})
    first = island(build(**DOUBLE), sim, module=(module := StandIn()))
    # The stand-in refuses a budget while there are contexts, as TensorRT does.
    with pytest.raises(
        headrace.OptionError, match="expected a budget that the engine accepts, got 10 bytes of 1000"
    ):
        island(
            build(**DOUBLE, streamable_nbytes=1000),
            sim,
            module=module,
            options={"weight_streaming_budget": 10},
        )
    double(first, sim)


# -------------------- TensorRT for RTX's cache


def test_compiled_kernels_are_kept_in_a_folder_by_choice(tmp_path: Path) -> None:
    """DE2: a file for each engine and version, whole or not at all; one of another GPU is refused and written anew."""
    sim = headrace.device("sim")

    def load(capability: str = "8.9", **options: Any) -> TensorRTBackend:
        module = StandIn("tensorrt_rtx", compute_capability=capability)
        built = Built("tensorrt_rtx", "1.0.0.0")
        return island(build(**DOUBLE), sim, module=module, built=built, options=options)

    double(load(), sim)
    assert not list(tmp_path.iterdir())
    made = load(runtime_cache=str(tmp_path))
    double(made, sim)
    del made
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-1.0.0.0.rtxcache")
    first, written = file.read_bytes(), file.stat().st_mtime_ns
    made = load(runtime_cache=str(tmp_path))
    double(made, sim)
    assert made._cache is not None and made._cache.written == first
    del made
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (first, written)
    del_me = load("12.0", runtime_cache=str(tmp_path))
    del del_me
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() != first
    file.write_bytes(b"damaged")
    double(load("12.0", runtime_cache=str(tmp_path)), sim)
    with pytest.raises(headrace.OptionError, match="a folder that can be written to"):
        load(runtime_cache=str(tmp_path / "none"))


# -------------------- what fails


@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_engine_that_is_not_enqueued_is_told_and_the_stream_drained(schedule: Any) -> None:
    """LT2, OP3: what was enqueued before is done, the likely cause is named, and the next call is right."""
    sim, module = headrace.device("sim", schedule=schedule), StandIn()
    made = island(build(**DOUBLE), sim, module=module)
    stream, x = sim.stream(), sim.to_device(X)
    out = sim.empty((3, 4), stream=stream)
    stream.call(lambda: None)
    module.fail_next = "invalid stream"
    with pytest.raises(
        headrace.DelegateError,
        match=r"got no from .*: enqueueV3: invalid stream; the likely cause: a stream of another device",
    ) as e:
        run(made, stream, [x], [out])
    assert e.value.log == ("enqueueV3: invalid stream",) and stream.query()
    run(made, stream, [x], [out])
    np.testing.assert_array_equal(out.numpy(), 2 * X)
    lane = sim.partition(sms=8)
    module.fail_next = "no"
    with pytest.raises(
        headrace.DelegateError, match="the likely cause: the stream is in a partition of 8 SMs"
    ):
        run(made, lane.stream(), [x], [out])


@pytest.mark.parametrize("operation", ["record", "wait", "call", "create_stream"])
def test_device_that_fails_leaves_nothing_under_way(operation: str) -> None:
    """LT2: an event that cannot be recorded, or whatever else fails: drained, then told; the next call is right."""
    sim, module = headrace.device("sim", schedule="late"), StandIn()
    made = island(build(**DOUBLE, auxiliary=1), sim, module=module)
    stream, x = sim.stream(), sim.to_device(X)
    out = sim.empty((3, 4), stream=stream)
    failures = 0
    for at in range(6):
        sim.fail(operation, at)
        try:
            run(made, stream, [x], [out])
        except headrace.HeadraceError:
            assert stream.query()
            failures += 1
        sim.clear_faults()
        stream.synchronize()
        run(made, stream, [x], [out])
        np.testing.assert_array_equal(out.numpy(), 2 * X)
    assert failures
    del made
    assert (module.contexts, module.dropped_early) == (0, 0)


def test_dropped_with_work_under_way_it_waits() -> None:
    """LT1: a context is destroyed behind the work that uses it; the results are there."""
    sim, module = headrace.device("sim", schedule="late"), StandIn()
    made = island(build(**DOUBLE), sim, module=module)
    stream = sim.stream()
    out = sim.empty((3, 4), stream=stream)
    run(made, stream, [sim.to_device(X)], [out])
    assert sim.pending
    stream.close()
    del made
    assert (module.contexts, module.dropped_early) == (0, 0)
    np.testing.assert_array_equal(out.numpy(), 2 * X)


def test_context_that_cannot_be_made_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """OP3: out of memory is found when the program is loaded, not at its first call."""
    monkeypatch.setattr("headrace.testing.tensorrt._Engine.create_execution_context", lambda self: None)
    with pytest.raises(
        headrace.DelegateError, match="expected an execution context, got none, without a word why"
    ):
        island(build(**DOUBLE), headrace.device("sim"))


class Foreign:
    """A stream in a green context that somebody else made."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def partition(self) -> Any:
        raise headrace.NotSupported("a green context of somebody else's")


def test_in_somebody_else_s_green_context_tensorrt_makes_its_streams() -> None:
    """GC5: no stream can be made there by others; outside again the delegate makes them."""
    sim, module = headrace.device("sim"), StandIn()
    made = island(build(**DOUBLE, auxiliary=2), sim, module=module)
    stream, x = sim.stream(), sim.to_device(X)
    out = sim.empty((3, 4), stream=stream)
    for foreign, given in ((False, 2), (True, 0), (True, 0), (False, 2)):
        with headrace.caller_stream(stream):
            made.run((x,), (out,), Foreign(stream) if foreign else stream)
        assert made._execution is not None
        assert len(made._execution.context.auxiliary) == given  # type: ignore[attr-defined]
        np.testing.assert_array_equal(out.numpy(), 2 * X)
    module.fail_next = "no"
    with (
        headrace.caller_stream(stream),
        pytest.raises(headrace.DelegateError, match="in somebody else's green context"),
    ):
        made.run((x,), (out,), Foreign(stream))
