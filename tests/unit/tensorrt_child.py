"""What the tests of TensorRT at export ask of a process that has torch and TensorRT-RTX: each function below is one case.

See ``cases.py``; its last argument is an interpreter that has the run time. Engines are really built, and none is run:
TensorRT-RTX needs no GPU to build.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .cases import Cases
from .split_child import exported, module, randn, refused, said, verify, who

case = Cases()


def trt(**options: Any) -> Any:
    from headrace.export import TensorRT

    return TensorRT(builder="tensorrt_rtx", **options)


def blobs(made: Any) -> list[Any]:
    """What the payloads of TensorRT's islands say, in order."""
    from headrace.pte import tensorrt

    raw = made.path.read_bytes()
    return [
        tensorrt.read(raw[i.payload_offset :][: i.payload_nbytes])
        for method in made.file.methods
        for i in method.islands
        if i.delegate == "TensorRTBackend"
    ]


# -------------------- claims


@case
def what_the_parser_refuses_falls_to_the_next(folder: Path) -> None:
    """EX1, EX5: each in the words of whoever refused it."""
    import torch

    from headrace.export import Python

    def run(self: Any, x: Any, n: Any) -> Any:
        a = torch.relu(x)
        return (
            torch.linalg.det(a),
            torch.erfinv(a * 0.1),
            n & 3,
            a.scatter(0, torch.zeros(1, 4, dtype=torch.int64), a),
            a.double() * 2,
            torch.rand_like(a),
            torch.tanh(a),
        )

    rest = Python("StepsA", predicate=lambda node: True)
    split = exported(
        folder, module(run), (randn(4, 4), torch.arange(4)), [trt(), rest]
    ).split  # fmt: skip
    taken = {n.operator for n in split if n.delegate == "TensorRT"}
    assert {"aten.relu.default", "aten.tanh.default"} <= taken, taken
    for operator, words in (
        ("aten.linalg_det.default", "(Det): UNSUPPORTED_NODE"),
        ("aten.erfinv.default", "PyTorch's ONNX exporter: No ONNX function found for"),
        ("aten.__and__.Scalar", "(BitwiseAnd): UNSUPPORTED_NODE"),
        ("aten.scatter.src", "TensorRT's builder: IBuilder::buildSerializedNetwork: Error Code 4"),
        ("aten.mul.Tensor", "TensorRT has no float64"),
        ("aten.rand_like.default", "random numbers"),
    ):
        found = [n for n in split if n.operator == operator and n.delegate == "StepsA"]
        whys = [(n.operator, n.why) for n in split if n.delegate == "StepsA"]
        assert any("TensorRT: not supported: " in n.why and words in n.why for n in found), (operator, whys)


@case
def batch_norm_goes_into_the_engine(folder: Path) -> None:
    """EX1, EX4: after a convolution, alone, and beside other operators of several results."""
    import torch
    from torch import nn

    from headrace.export import onnx_graph

    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_(0, 0.3)
    norm.running_var.uniform_(0.5, 2)

    def run(self: Any, x: Any) -> Any:
        a, b = self.norm(self.conv(x)).split(2, 1)
        values, places = torch.relu(a).max(1)
        return self.norm(x) + 1, values, places, b.chunk(2, -1)[1]

    model = module(run, norm=norm, conv=nn.Conv2d(4, 4, 3, padding=1))
    made = exported(folder, model, (randn(2, 4, 8, 8),), [trt()], verify=verify())
    norms = [n for n in made.split if "batch_norm" in n.operator]
    assert len(norms) == 2 and set(who(made.split).values()) == {"TensorRT"}, str(made.split)
    assert len(made.verification.deviations) == 4 and "evaluated by onnx.reference" in str(made.verification)

    # A tensor that is written into the code, in a program that is made twice: for the GPU, and to verify it.
    literal = module(lambda self, x: torch.relu(x * torch.tensor([0.1, 0.2])) + 1)
    made = exported(folder, literal, (randn(3, 2),), [trt()], verify=verify())
    assert len(made.verification.deviations) == 1

    # What nobody foresaw is the operator's refusal, by its name; the next delegate has it.
    really = onnx_graph.alone

    def broken(node: Any, program: Any) -> Any:
        if node.target is torch.ops.aten.relu.default or "relu" in node.name:
            raise KeyError("unforeseen")
        return really(node, program)

    onnx_graph.alone = broken
    try:
        split = exported(folder, model, (randn(2, 4, 8, 8),), [trt()]).split
    finally:
        onnx_graph.alone = really
    (relu,) = [n for n in split if n.operator == "aten.relu.default"]
    assert relu.delegate == "kernels", relu
    assert (
        f"TensorRT: not supported: {relu.name} alone could not be written as ONNX, KeyError: 'unforeseen'"
        in relu.why
    )


