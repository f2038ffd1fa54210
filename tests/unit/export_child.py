"""What the tests of export ask of a process that has torch: each function below is one case.

See ``cases.py``. What tests.programs exports is there before; what is compiled here is small.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import Cases

case = Cases()


# -------------------- decompositions against eager PyTorch


def close(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    import torch

    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@case
def convolutions_of_every_kind(folder: Path) -> None:
    import torch
    import torch.nn.functional as F

    from headrace.export.decompositions import convolution

    torch.manual_seed(0)
    forms = {
        1: (F.conv1d, F.conv_transpose1d),
        2: (F.conv2d, F.conv_transpose2d),
        3: (F.conv3d, F.conv_transpose3d),
    }
    choices = itertools.product((1, 2, 3), (1, 2), (0, 1, 2), (1, 2), (1, 2, 4), (1, 3))
    done = 0
    for n, stride, padding, dilation, groups, kernel in choices:
        direct, transposed = forms[n]
        x, bias = torch.randn(2, 4, *[9, 8, 7][:n]), torch.randn(8)
        weight = torch.randn(8, 4 // groups, *[kernel] * n)
        args = [stride] * n, [padding] * n, [dilation] * n
        close(
            convolution(x, weight, bias, *args, False, [0] * n, groups),
            direct(x, weight, bias, stride, padding, dilation, groups),
        )
        weight = torch.randn(4, 8 // groups, *[kernel] * n)
        for extra in range(max(stride, dilation)):
            if all(
                (s - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 > 0 for s in x.shape[2:]
            ):
                close(
                    convolution(x, weight, bias, *args, True, [extra] * n, groups),
                    transposed(x, weight, bias, stride, padding, extra, groups, dilation),
                )
                done += 1
        done += 1
    assert done > 300


@case
def convolutions_of_one_image_and_of_half_precision(folder: Path) -> None:
    import torch
    import torch.nn.functional as F

    from headrace.export.decompositions import convolution

    x, weight = torch.randn(3, 6, 5), torch.randn(4, 3, 3, 3)
    close(convolution(x, weight, None, [1], [1], [1], False, [0], 1), F.conv2d(x, weight, padding=1))
    half, small = x.unsqueeze(0).bfloat16(), weight.bfloat16()
    got = convolution(half, small, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert got.dtype == torch.bfloat16
    close(got.float(), F.conv2d(half.float(), small.float(), padding=1), 2e-2)


@case
def products_in_every_dtype(folder: Path) -> None:
    import torch

    from headrace.export import decompositions as d

    for dtype, tolerance in (
        (torch.float32, 1e-5),
        (torch.float64, 1e-12),
        (torch.float16, 2e-3),
        (torch.int64, 0),
    ):
        a, b, c = ((torch.randn(*s) * 3).to(dtype) for s in ((5, 7), (7, 4), (5, 4)))
        close(d.mm(a, b), a @ b, tolerance)
        close(d.bmm(a.expand(2, 5, 7), b.expand(2, 7, 4)), (a @ b).expand(2, 5, 4), tolerance)
        close(d.addmm(c, a, b, beta=2, alpha=3), torch.addmm(c, a, b, beta=2, alpha=3), tolerance * 10)
        if dtype.is_floating_point:
            close(d.linear(a[0], b.t(), c[0]), torch.nn.functional.linear(a[0], b.t(), c[0]), tolerance)
    nothing = torch.full((5, 4), math.nan)
    close(d.addmm(nothing, torch.ones(5, 7), torch.ones(7, 4), beta=0), torch.full((5, 4), 7.0))


@case
def sums_along_a_dimension(folder: Path) -> None:
    import torch

    from headrace.export.decompositions import cumsum

    x = torch.randn(3, 5, 4)
    for dim in (0, 1, -1):
        close(cumsum(x, dim), x.cumsum(dim))
    close(cumsum(x > 0, 1), (x > 0).cumsum(1))
    close(cumsum(x.half(), 1, dtype=torch.float32), x.half().cumsum(1, dtype=torch.float32))
    close(cumsum(torch.tensor(2.0), 0), torch.tensor(2.0))


@case
def attention_of_every_kind(folder: Path) -> None:
    import torch
    import torch.nn.functional as F

    from headrace.export.decompositions import attention

    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    seen = torch.rand(6, 5) > 0.5
    seen[2] = False
    kinds: list[dict[str, Any]] = [{}, {"attn_mask": seen}, {"attn_mask": torch.randn(6, 5)}]
    kinds += [{"is_causal": True}, {"scale": 0.3}]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        args = [t.to(dtype) for t in (q, k, v)]
        for kind in kinds:
            mask = kind.get("attn_mask")
            if mask is not None and mask.is_floating_point():
                kind = {"attn_mask": mask.to(dtype)}
            wanted = F.scaled_dot_product_attention(*args, enable_gqa=True, **kind)
            got = attention(*args, enable_gqa=True, **kind)
            assert got.dtype == dtype
            close(got, wanted, tolerance)


# -------------------- shape expressions


@case
def sizes_are_functions_of_the_inputs(folder: Path) -> None:
    """Random expressions, as text, give what SymPy gives."""
    import sympy
    import torch
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._sympy.functions import FloorDiv, Mod

    from headrace.export.shapes import Shapes

    environment = ShapeEnv()
    a, b = sympy.Symbol("s77", positive=True, integer=True), sympy.Symbol("s3", positive=True, integer=True)

    def size(e: Any) -> Any:
        return torch.SymInt(torch.fx.experimental.sym_node.SymNode(sympy.sympify(e), environment, int, 5))

    given = [[size(a), 4], [7, size(2 * b + 3)]]
    expressions = [
        a,
        2 * a + b,
        a * b - 3,
        FloorDiv(a, 2),
        FloorDiv(a + b, 3) + 1,
        Mod(a, 5),
        sympy.Max(a, b),
        sympy.Min(a, 4, b),
        a**2 + b,
        (a + 1) / 2 + sympy.Rational(1, 2),
        sympy.floor(a / 2) - a,
    ]
    shapes = Shapes(given, [[size(e) for e in expressions], [6]])
    assert shapes.symbols == {"s0": (0, 0), "s1": (1, 1)} and shapes.outputs[1] == [6]
    for x, y in itertools.product((1, 2, 5, 12), (1, 3, 8)):
        for e, text in zip(expressions, shapes.outputs[0], strict=True):
            exact = e.subs({a: x, b: y})
            if exact.is_integer:
                assert eval(str(text), {"s0": x, "s1": 2 * y + 3, "min": min, "max": max}) == exact, (e, text)
    for wrong in (sympy.Symbol("u0"), sympy.log(a)):
        try:
            Shapes(given, [[size(wrong)]])
        except ValueError:
            continue
        raise AssertionError(f"{wrong} was taken")


# -------------------- refusals


def refused(folder: Path, model: Any, inputs: Any, **options: Any) -> Any:
    """The error; nothing may be written, and what was there stays."""
    import headrace.export
    from headrace.errors import HeadraceError

    path = folder / "refused.pte"
    path.write_bytes(b"older")
    before = sorted(folder.iterdir())
    try:
        headrace.export.export(model, inputs, path=path, **options)
    except HeadraceError as error:
        assert path.read_bytes() == b"older" and sorted(folder.iterdir()) == before
        return error
    raise AssertionError("was exported")


def module(function: Callable[..., Any], **buffers: Any) -> Any:
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in buffers.items():
                self.register_buffer(name, value)

        def forward(self, x: Any) -> Any:
            return function(self, x)

    return Module().eval()


@case
def operators_that_need_libtorch_are_named(folder: Path) -> None:
    import torch

    def forward(self: Any, x: Any) -> Any:
        best = torch.relu(x).topk(3)[0]
        return best.sort()[0] + 1.0

    error = refused(folder, module(forward), (torch.randn(5, 8),))
    assert type(error).__name__ == "ExportError" and error.node == "topk", repr(error)
    message = str(error)
    assert "topk (aten.topk.default of float32[5, 8], at " in message, message
    assert "sort (aten.sort.default of float32[5, 3], at " in message, message
    assert "export_child.py" in message and "best = torch.relu(x).topk(3)[0]" in message, message


@case
def sizes_that_depend_on_data_are_refused(folder: Path) -> None:
    import torch

    error = refused(folder, module(lambda self, x: x.nonzero() * 2), (torch.randn(5, 8),))
    assert type(error).__name__ == "ExportError" and error.node, repr(error)
    assert "sizes of results that the sizes of inputs determine" in str(error), error


@case
def options_are_checked(folder: Path) -> None:
    import torch

    good, x = module(lambda self, x: x + 1), torch.randn(2)
    state = module(lambda self, x: self.count.add_(1) + x, count=torch.zeros(2))
    for kind, text, model, inputs, options in (
        (
            "OptionError",
            "the arguments of GPU code lie on the GPU",
            good,
            (x,),
            {"target": "cuda:sm_90", "device": None},
        ),
        ("OptionError", "'host', 'host:LEVEL' or 'cuda:ARCHITECTURE'", good, (x,), {"target": "tpu"}),
        ("OptionError", "x86-64-v3", good, (x,), {"target": "host:i686"}),
        ("OptionError", "'inside' or 'beside'", good, (x,), {"weights": "away"}),
        ("OptionError", "expected a device", good, (x,), {"device": None, "resident": True}),
        ("OptionError", "(x,) for one", good, x, {}),
        ("OptionError", "with the methods", {"a": good}, (x,), {}),
        ("OptionError", "a Module or an ExportedProgram", "model", (x,), {}),
        ("ExportError", "model.eval()", module(lambda self, x: x + 1).train(), (x,), {}),
        ("ExportError", "torch.export to trace", module(lambda self, x: x.tolist()[0]), ("x",), {}),
    ):
        error = refused(folder, model, inputs, **options)
        assert type(error).__name__ == kind and text in str(error), (kind, text, repr(error))
    error = refused(folder, state, (x,), resident=True)
    assert error.node == "b_count" and "without state" in str(error), repr(error)


# -------------------- checks of the result find what is wrong


def caught(call: Callable[[], Any], text: str) -> None:
    from headrace.errors import ExportError

    found = "nothing"
    try:
        call()
    except ExportError as error:
        found = str(error)
    assert text in found, found


@case
def wrong_constants_are_found(folder: Path) -> None:
    import torch

    from headrace.export.aoti import _check_source, _check_value
    from headrace.export.payload import Constant
    from headrace.export.target import Target

    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    storage = weight.t().contiguous().numpy().tobytes()
    right = Constant("w", "key", 48, 6, 0, 0, (3, 4), (1, 3))
    _check_value("forward", right, storage, weight)
    for wrong in (
        Constant("w", "key", 48, 6, 0, 0, (3, 4), (4, 1)),
        Constant("w", "key", 48, 6, 0, 0, (4, 3), (3, 1)),
        Constant("w", "key", 48, 3, 0, 0, (3, 4), (1, 3)),
    ):
        caught(lambda wrong=wrong: _check_value("forward", wrong, storage, weight), "the model's own bytes")
    changed = bytearray(storage)
    changed[5] ^= 1
    caught(lambda: _check_value("forward", right, bytes(changed), weight), "the model's own bytes")

    source = (
        "constants_info_[0].device_type = cached_torch_device_type_cpu;\n"
        'constants_info_[0].original_fqn = "w";\n'
    )
    host, gpu = Target(), Target.parse("cuda:sm_90")
    on_gpu = source.replace("_cpu", "_cuda")
    _check_source("forward", source, [right], host)
    _check_source("forward", on_gpu, [right], gpu)
    caught(lambda: _check_source("forward", source, [], host), "the library's constants to be")
    caught(lambda: _check_source("forward", on_gpu, [right], host), "expected it on the host")
    caught(lambda: _check_source("forward", source, [right], gpu), "expected it on the GPU")


@case
def unknown_symbols_are_found(folder: Path) -> None:
    import subprocess

    from headrace.export.aoti import _check_symbols
    from headrace.export.target import Target

    host, gpu = Target(), Target.parse("cuda:sm_90")
    for name, target, text in (
        ("aoti_torch_empty_strided", host, ""),
        ("aoti_torch_cpu_convolution", host, "aoti_torch_cpu_convolution"),
        ("cuLaunchKernel", host, "cuLaunchKernel"),
        ("cuLaunchKernel", gpu, ""),
        ("cudaGraphLaunch", gpu, "cudaGraphLaunch"),
    ):
        library = folder / f"{name}.so"
        code = f"extern void {name}(void); void run(void) {{ {name}(); }}"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=code, text=True, check=True
        )
        data = library.read_bytes()
        library.unlink()
        if text:
            caught(lambda data=data, target=target: _check_symbols("forward", data, target), text)
        else:
            _check_symbols("forward", data, target)


def exported_constants() -> tuple[Path, Path]:
    from tests.programs import AOTI

    return AOTI.folder() / "constants.pte", AOTI.folder() / "constants.ptd"


@case
def constants_are_the_models(folder: Path) -> None:
    """A strided, a tied, a scalar and a literal constant: what the file holds under each name is the model's."""
    import torch

    from headrace import pte
    from headrace.export import payload
    from tests.programs.aoti import Constants

    buffers = dict(Constants().named_buffers())
    path, data = exported_constants()
    raw, table = data.read_bytes(), pte.read_data(data)
    (island,) = pte.read(path)["forward"].islands
    start = island.payload_offset
    said = payload.decode(path.read_bytes()[start : start + island.payload_nbytes])
    found = {}
    for constant in said.constants:
        entry = table[constant.storage_key]
        flat = torch.frombuffer(
            bytearray(raw[entry.offset : entry.offset + entry.nbytes]), dtype=torch.float32
        )
        found[constant.fqn] = flat.as_strided(constant.sizes, constant.strides, constant.offset)
        assert constant.device == payload.CPU and constant.dtype == 6 and constant.nbytes == entry.nbytes
    for name in ("strided", "twin", "other_twin"):
        if name in found:
            assert torch.equal(found[name], buffers[name]), name
    assert "strided" in found and ("twin" in found or "other_twin" in found), sorted(found)
    assert len(table.entries) == len({c.storage_key for c in said.constants})


@case
def files_that_miss_what_they_name_are_found(folder: Path) -> None:
    """A byte changed in each kind of named data, and a data file left out."""
    from headrace import pte
    from headrace.export import program

    path, data = exported_constants()
    good = {path: path.read_bytes(), data: data.read_bytes()}
    program._check("constants.pte", good)
    entry = pte.read_data(data).entries[0]
    named = pte.read(path)
    library = named.segments[named.named_data[0].segment]
    for file, at in ((data, entry.offset), (path, library.offset + library.nbytes // 2)):
        changed = bytearray(good[file])
        changed[at] ^= 1
        caught(
            lambda file=file, changed=changed: program._check("m", {**good, file: bytes(changed)}),
            "got others",
        )
    caught(lambda: program._check("m", {path: good[path]}), "got none")


@case
def vector_functions_are_those_of_the_c_library(folder: Path) -> None:
    """Every one that a library may call by SLEEF's name, in both widths of element, against PyTorch."""
    import ctypes
    import subprocess

    import torch

    from headrace.export import vector_math

    code = ["#include <immintrin.h>", vector_math.source(256)]
    calls = []
    for table, binary in ((vector_math.UNARY, False), (vector_math.BINARY, True), (vector_math.ROUGH, False)):
        for name, (_, accuracy) in table.items():
            for letter, scalar, load in (("f", "float", "ps"), ("d", "double", "pd")):
                if table is vector_math.ROUGH and letter == "d":
                    continue
                width = 8 if letter == "f" else 4
                arguments = ", ".join(f"_mm256_loadu_{load}({a})" for a in ("x", "y")[: 1 + binary])
                entry = f"call_{name}{letter}{accuracy}"
                code.append(
                    f'extern "C" void {entry}(const {scalar}* x, const {scalar}* y, {scalar}* out) '
                    f"{{ _mm256_storeu_{load}(out, Sleef_{name}{letter}{width}{accuracy}({arguments})); }}"
                )
                calls.append((entry, name, binary, torch.float32 if letter == "f" else torch.float64))
    library = folder / "vectors.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O2", "-march=x86-64-v3", "-x", "c++", "-", "-o", str(library)],
        input="\n".join(code), text=True, check=True,
    )  # fmt: skip
    functions = ctypes.CDLL(str(library))
    library.unlink()
    assert len(calls) == 2 * (len(vector_math.UNARY) + len(vector_math.BINARY)) + len(vector_math.ROUGH)
    for entry, name, binary, dtype in calls:
        x = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0.25, 0.6, 0.8], dtype=dtype) + (name == "acosh")
        y = torch.tensor([0.4, -0.2, 0.3, 1.5, -0.7, 2.0, 0.9, 0.1], dtype=dtype)
        out = torch.zeros_like(x)
        getattr(functions, entry)(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y, out)))
        done = 8 if dtype == torch.float32 else 4
        wanted = getattr(torch, name)(x, y) if binary else getattr(torch, name)(x)
        torch.testing.assert_close(out[:done], wanted[:done], rtol=1e-6, atol=1e-6, msg=entry)
        assert not out[done:].any(), entry
    assert vector_math.source(1) == ""