@case
def claims_hold(folder: Path) -> None:
    """EX1: operators, modules, a predicate, what is excluded, how small an island may be."""
    from headrace.export import Xnnpack
    from tests.programs.split import Layers

    def run(**claims: Any) -> Any:
        model = Layers(2).eval()
        return exported(folder, model, (randn(1, 3, 16),), [trt(**claims), Xnnpack()]).split

    by_module = run(modules=["layers.1"], exclude=["aten.*softmax"])
    for node in by_module:
        inside = node.module == "layers.1" or node.module.startswith("layers.1.")
        if node.operator != "getitem":
            assert (node.delegate == "TensorRT") == (inside and "softmax" not in node.operator), node
    by_operator = run(operators=["aten.gelu"], min_size=1)
    assert {n.operator for n in by_operator if n.delegate == "TensorRT"} == {"aten.gelu.default"}
    few = run(operators=["aten.gelu"], min_size=3)
    assert "TensorRT: too small: 1 of at least 3 operators" in few["aten_gelu_default"].why
    by_shape = run(predicate=lambda node: node.outputs[0][1] == (1, 3, 5))
    assert {n.result for n in by_shape if n.delegate == "TensorRT"} == {"float32[1, 3, 5]"}


@case
def what_nobody_takes_is_refused(folder: Path) -> None:
    """EX6: the node, its shapes and its line, and what TensorRT said."""
    import torch

    def run(self: Any, x: Any) -> Any:
        return torch.special.i0(torch.relu(x))

    error = refused(folder, module(run), (randn(4, 4),), [trt()])
    message = str(error)
    assert type(error).__name__ == "ExportError" and error.node == "aten_i0_default", repr(error)
    for part in (
        "(aten.i0.default of float32[4, 4], at ",
        "tensorrt_child.py:",
        "torch.special.i0(torch.relu(x))",
        "TensorRT: not supported: PyTorch's ONNX exporter",
    ):
        assert part in message, message


@case
def an_island_that_cannot_be_built_is_named(folder: Path) -> None:
    """EX6: what each operator alone did not show; the node at fault by the island's own name."""
    import torch

    from headrace.export import engines, tensorrt

    def run(self: Any, x: Any) -> Any:
        return torch.tanh(torch.relu(x) @ self.weight)

    model = module(run, weight=randn(4, 4))
    really = engines.Builder.build

    def fails(self: Any, where: str, graph: bytes, *args: Any) -> Any:
        parsed, parser = self._parsed(graph)
        names = [parsed.get_layer(i).name for i in range(parsed.num_layers)]
        (at,) = [n for n in names if "mm" in n or "matmul" in n.lower()]
        del parser
        raise engines.Unbuilt(f"no tactic for {at}", ["a line of the log"], [at])

    engines.Builder.build = fails
    try:
        error = refused(folder, model, (randn(2, 4),), [trt()])
    finally:
        engines.Builder.build = really
    assert error.node == "aten_matmul_default", error
    assert "no tactic for" in str(error) and "a line of the log" in error.log, error
    said(error, "aten_matmul_default (aten.matmul.default of float32[2, 4], float32[4, 4], at ")
    said(error, "torch.relu(x) @ self.weight")
    # Nor is an engine taken whose bindings are not the program's.
    engines.Builder.build = lambda self, where, graph, *args: (b"engine", self.bindings(graph)[::-1])
    try:
        error = refused(folder, model, (randn(2, 4),), [trt()])
    finally:
        engines.Builder.build = really
    said(error, "expected an engine with the bindings args_0 float32[2, 4], output_0 float32[2, 4]")
    assert tensorrt.BACKEND == "TensorRTBackend"