@case
def what_every_library_has_is_compiled_once(folder: Path) -> None:
    """The functions by which a library is called, for two islands; both libraries have them."""
    import shlex
    import subprocess

    import torch
    from torch._inductor import codecache, cpp_builder

    import headrace.export
    from headrace import pte

    compile_really, headers = cpp_builder.run_compile_cmd, codecache._HEADER_DIR
    sources: list[str] = []

    def noted(command: str, cwd: str) -> None:
        words = shlex.split(command)
        sources.extend(
            Path(w).name.rpartition(".")[0].rpartition(".")[2] for w in words if w.endswith(".cpp")
        )
        compile_really(command, cwd)

    cpp_builder.run_compile_cmd, codecache._HEADER_DIR = noted, str(folder / "headers")
    try:
        for function in (torch.sin, torch.cos):
            model = module(lambda self, x, function=function: function(x))
            path = folder / "island.pte"
            headrace.export.export(model, (torch.rand(3),), path=path, verify=False, cache=False)
            data, (library,) = (
                path.read_bytes(),
                [e for e in pte.read(path).named_data if e.key.endswith("_so_blob")],
            )
            offset = pte.read(path).segments[library.segment].offset
            file = folder / "island.so"
            file.write_bytes(data[offset : offset + library.nbytes])
            named = subprocess.run(
                ["nm", "-D", "--defined-only", file], capture_output=True, text=True, check=True
            ).stdout
            for name in ("Create", "RunSingleThreaded", "GetNumConstants", "UpdateUserManagedConstantBuffer"):
                assert f" T AOTInductorModelContainer{name}\n" in named, named
            path.unlink(), file.unlink()
    finally:
        cpp_builder.run_compile_cmd, codecache._HEADER_DIR = compile_really, headers
    assert sources.count("wrapper") == 2 and sources.count("interface") == 1, sources


# -------------------- for a GPU


def exported_to(folder: Path, model: Any, inputs: Any, target: str) -> bytes:
    """The program, compiled with caches of its own below ``folder``."""
    import os

    import headrace.export

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    try:
        path = folder / "program.pte"
        # Compiled here and now, in a process that has no run time.
        headrace.export.export(model, inputs, path=path, target=target, verify=False, cache=False)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def process_state() -> dict[str, int]:
    """Whatever a compilation for a GPU could change in this process, by identity."""
    import os

    import torch
    import triton.backends
    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import codecache, config, cpp_builder, graph
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses import fake_tensor
    from torch.utils import cpp_extension

    places: dict[str, Any] = {
        "torch.cuda": vars(torch.cuda),
        "CudaInterface": vars(CudaInterface),
        "codecache": vars(codecache),
        "cpp_builder": vars(cpp_builder),
        "cpp_extension": vars(cpp_extension),
        "graph": vars(graph),
        "GraphLowering": vars(graph.GraphLowering),
        "PythonWrapperCodegen": vars(PythonWrapperCodegen),
        "joint_graph": vars(joint_graph),
        "fake_tensor": vars(fake_tensor),
        "backends": triton.backends.backends,
        "driver": vars(triton.runtime.driver),
    }
    found = {f"{place}.{name}": id(value) for place, names in places.items() for name, value in names.items()}
    found |= {f"environ.{name}": hash(value) for name, value in os.environ.items()}
    return found | {f"config.{name}": hash(repr(value)) for name, value in config.get_config_copy().items()}