@case
def a_builder_refuses_what_it_cannot_build_for(folder: Path) -> None:
    """EX6: a product of float32 on 7.5, by the builder's words; a capability that it lacks, by name."""
    import torch

    from headrace.export import Aoti, Xnnpack

    def run(self: Any, x: Any) -> Any:
        return torch.relu(x @ self.weight)

    model, x = module(run, weight=randn(4, 4)), (randn(2, 4),)
    split = exported(folder, model, x, [trt(compute_capabilities=["7.5"]), Xnnpack()]).split
    assert split["aten_relu_default"].delegate == "TensorRT"
    (product,) = [n for n in split if "mm" in n.operator or "matmul" in n.operator]
    assert product.delegate != "TensorRT" and "Turing (SM75)" in product.why, product
    for options, target in (({"compute_capabilities": ["9.0"]}, "host"), ({}, "cuda:sm_90")):
        error = refused(folder, model, x, [trt(**options)], target=target)
        said(
            error,
            "compute capability 9.0: expected one that tensorrt_rtx 1.7.1.116 builds for, 7.5, 8.0, 8.6",
        )
    error = refused(folder, model, x, [trt()], device=None)
    said(error, "device: expected 'cuda:0' with TensorRT()")
    error = refused(folder, model, x, [trt(), Aoti()])
    said(error, "target: expected a GPU, such as 'cuda:sm_86', with TensorRT() and Aoti(), got 'host'")
    made = exported(folder, model, x, [trt()], target="cuda:sm_86+sm_89")
    (blob,) = blobs(made)
    assert blob.built.capabilities == ("8.6", "8.9") and b"accelerators={sm86 sm89 }" in bytes(blob.engine)


@case
def packages_that_are_missing_are_named(folder: Path) -> None:
    """OP3: what to install, and nothing written."""
    from headrace.export import TensorRT

    model, x = module(lambda self, x: x + 1), (randn(2, 4),)
    for modules, options, text in (
        (
            ["tensorrt_rtx", "tensorrt_rtx_bindings"],
            {"builder": "tensorrt_rtx"},
            "pip install tensorrt-rtx-cu13-libs",
        ),
        (["tensorrt"], {"builder": "tensorrt"}, "pip install tensorrt"),
        (["tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"], {}, "tensorrt_rtx: no module"),
        (["onnx"], {}, "pip install onnx onnxscript"),
        (["onnxscript"], {}, "pip install onnx onnxscript"),
    ):
        had = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(dict.fromkeys(modules))
        try:
            error = refused(folder, model, x, [TensorRT(**options)])
        finally:
            for name, was in had.items():
                if was is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = was
        assert type(error).__name__ == "ExportError" and text in str(error), error


# -------------------- sizes