@case
def a_compilation_for_a_gpu_leaves_nothing_behind(folder: Path) -> None:
    """A GPU, then the host, then plain torch; and the same bytes for the host as from a process that knows no GPU."""
    import torch

    from tests.programs import AOTI, CUDA_FEW
    from tests.programs.aoti import MODELS

    made = MODELS["mlp"]().methods["forward"]
    model, inputs = made.module.eval(), tuple(made.calls[0])
    # Imports, and what is there once it was used, come first.
    assert not torch.cuda.is_available()
    refused(folder, module(lambda self, x: torch.fft.rfft(x).real), (torch.randn(8),), target="cuda:sm_90")
    before = process_state()
    for_gpu = exported_to(folder, model, inputs, "cuda:sm_90")
    after = process_state()
    assert {k for k in before | after if before.get(k) != after.get(k)} == set()
    assert len(before) > 500
    for_host = exported_to(folder, model, inputs, "host")
    assert not torch.cuda.is_available() and not torch.utils._triton.has_triton()
    try:
        torch.zeros(1, device="cuda")
    except (AssertionError, RuntimeError):
        pass
    else:
        raise AssertionError("there is a GPU")
    close(torch.compile(model, backend="eager")(*inputs), model(*inputs))
    # Another process, another cache folder, another time: the same bytes.
    assert for_gpu == (CUDA_FEW.folder() / "mlp.pte").read_bytes()
    assert for_host == (AOTI.folder() / "mlp.pte").read_bytes()


@case
def operators_for_a_gpu_that_need_libtorch_are_named(folder: Path) -> None:
    import torch

    def transform(self: Any, x: Any) -> Any:
        return torch.fft.rfft(torch.relu(x)).real

    def noise(self: Any, x: Any) -> Any:
        return torch.relu(x) + torch.rand_like(x)

    def long_rows(self: Any, x: Any) -> Any:
        return torch.relu(x).flatten().sort()[0] + 1.0

    for function, node, operator, line in (
        (transform, "_fft_r2c", "aten._fft_r2c.default of float32[30, 20]", "torch.fft.rfft(torch.relu(x))"),
        (
            noise,
            "rand_like",
            "aten.rand_like.default of float32[30, 20]",
            "torch.relu(x) + torch.rand_like(x)",
        ),
        (long_rows, "sort", "aten.sort.default of float32[600]", "torch.relu(x).flatten().sort()[0]"),
    ):
        error = refused(folder, module(function), (torch.randn(30, 20),), target="cuda:sm_90")
        assert type(error).__name__ == "ExportError" and error.node == node, repr(error)
        message = str(error)
        assert "needs no libtorch" in message and operator in message and line in message, message


@case
def without_triton_it_is_named(folder: Path) -> None:
    import torch

    had = sys.modules["triton"]
    sys.modules["triton"] = None  # type: ignore[assignment]
    try:
        error = refused(
            folder, module(lambda self, x: x + 1.0), (torch.randn(3),), target="cuda:sm_80+sm_90+ptx"
        )
    finally:
        sys.modules["triton"] = had
    assert "no module 'triton'; pip install triton" in str(error), repr(error)