@case
def profiles_have_the_bounds_of_the_sizes(folder: Path) -> None:
    """EX1: of each input of each island, from the user's bounds; sizes that are computed of others too."""
    import torch
    from torch.export import Dim

    from headrace.export import Profile, engines

    seen: list[Any] = []
    really = engines.Builder.build

    def kept(self: Any, where: str, graph: bytes, profiles: Any, *args: Any) -> Any:
        seen.append(
            [{b.name: s for b, s in zip(self.bindings(graph), one, strict=False)} for one in profiles]
        )
        return really(self, where, graph, profiles, *args)

    def run(self: Any, x: Any, y: Any) -> Any:
        rows = torch.cat([torch.relu(x), torch.tanh(x)])
        return torch.cumsum(rows, 1) + torch.sigmoid(rows), y * 2

    model = module(run)
    dims = {
        "args": (
            {0: Dim("rows", min=1, max=9)},
            {0: Dim("rows", min=1, max=9), 1: Dim("width", min=2, max=64)},
        )
    }
    inputs = (randn(3, 4), randn(3, 8))
    one = Profile(
        min={"args_0": (2, 4), "args_1": (2, 8)},
        opt={"args_0": (4, 4), "args_1": (4, 8)},
        max={"args_0": (6, 4), "args_1": (6, 16)},
    )
    engines.Builder.build = kept
    try:
        for delegate in (
            trt(exclude=["aten.cumsum"], merge=False),
            trt(exclude=["aten.cumsum"], merge=False, profiles=[one]),
        ):
            exported(folder, model, inputs, [delegate], dynamic_shapes=dims)
    finally:
        engines.Builder.build = really
    given = {name: sizes for island in seen for profile in island for name, sizes in profile.items()}
    assert seen and all(len(island) == 1 for island in seen), seen
    first = [p for island in seen[: len(seen) // 2] for p in island]
    second = [p for island in seen[len(seen) // 2 :] for p in island]
    assert {"args_0": ((1, 4), (3, 4), (9, 4))} in [
        {k: v for k, v in p.items() if k == "args_0"} for p in first
    ]
    assert {"args_1": ((1, 2), (3, 8), (9, 64))} in [
        {k: v for k, v in p.items() if k == "args_1"} for p in first
    ]
    assert {"args_1": ((2, 8), (4, 8), (6, 16))} in [
        {k: v for k, v in p.items() if k == "args_1"} for p in second
    ]
    # Rows of both halves: twice as many.
    doubled = [v for v in given.values() if v[2][0] in (12, 18)]
    assert doubled and all(v[0][0] % 2 == 0 for v in doubled), given


@case
def profiles_that_do_not_fit_are_named(folder: Path) -> None:
    """OP2, EX6: which profile, which input, which dimension, and what would be right."""
    import torch
    from torch.export import Dim

    from headrace.export import Profile

    def run(self: Any, x: Any, y: Any) -> Any:
        return torch.relu(x) + y

    rows = Dim("rows", min=2, max=9)
    dims = {"args": ({0: rows}, {0: rows})}
    model, inputs = module(run), (randn(3, 4), randn(3, 4))

    def profile(**shapes: Any) -> Any:
        return Profile(
            **{w: {n: s[i] for n, s in shapes.items()} for i, w in enumerate(("min", "opt", "max"))}
        )

    good = ((2, 4), (3, 4), (9, 4))
    for shapes, text in (
        ({"z": good}, "profile 0: expected inputs among args_0, args_1, got z"),
        ({"args_0": ((2,), (3,), (4,))}, "profile 0, min, 'args_0': expected 2 sizes"),
        ({"args_0": ((2, 3), (3, 4), (4, 4))}, "min, 'args_0', dimension 1: expected 4, which does not vary, got 3"),
        ({"args_0": ((1, 4), (3, 4), (4, 4))}, "min, 'args_0', dimension 0: expected a size that dynamic_shapes allows, 2 to 9"),
        ({"args_0": ((2, 4), (3, 4), (10, 4))}, "max, 'args_0', dimension 0: expected a size that dynamic_shapes allows, 2 to 9"),
        ({"args_0": good, "args_1": ((3, 4), (3, 4), (9, 4))}, "min, 'args_1', dimension 0: expected 2, as in"),
    ):  # fmt: skip
        error = refused(folder, model, inputs, [trt(profiles=[profile(**shapes)])], dynamic_shapes=dims)
        assert type(error).__name__ == "OptionError" and text in str(error), error
    unbounded = {"args": ({0: Dim("rows")}, {0: Dim("rows")})}
    error = refused(folder, model, inputs, [trt()], dynamic_shapes=unbounded)
    assert type(error).__name__ == "ExportError" and error.node, error
    said(error, "dimension 0: expected a size with an upper bound")
    said(error, 'Dim("name", max=…)')
    # A profile bounds the engine alone, and not the memory around it.
    both = profile(args_0=good, args_1=good)
    error = refused(folder, model, inputs, [trt(profiles=[both])], dynamic_shapes=unbounded)
    said(error, "forward, input 0 'args_0', dimension 0: expected a size with an upper bound")


# -------------------- the same input, the same bytes


@case
def an_engine_is_built_once(folder: Path) -> None:
    """EX1: a builder may give other bytes each time; the cache gives the same, as long as nothing that decides changed."""
    import torch

    from headrace.export import engines

    built: list[int] = []
    really = engines.Builder.build

    def counted(self: Any, *args: Any) -> Any:
        built.append(1)
        return really(self, *args)

    def run(self: Any, x: Any) -> Any:
        return torch.softmax(torch.relu(x @ self.weight), -1)

    model, x, cache = module(run, weight=randn(4, 4)), (randn(2, 4),), folder / "cache"
    engines.Builder.build = counted
    try:
        files = [exported(folder, model, x, [trt()], cache=cache).path.read_bytes() for _ in range(2)]
        assert files[0] == files[1] and len(built) == 1
        for change in ({"tf32": True}, {"optimization_level": 1}, {"compute_capabilities": ["8.9"]}):
            exported(folder, model, x, [trt(**change)], cache=cache)
        exported(folder, module(run, weight=randn(4, 4) + 1), x, [trt()], cache=cache)
        assert len(built) == 5
        (kept, *_) = sorted(cache.iterdir())
        for path in cache.iterdir():
            path.write_bytes(path.read_bytes()[:-40] + bytes(40))
        exported(folder, model, x, [trt()], cache=cache)
        assert len(built) == 6 and kept.name.startswith("tensorrt-")
    finally:
        engines.Builder.build = really


@case
def a_listener_that_raises_ends_the_build(folder: Path) -> None:
    """EX5: phases of the builder are told; an exception in the listener ends the export, and is the user's own."""
    from tests.programs.split import Layers

    lines: list[str] = []
    exported(folder, Layers(1).eval(), (randn(1, 3, 16),), [trt()], progress=lines.append)
    assert any("TensorRT, an island of" in line for line in lines), lines
    phases = [line for line in lines if line.startswith("forward: TensorRT: ")]
    assert len(phases) >= 3 and "forward: TensorRT: Building engine" in phases, lines

    def stop(line: str) -> None:
        if "Building engine" in line:
            raise KeyboardInterrupt(line)

    (folder / "m.pte").write_bytes(b"older")
    raised: list[str] = []
    try:
        exported(folder, Layers(1).eval(), (randn(1, 3, 16),), [trt()], progress=stop)
    except KeyboardInterrupt as stopped:
        raised.append(str(stopped))
    assert raised == ["forward: TensorRT: Building engine"]
    assert (folder / "m.pte").read_bytes() == b"older"


@case
def timings_are_kept_where_they_count(folder: Path) -> None:
    """EX1: TensorRT's timing cache goes to the folder of islands and comes back; here with RTX's builder in its place,
    whose own timing cache holds nothing."""
    from headrace.export import engines, onnx_graph
    from headrace.export.cache import Store

    model = onnx_graph.to_onnx(_program(lambda self, x: x + 1, randn(2, 4))).SerializeToString()
    builder = engines.named("tensorrt_rtx")
    store = Store(folder / "cache")
    builder.build("m", model, [], engines.Settings(), store)
    assert not (folder / "cache").exists()
    builder.runtime = "tensorrt"
    key = f"timing-tensorrt-{builder.version}"
    builder.build("m", model, [], engines.Settings(), store)
    kept = store.read(key)
    assert kept is not None and len(kept[1][0]) > 0
    given: list[Any] = []
    really = builder._timing_cache
    builder._timing_cache = lambda config, found: given.append(found) or really(config, found)
    builder.build("m", model, [], engines.Settings(), store)
    assert given == [kept]


def _program(function: Any, *inputs: Any) -> Any:
    import torch

    return torch.export.export(module(function), inputs)


# -------------------- ONNX


@case
def the_graph_is_the_islands(folder: Path) -> None:
    """EX1: what ONNX's own evaluator makes of an island is what eager PyTorch does; every result has a name of its own,
    the same value twice and an input among them; nothing of this machine is in the graph."""
    import torch

    from headrace.export import onnx_graph
    from headrace.export.stand_in import evaluated

    def run(self: Any, x: Any, output_1: Any) -> Any:
        a = torch.relu(x) @ self.weight
        return a, a, x, output_1 + 1, a.sum(), self.weight

    weight, x, n = randn(4, 4), randn(2, 4), torch.arange(3)
    model = module(run, weight=weight)
    program = torch.export.export(model, (x, n))
    made = onnx_graph.to_onnx(program)
    origins = onnx_graph.origins(made)
    assert [o.name for o in made.graph.output] == [f"output_{i}" for i in range(6)]
    assert len({i.name for i in made.graph.input} | {o.name for o in made.graph.output}) == 8
    raw = made.SerializeToString()
    assert str(Path(__file__).parent).encode() not in raw and b"headrace node" not in raw
    assert set(origins.values()) >= {n.name for n in program.graph.nodes if n.op == "call_function"} - {
        "alias"
    }
    given = {i.name: v.numpy() for i, v in zip(made.graph.input, (x, n), strict=True)}
    for got, want in zip(evaluated(raw, given), model(x, n), strict=True):
        torch.testing.assert_close(torch.tensor(got), want, rtol=1e-5, atol=1e-5)
    # Half of the precision is another answer, of the same dtypes.
    low = onnx_graph.to_onnx(program, "float16")
    onnx_graph.origins(low)
    answers = evaluated(low.SerializeToString(), given)
    apart = abs(torch.tensor(answers[0]) - model(x, n)[0]).max()
    assert answers[0].dtype == "float32" and 0 < apart < 1e-2, apart


@case
def quantized_operators_stay_as_they_are(folder: Path) -> None:
    """EX1: int8 weights and their scales go into the engine; a zero point that is not zero is refused by name."""
    import torch

    from headrace.export import Xnnpack

    ops = torch.ops.quantized_decomposed

    def run(self: Any, x: Any) -> Any:
        q = ops.quantize_per_tensor.default(x, 0.05, self.zero, -128, 127, torch.int8)
        x = ops.dequantize_per_tensor.default(q, 0.05, self.zero, -128, 127, torch.int8)
        w = ops.dequantize_per_tensor.default(self.weight, 0.02, 0, -128, 127, torch.int8)
        return torch.relu(x @ w)

    import executorch.exir.passes.quantize_io_pass  # noqa: F401  registers the operators

    weight = (randn(8, 4) * 30).round().clamp(-128, 127).to(torch.int8)
    whose = {}
    for zero in (0, 3):
        model = module(run, weight=weight)
        model.zero = zero
        made = exported(folder, model, (randn(2, 8),), [trt(), Xnnpack()], cache=False)
        whose[zero] = {n.operator + str(i): (n.delegate, n.why) for i, n in enumerate(made.split)}
        if zero == 0:
            assert {d for d, _ in whose[0].values()} == {"TensorRT"}, whose
            (blob,) = blobs(made)
            assert [b.dtype for b in blob.bindings] == ["float32", "float32"]
    asymmetric = [why for op, (d, why) in whose[3].items() if d != "TensorRT" and "quantize" in op]
    assert asymmetric and any("TensorRT's" in why for why in asymmetric), whose[3]


@case
def eight_bit_floats_are_taken_where_the_parser_takes_them(folder: Path) -> None:
    """EX1, EX6: weights in fp8 go into the engine; a value that is made one in between is refused in TensorRT's words, node by
    node."""
    import torch

    def stored(self: Any, x: Any) -> Any:
        return x @ self.weight.to(torch.float32) * 0.5

    model = module(stored, weight=randn(8, 4).to(torch.float8_e4m3fn))
    made = exported(folder, model, (randn(2, 8),), [trt()], cache=False, verify=False)
    assert {n.delegate for n in made.split} == {"TensorRT"}, made.split
    (blob,) = blobs(made)
    assert [b.dtype for b in blob.bindings] == ["float32", "float32"]

    def between(self: Any, x: Any) -> Any:
        return torch.relu((x * 2).to(torch.float8_e4m3fn).to(torch.float32)) * 0.5

    made = exported(folder, module(between), (randn(2, 8),), [trt()], cache=False, verify=False)
    refused = {n.name: n.why for n in made.split if n.delegate != "TensorRT"}
    assert len(refused) == 2 and all("has datatype FP8" in why for why in refused.values()), refused


# -------------------- verification


@case
def a_wrong_graph_is_not_handed_over(folder: Path) -> None:
    """EX4: the largest deviation, by output; and a program that is right says what did not run."""
    import torch

    from headrace.export import onnx_graph

    def run(self: Any, x: Any) -> Any:
        return torch.cumsum(x, 0), torch.relu(x)

    model, x = module(run), (randn(4, 8),)
    made = exported(folder, model, x, [trt(operators=["aten.relu"])], verify=verify())
    text = str(made.verification)
    assert made.verification.devices == ("cpu", "sim (schedule late)", "sim (schedule 7)"), text
    for part in (
        "TensorRT built 1 engine",
        "did not run",
        "evaluated by onnx.reference",
        "not run as it is (cuda",
    ):
        assert part in text, text
    really = onnx_graph.to_onnx

    def wrong(program: Any, *args: Any) -> Any:
        graph = really(program, *args)
        for node in graph.graph.node:
            node.op_type = "Abs" if node.op_type == "Relu" else node.op_type
        return graph

    onnx_graph.to_onnx = wrong
    try:
        error = refused(folder, model, x, [trt(operators=["aten.relu"])], verify=verify())
    finally:
        onnx_graph.to_onnx = really
    assert "output 1, float32[4, 8]" in str(error) and "largest deviation of" in str(error), error


@case
def sizes_that_vary_and_state_are_verified(folder: Path) -> None:
    """EX4: an island in other sizes than the example's; one that advances the method's state; bfloat16."""
    import torch
    from torch.export import Dim

    from headrace.export import Xnnpack
    from tests.programs.split import Layers

    dims = {"x": {0: Dim("batch", min=1, max=4), 1: Dim("length", min=2, max=6)}}
    made = exported(
        folder, Layers(1).eval(), (randn(2, 5, 16),), [trt()], dynamic_shapes=dims, verify=verify()
    )
    assert made.verification.calls == 2 and made.verification.deviations[0].largest < 1e-4

    def run(self: Any, x: Any) -> Any:
        self.count.add_(1.0)
        return (x * self.count).bfloat16() + self.narrow, torch.cumsum(x, 0)

    model = module(run, count=torch.zeros(1), narrow=randn(4).bfloat16())
    made = exported(folder, model, (randn(3, 4),), [trt(), Xnnpack()], verify=verify())
    assert {n.delegate for n in made.split if n.operator.startswith("aten.add")} == {"TensorRT"}
    assert len(made.verification.deviations) == 2


@case
def a_vision_model_and_a_transformer_over_tensorrt_and_aotinductor(folder: Path) -> None:
    """EX1, EX4, EX5: the digits' network and the example's transformer for a GPU, verified as the same split."""
    import torch

    from examples.digits.train import Network
    from examples.split_models import Transformer
    from headrace.export import Aoti

    torch.manual_seed(0)
    for name, model, x, claims in (
        ("digits", Network().eval(), torch.rand(2, 1, 8, 8) * 16, {"operators": ["aten.conv2d", "aten.relu", "aten.linear"]}),
        ("transformer", Transformer().eval(), torch.randint(0, 64, (1, 12)), {"modules": ["blocks.*"]}),
    ):  # fmt: skip
        there = folder / name
        there.mkdir()
        made = exported(there, model, (x,), [trt(**claims), Aoti()], target="cuda:sm_86", verify=verify())
        assert set(who(made.split).values()) == {"TensorRT", "Aoti"}, str(made.split)
        delegates = [i.delegate for i in made.file["forward"].islands]
        assert {"TensorRTBackend", "CudaBackend"} == set(delegates)
        assert all(blob.built.capabilities == ("8.6",) for blob in blobs(made))
        assert "did not run" in made.verification.note and made.verification.calls == 2
        assert all(d.largest < 1e-3 for d in made.verification.deviations)


if __name__ == "__main__":
    case.main()