@case
def a_child_that_dies_is_an_error(folder: Path) -> None:
    """Whatever ends it: an exception, a signal, an exit; what it raises as ExportError arrives with its node."""
    import os
    import signal

    from headrace.errors import ExportError
    from headrace.export.child import in_child

    def named() -> None:
        raise ExportError("m, x: text", node="x")

    assert in_child("m", lambda: {"a": (1, b"2")}) == {"a": (1, b"2")}
    arrived: list[ExportError] = []
    try:
        in_child("m", named)
    except ExportError as error:
        arrived.append(error)
    assert [(str(e), e.node) for e in arrived] == [("m, x: text", "x")]
    caught(lambda: in_child("m", lambda: 1 / 0), "m: expected to compile, got ZeroDivisionError")
    caught(lambda: in_child("m", lambda: os.kill(os.getpid(), signal.SIGSEGV)), "got signal SIGSEGV")
    caught(lambda: in_child("m", lambda: os._exit(7)), "got exit status 7")
    changed = []
    in_child("m", lambda: changed.append(1))
    assert not changed


@case
def constants_for_a_gpu_are_the_models(folder: Path) -> None:
    """Each weight of the models in the file, by its name, and on the GPU; small ones are in the code."""
    import torch

    from headrace import pte
    from headrace.export import payload
    from tests.programs import CUDA_FEW
    from tests.programs.aoti import MODELS

    for name in ("mlp", "cnn", "transformer"):
        path = CUDA_FEW.folder() / f"{name}.pte"
        raw, file = path.read_bytes(), pte.read(path)
        model = MODELS[name]().methods["forward"].module
        wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        at = {d.key: file.segments[d.segment].offset for d in file.named_data}
        (island,) = file["forward"].islands
        said = payload.decode(raw[island.payload_offset :][: island.payload_nbytes])
        for constant in said.constants:
            assert constant.device == payload.CUDA
            storage = raw[at[constant.storage_key] :][: constant.nbytes]
            value = wanted.pop(constant.fqn).detach()
            flat = torch.frombuffer(bytearray(storage), dtype=value.dtype)
            assert torch.equal(flat.as_strided(constant.sizes, constant.strides, constant.offset), value)
        assert said.constants and all(v.dim() < 2 and v.numel() <= 8 for v in wanted.values()), list(wanted)


@case
def missing_code_is_found(folder: Path) -> None:
    """A kernel that is not there, one too many, one for another architecture, and none at all."""
    from headrace import pte
    from headrace.export.aoti import _check_code
    from headrace.export.target import Target
    from headrace.pte import fatbin
    from tests.programs import CUDA_FEW

    path = CUDA_FEW.folder() / "mlp.pte"
    raw, file = path.read_bytes(), pte.read(path)
    entry = next(d for d in file.named_data if d.key.endswith("_so_blob"))
    library = raw[file.segments[entry.segment].offset :][: entry.nbytes]
    count = len(list(fatbin.embedded(memoryview(library))))
    source = "".join(f'k = loadKernel(__triton_{i}_start, "k", 0);' for i in range(count))
    gpu = Target.parse("cuda:sm_90")
    assert count > 1
    _check_code("forward", library, source, gpu)
    without = library.replace(b"\x50\xed\x55\xba", b"\0\0\0\0")
    for wrong, of, target in (
        (without, source, gpu),
        (library, "", gpu),
        (library, 'loadKernel(__only_start, "k", 0);', gpu),
        (library, source, Target.parse("cuda:sm_80")),
        (library, source, Target.parse("cuda:sm_90+sm_80+ptx")),
    ):
        caught(lambda a=(wrong, of, target): _check_code("forward", *a), "expected the code of")


@case
def blocks_follow_the_size_of_the_product(folder: Path) -> None:
    """Small blocks for small products, large ones for large, and none that does not fit."""
    from headrace.export.tiles import SMALL, Block, Product, best

    blocks = [
        Block(32, 32, 16, 1, 2),
        Block(128, 128, 64, 3, 8),
        Block(16, 32, 32, 4, 2),
        Block(256, 256, 64, 4, 8),
    ]
    room = {"sms": 132, "block_nbytes": 227 << 10}
    assert blocks[best(Product(1, 4, 32, 64, 2), blocks, **room)].m == 16
    assert blocks[best(Product(1, 8192, 8192, 8192, 2), blocks, **room)].m == 128
    # 64 KB do not hold three stages of 128 by 128 by 64.
    assert blocks[best(Product(1, 8192, 8192, 8192, 2), blocks, sms=132, block_nbytes=64 << 10)].m == 32
    # Where none fits, the least.
    assert best(Product(1, 64, 64, 64, 8), blocks[3:], **room) == 0
    # Few results: as many blocks as keep the multiprocessors busy, in few steps.
    inductors = [
        Block(32, 32, 16, 1, 2),
        Block(32, 32, 128, 2, 4),
        Block(64, 64, 64, 3, 8),
        Block(128, 128, 64, 3, 4),
    ]
    every = [*inductors, *SMALL]
    for product, (m, n) in (
        (Product(1, 64, 256, 1024, 4), (16, 16)),
        (Product(4, 64, 64, 64, 2), (16, 16)),
        (Product(1, 64, 1024, 256, 2), (16, 32)),
        (Product(1, 2048, 1024, 1024, 2), (128, 128)),
    ):
        chosen = every[best(product, every, **room)]
        assert (chosen.m, chosen.n, chosen.k) == (m, n, 64), (product, chosen)


@case
def products_and_attention_for_a_gpu(folder: Path) -> None:
    """What Triton's templates do not take is written out; what they take stays."""
    import torch
    import torch.nn.functional as F

    from headrace.export import decompositions as d

    table = d.decompositions("cuda")
    a, b = torch.randint(9, (5, 7)), torch.randint(9, (7, 4))
    close(table[torch.ops.aten.mm.default](a, b), a @ b)
    assert table[torch.ops.aten.mm.default](a.float(), b.float()) is NotImplemented
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    attention = table[torch.ops.aten.scaled_dot_product_attention.default]
    for kind in ({}, {"is_causal": True}, {"attn_mask": torch.rand(6, 5) > 0.5, "scale": 0.3}):
        wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kind)
        close(attention(q, k, v, enable_gqa=True, **kind), wanted)
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 3)
    args = [2, 1], [1, 0], [1, 1], False, [0, 0], 2
    assert d.convolution_for_gpu(x, weight, None, *args) is NotImplemented
    args = [2, 1], [1, 0], [2, 1], False, [0, 0], 2
    close(d.convolution_for_gpu(x, weight, None, *args), F.conv2d(x, weight, None, [2, 1], [1, 0], [2, 1], 2))
    weight, bias = torch.randn(6, 4, 1, 1), torch.randn(6)
    args = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    close(d.convolution_for_gpu(x, weight, bias, *args), F.conv2d(x, weight, bias))
    for largest in (True, False):
        values, indices = d.topk(q, 3, 1, largest)
        close(values, q.topk(3, 1, largest)[0])
        close(q.gather(1, indices), values)


if __name__ == "__main__":
    case.main()
