"""The command line: parse and print.

Exit status: 0 done; 1 an answer differs from ``--expect``; 2 the command line or an input
is at fault; 3 the program, a delegate or a device is. ``audit``: 0 clean; 1 problems; 2 usage, or nothing to inspect.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import re
import sys
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

import headrace

from . import aoti, bench, doctor, pte, sdk
from .audit import command as audit
from .device import device as open_device
from .errors import HeadraceError, InputError, OptionError
from .export import command as export_command
from .ordering import record
from .program import Method, ValueInfo
from .pte import fatbin

__all__ = ["main"]

JSON_VERSION = 1
OK, DIFFERS, USAGE, FAILED = 0, 1, 2, 3

# Relative and absolute: what rounding in another order of operations may change.
TOLERANCE = {
    "float64": (1e-7, 1e-9),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "bfloat16": (2e-2, 1e-2),
}


def _print_json(command: str, body: dict[str, Any]) -> None:
    print(json.dumps(_finite({**body, "version": JSON_VERSION, "command": command}), default=_plain))


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


def _shape_text(info: ValueInfo) -> str:
    if info.kind != "tensor":
        return info.kind
    dims = ", ".join(str(high) if low == high else f"≤{high}" for low, high in info.bounds)
    return f"{info.dtype}[{dims}] on {info.device}"


# ---------------------------------------------------------------- doctor


def _doctor(args: argparse.Namespace) -> int:
    found = doctor.diagnose()
    if args.json:
        _print_json("doctor", found.as_dict())
        return OK
    rows = {
        "headrace": found.headrace,
        "python": f"{found.python}, NumPy {found.numpy}",
        "machine": found.machine,
        "engine": f"ExecuTorch {found.engine}, {found.engine_source} ({found.engine_folder})",
        "delegates": ", ".join(found.delegates) or "none",
        "kernels": str(found.kernels),
        "threads": str(found.threads),
    }
    if found.cuda.driver:
        rows["driver"] = f"CUDA {found.cuda.driver}"
        rows["partitions"] = found.cuda.partitions or "green contexts"
    for gpu in found.cuda.gpus:
        rows[gpu.device] = (
            f"{gpu.name}, compute capability {gpu.capability}, {gpu.sm_count} SMs, "
            f"{gpu.memory_nbytes / 2**30:.0f} GiB"
            + (f"; cannot be used: {gpu.problem}" if gpu.problem else "")
        )
    if found.cuda.missing:
        rows["no GPU"] = found.cuda.missing
    for key, value in rows.items():
        print(f"{key:10} {value}")
    return OK


# --------------------------------------------------------------- inspect


def _inspect(args: argparse.Namespace) -> int:
    if Path(args.file).suffix == ".ptd":
        return _inspect_data(args)
    file = pte.read(args.file)
    islands = aoti.read(args.file) if aoti.DELEGATE in file.delegates else ()
    if args.json:
        libraries = [{**asdict(i), "gpu_code": _gpu_code(args.file, i)} for i in islands]
        _print_json("inspect", {"file": args.file, "program": asdict(file), "aoti": libraries})
        return OK
    for method in file.methods:
        print(f"method {method.name}")
        for role, values in (("input", method.inputs), ("output", method.outputs)):
            for i, value in enumerate(values):
                print(f"  {role} {i}: {value}" + (f" '{value.name}'" if value.name else ""))
        for buffer in method.buffers:
            print(f"  planned buffer {buffer.memory_id}: {buffer.nbytes} bytes on {buffer.device}")
        print(f"  {len(method.instructions)} instructions, {len(method.islands)} islands")
        for step in method.instructions:
            target = step.target or ""
            island = next((i for i in method.islands if i.instruction == step.index), None)
            size = f", payload {island.payload_nbytes} bytes" if island else ""
            print(f"    {step.index:3} {step.kind:8} {target}{size}")
        for one in islands:
            if one.method == method.name:
                _print_aoti(args.file, one)
    if file.named_data:
        print(f"named data: {len(file.named_data)} entries")
    if keys := sorted({t.key for t in file.external}):
        print(f"needs data files with: {', '.join(keys)}")
    return OK


def _gpu_code(path: str, island: aoti.Island) -> list[str]:
    """The architectures of the GPU code in an island's library."""
    image = aoti.library(path, island.library_key) if island.target == "cuda" else None
    if image is None:
        return []
    found = [code.arch for part in fatbin.embedded(memoryview(image)) for code in fatbin.read(part).code]
    return sorted(set(found))


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"[0-9]{1,9}", version)]


def _print_aoti(path: str, island: aoti.Island) -> None:
    size = "not in this file" if island.library_nbytes is None else f"{island.library_nbytes} bytes"
    march = f", {island.march}" if island.march else ""
    print(f"  AOTInductor library of instruction {island.instruction}: for {island.target}{march}, {size}")
    if code := _gpu_code(path, island):
        print(f"    GPU code for {', '.join(code)}")
    if island.target == "cuda":
        print("    its kernels run on a GPU alone")
    for device in sorted({c.device for c in island.constants}):
        group = [c for c in island.constants if c.device == device]
        print(f"    {len(group)} constants on {device}, {sum(c.nbytes for c in group)} bytes")
    for constant in island.constants:
        print(f"      {constant.fqn}: {constant.dtype}{list(constant.shape)} on {constant.device}")
    print(f"    needs {', '.join(island.needed) or 'no library'}")
    newest: dict[tuple[str, str], str] = {}
    for library, version in island.versions:
        family = (library, version.partition("_")[0])
        newest[family] = max(newest.get(family, version), version, key=_numbers)
    for library in dict.fromkeys(library for library, _ in newest):
        print(f"      of {library}: {', '.join(v for (name, _), v in newest.items() if name == library)}")
    print(f"    calls {len(island.shims)} functions of headrace's: {', '.join(island.shims)}")
    for line in island.missing:
        print(f"    missing here: {line}")


def _inspect_data(args: argparse.Namespace) -> int:
    file = pte.read_data(args.file)
    if args.json:
        _print_json("inspect", {"file": args.file, "data": asdict(file)})
        return OK
    for entry in file.entries:
        shape = f"{entry.dtype}{list(entry.shape or ())}" if entry.dtype else "bytes"
        print(f"{entry.key}: {shape}, {entry.nbytes} bytes")
    return OK


# ------------------------------------------------------------------- run


def _made_up(info: ValueInfo, rng: np.random.Generator | None) -> Any:
    """An input of the greatest shape: ones, or random numbers; ints stay 0 or 1, so that they index."""
    if info.kind == "none":
        return None
    if info.kind != "tensor":
        raise InputError(
            f"--ones and --random: expected a method with tensors only, got an input of kind {info.kind}"
        )
    shape = tuple(high for _, high in info.bounds)
    dtype = "float32" if info.dtype == "bfloat16" else info.dtype
    if rng is None:
        values = np.ones(shape, dtype)
    elif np.dtype(dtype).kind == "f":
        values = rng.standard_normal(shape).astype(dtype)
    else:
        values = rng.integers(0, 2, shape).astype(dtype)
    return headrace.Buffer.from_float32(values) if info.dtype == "bfloat16" else values


def _read(name: str, expected: str) -> Any:
    """The array that a file holds, or a list of those of an archive; an InputError whatever is wrong."""
    try:
        with open(name, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, NpzFile):
                return loaded
            arrays = [loaded[key] for key in loaded.files]
            if others := [
                k for k, a in zip(loaded.files, arrays, strict=True) if not isinstance(a, np.ndarray)
            ]:
                raise ValueError(f"an archive whose member {others[0]!r} is no array")
            return arrays
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(f"{name}: expected {expected}, got: {e}") from None


def _inputs(args: argparse.Namespace, method: Method) -> list[Any]:
    if args.input:
        arrays: list[Any] = []
        for i, name in enumerate(args.input):
            array = _read(name, "an array written by numpy.save")
            if isinstance(array, list):
                raise InputError(f"{name}: expected an array written by numpy.save, got an archive of arrays")
            narrow = (
                i < len(method.inputs) and method.inputs[i].dtype == "bfloat16" and array.dtype == "float32"
            )
            arrays.append(headrace.Buffer.from_float32(array) if narrow else array)
        return arrays
    if method.inputs and not (args.ones or args.random is not None):
        raise InputError(
            f"{method.name}: expected {len(method.inputs)} inputs, got none; give --input FILE.npy for each, "
            "--ones or --random SEED"
        )
    rng = np.random.default_rng(args.random) if args.random is not None else None
    return [_made_up(info, rng) for info in method.inputs]


def _as_array(output: Any) -> np.ndarray[Any, Any]:
    if not isinstance(output, headrace.Buffer):
        return np.asarray(output)
    array: np.ndarray[Any, Any] = output.float32() if output.dtype == "bfloat16" else output.numpy()
    return array


def _summary(output: Any) -> str:
    if output is None or isinstance(output, bool | int | float | str):
        return f"{output!r}"
    array = _as_array(output)
    if array.size == 0:
        return f"{list(array.shape)}: empty"
    least, most, mean = array.min(), array.max(), array.mean(dtype=np.float64)
    if array.dtype.kind in "biu":
        return f"{list(array.shape)}: min {least}, max {most}, mean {mean:.6g}"
    return f"{list(array.shape)}: min {least:.6g}, max {most:.6g}, mean {mean:.6g}"


def _deviation(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    """The largest difference of two elements; infinite where just one of them is not a number."""
    if got.size == 0:
        return 0.0
    if got.dtype.kind in "biu" and want.dtype.kind in "biu":
        # Exact: int64 has numbers that no float64 tells apart.
        pairs = zip(got.ravel().tolist(), want.ravel().tolist(), strict=True)
        return float(max(abs(int(a) - int(b)) for a, b in pairs))
    a, b = got.astype(np.float64), want.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
    return float(np.where(np.isnan(apart), np.inf, apart).max())


def _equal(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], rtol: float, atol: float) -> bool:
    if rtol == 0 and atol == 0:
        return np.array_equal(got, want, equal_nan=got.dtype.kind == "f" and want.dtype.kind == "f")
    return np.allclose(got.astype(np.float64), want.astype(np.float64), rtol, atol, equal_nan=True)


def _compare(args: argparse.Namespace, method: Method, outputs: Sequence[Any]) -> list[dict[str, Any]]:
    """Each output against the file's array of its position: exact shape, every value."""
    wanted = _read(args.expect, "arrays written by numpy.savez")
    if not isinstance(wanted, list):
        raise InputError(f"{args.expect}: expected arrays written by numpy.savez, got a single array")
    given = [i for i, output in enumerate(outputs) if output is not None]
    if len(wanted) != len(given):
        raise InputError(
            f"{args.expect}: expected {len(given)} arrays, one for each output that is not None, "
            f"got {len(wanted)}"
        )
    rows = []
    for i, want in zip(given, wanted, strict=True):
        got, info = _as_array(outputs[i]), method.outputs[i]
        rtol, atol = TOLERANCE.get(info.dtype, (0.0, 0.0))
        rtol = rtol if args.rtol is None else args.rtol
        atol = atol if args.atol is None else args.atol
        row: dict[str, Any] = {
            "output": i,
            "rtol": rtol,
            "atol": atol,
            "shape": got.shape,
            "expected_shape": want.shape,
        }
        if got.dtype.kind not in "biuf" or want.dtype.kind not in "biuf":
            raise InputError(
                f"{args.expect}: expected numbers to compare output {i} with, got {want.dtype} beside {got.dtype}"
            )
        if got.shape != want.shape:
            row |= {"equal": False, "largest_deviation": None}
        else:
            row |= {"equal": _equal(got, want, rtol, atol), "largest_deviation": _deviation(got, want)}
        rows.append(row)
    return rows


def _device(args: argparse.Namespace) -> Any:
    """The device of --device and --schedule; None where neither was given."""
    if args.schedule is None:
        return args.device
    name = args.device or "sim"
    if not name.startswith("sim"):
        raise OptionError(f"--schedule: expected a simulated device, got --device {name}")
    # At most 18 digits: any seed of 64 bits has a twin among them, and Python reads no number of thousands.
    seed = re.fullmatch(r"-?[0-9]{1,18}", args.schedule)
    return open_device(name, schedule=int(args.schedule) if seed else args.schedule)


def _lane(lane: Any, args: argparse.Namespace) -> dict[str, int]:
    """What was asked for and what was granted; empty where there is no lane."""
    if lane is None:
        return {}
    return {"asked": args.green_context_sms, "granted": lane.sm_count, "total": lane.device.sm_count}


def _import(modules: Sequence[str]) -> None:
    """Import modules that define delegates; the current folder counts, as it does for ``python -m``."""
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as e:  # the module's own code runs
            raise OptionError(
                f"--import {module}: expected a module that can be imported, got {type(e).__name__}: {e}"
            ) from e


def _run(args: argparse.Namespace) -> int:
    _import(args.modules)
    if args.threads is not None:
        headrace.set_num_threads(args.threads)
    if args.random is not None and args.random < 0:
        raise OptionError(f"--random: expected a seed of 0 or more, got {args.random}")
    for option, value in (("--rtol", args.rtol), ("--atol", args.atol)):
        if value is not None and not 0 <= value < math.inf:
            raise OptionError(f"{option}: expected a finite number of 0 or more, got {value}")
    if args.repeat < 1:
        raise OptionError(f"--repeat: expected 1 or more, got {args.repeat}")
    device, lane = _device(args), None
    if args.green_context_sms is not None:
        if not 1 <= args.green_context_sms < 2**31:
            raise OptionError(f"--green-context-sms: expected 1 or more, got {args.green_context_sms}")
        device = open_device(device or "cuda:0") if device is None or isinstance(device, str) else device
        lane = device.partition(sms=args.green_context_sms)
    with headrace.load(args.file, data=args.data, device=device, lane=lane) as program:
        name = program.methods[0] if args.method is None else args.method
        if name not in program:
            raise InputError(f"--method: expected one of {', '.join(program.methods)}, got {name!r}")
        method = program[name]
        inputs = _inputs(args, method)
        times = []
        recorded = record() if args.check_ordering or args.trace else None
        with contextlib.nullcontext() if recorded is None else recorded:
            graph = method.capture(*inputs) if args.graph else None
            run = method if graph is None else graph.replay
            for _ in range(args.repeat):
                began = time.perf_counter()
                outputs = run(*inputs)
                times.append(time.perf_counter() - began)
        if recorded is not None and args.trace:
            recorded.trace(args.trace)
        ordering = recorded.check() if recorded is not None and args.check_ordering else None
        compared = _compare(args, method, outputs) if args.expect else []
        if args.output:
            folder = Path(args.output)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for i, output in enumerate(outputs):
                    if output is not None:
                        np.save(folder / f"out{i}.npy", _as_array(output), allow_pickle=False)
            except OSError as e:
                raise InputError(f"--output: expected a folder that can be written, got: {e}") from None
        different = [row for row in compared if not row["equal"]]
        median_us = sorted(times)[len(times) // 2] * 1e6
        planned = [
            {"method": use.method, "device": use.device, "nbytes": use.nbytes}
            for use in program.memory().uses
            if use.what == "planned"
        ]
        if args.json:
            _print_json(
                "run",
                {
                    "file": args.file,
                    "method": name,
                    "device": method.device.name,
                    "islands": [asdict(i) for i in method.islands],
                    "outputs": [
                        asdict(info) | {"actual": _as_array(o).shape}
                        for info, o in zip(method.outputs, outputs, strict=True)
                    ],
                    "compared": compared,
                    "calls": args.repeat,
                    "median_us": median_us,
                    "ordering": asdict(ordering) if ordering else None,
                    "graph": asdict(graph.stats) if graph else None,
                    "planned": planned,
                    "lane": _lane(lane, args),
                },
            )
            return DIFFERS if different else OK
        print(
            f"{args.file}, method {name} on {method.device.name}: "
            f"{', '.join(i.delegate for i in method.islands) or 'CPU kernels only'}"
        )
        if lane is not None:
            print("  lane: {granted} SMs of {total} granted, {asked} asked for".format(**_lane(lane, args)))
            for use in planned:
                print("  planned memory of {method}: {nbytes} bytes on {device}".format(**use))
        for i, (info, output) in enumerate(zip(method.outputs, outputs, strict=True)):
            print(f"  output {i}: {_shape_text(info)}, got {_summary(output)}")
        for row in compared:
            verdict = "equal" if row["equal"] else "DIFFERENT"
            detail = (
                f"shape {list(row['shape'])} instead of {list(row['expected_shape'])}"
                if row["largest_deviation"] is None
                else f"largest deviation {row['largest_deviation']:.3g}"
            )
            print(
                f"  output {row['output']}: {verdict}, {detail} (tolerance {row['rtol']:g} relative + {row['atol']:g})"
            )
        if graph:
            print(f"  graph: {len(method.islands)} islands in one launch, {graph.stats.memory_nbytes} bytes")
        if args.repeat > 1:
            print(f"  {args.repeat} {'replays' if graph else 'calls'}, median {median_us:.1f} µs")
        if ordering:
            print(f"  order: {ordering.accesses} accesses in {ordering.operations} operations, no conflicts")
            for unseen in ordering.unseen:
                print(f"  order: not seen: {unseen}")
        return DIFFERS if different else OK


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="modules",
        metavar="MODULE",
        help="a Python module that defines delegates; may be repeated",
    )


def _bench(args: argparse.Namespace) -> int:
    _import(args.modules)
    rng = np.random.default_rng(0)
    found = bench.measure(args, lambda method: [_made_up(info, rng) for info in method.inputs])
    if args.json:
        _print_json("bench", {"device": args.device, "calls": args.calls, **found})
    else:
        print(bench.table(found))
    return DIFFERS if "proposal" in found and found["proposal"]["lanes"] is None else OK


# ------------------------------------------------------------------- sdk


def _sdk(args: argparse.Namespace) -> int:
    folders = {
        "cmake_dir": sdk.cmake_dir(),
        "include_dir": sdk.include_dir(),
        "library_dir": sdk.library_dir(),
    }
    asked = [name for name in folders if getattr(args, name)] or list(folders)
    if args.json:
        _print_json("sdk", {name: folders[name] for name in asked})
        return OK
    for name in asked:
        # One alone is printed bare, for a command substitution.
        print(folders[name] if len(asked) == 1 else f"{name:12} {folders[name]}")
    return OK


# ---------------------------------------------------------------- export


def _export(args: argparse.Namespace) -> int:
    module, _, _ = args.model.partition(":")
    _import([module])
    exported = export_command.run(args)
    if args.json:
        _print_json("export", export_command.described(exported))
        return OK
    print(exported.split)
    print(exported.verification or "not verified")
    for path in (exported.path, *exported.data):
        print(f"{path}: {path.stat().st_size} bytes")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace", description=headrace.__doc__, epilog=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("doctor", help="what this installation has and lacks")
    one.set_defaults(run=_doctor)

    one = commands.add_parser("inspect", help="what a .pte or .ptd file holds; runs nothing of it")
    one.add_argument("file", metavar="FILE")
    one.set_defaults(run=_inspect)

    one = commands.add_parser("run", help="run a method of a program")
    one.add_argument("file", metavar="FILE")
    one.add_argument("--method", help="the method's name (default: the first)")
    one.add_argument(
        "--data", action="append", default=[], metavar="FILE.ptd", help="a data file; may be repeated"
    )
    given = one.add_mutually_exclusive_group()
    given.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="FILE.npy",
        help="an input, in order; may be repeated (float32 for bfloat16)",
    )
    given.add_argument("--ones", action="store_true", help="inputs of ones, of the greatest shape")
    given.add_argument("--random", type=int, metavar="SEED", help="random inputs, of the greatest shape")
    one.add_argument(
        "--expect", metavar="FILE.npz", help="compare every output, in order, with the file's arrays"
    )
    one.add_argument("--rtol", type=float, help="relative tolerance of --expect (default: by dtype)")
    one.add_argument("--atol", type=float, help="absolute tolerance of --expect (default: by dtype)")
    one.add_argument("--repeat", type=int, default=1, metavar="N", help="calls, or replays")
    one.add_argument(
        "--graph",
        action="store_true",
        help="capture the method as one graph first, which is a step too; replay it",
    )
    one.add_argument(
        "--output",
        metavar="DIR",
        help="write outputs there as out0.npy, … (bfloat16 as float32, None not at all)",
    )
    one.add_argument("--threads", type=int, metavar="N", help="threads of the CPU kernels and XNNPACK")
    one.add_argument(
        "--device", help="cpu, sim or cuda:N (default: cpu, or cuda:0 for a program with device memory)"
    )
    one.add_argument(
        "--schedule", metavar="eager|late|SEED", help="run on a simulated device, with its work in this order"
    )
    one.add_argument(
        "--green-context-sms",
        type=int,
        metavar="N",
        help="run in a lane of at least N multiprocessors (default device: cuda:0); print what was granted, and the "
        "planned memory",
    )
    one.add_argument(
        "--check-ordering",
        action="store_true",
        help="record the calls; fail where nothing orders two accesses to one buffer",
    )
    one.add_argument("--trace", metavar="FILE", help="record the calls; write a trace that Perfetto opens")
    _add_import(one)
    one.set_defaults(run=_run)

    one = commands.add_parser("bench", help="latencies of programs side by side, in lanes and without them")
    bench.add_arguments(one)
    _add_import(one)
    one.set_defaults(run=_bench)

    one = commands.add_parser("sdk", help="the folders of the C++ SDK; one alone is printed bare")
    one.add_argument("--cmake-dir", action="store_true", help="for CMake: -Dheadrace_DIR=…")
    one.add_argument("--include-dir", action="store_true", help="for the compiler: -I…")
    one.add_argument("--library-dir", action="store_true", help="for the linker: -L…")
    one.set_defaults(run=_sdk)
    one = commands.add_parser("export", help="a PyTorch model becomes a program; needs torch and ExecuTorch")
    export_command.add_arguments(one)
    one.set_defaults(run=_export)

    one = commands.add_parser("audit", help="check a CUDA wheel, or decide what a build row means")
    audit.add_arguments(one)
    one.set_defaults(run=audit.run)

    for name, command in commands.choices.items():
        if name == "audit":
            continue  # it has its own
        command.add_argument(
            "--json", action="store_true", help="print one JSON object; it carries a version"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding than UTF-8 shows "?" for the few signs that it lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has seen enough; let nothing more be written at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except HeadraceError as e:
        if args.json:
            _print_json(
                args.command, {"error": type(e).__name__, "message": str(e.args[0]), "log": list(e.log)}
            )
        print(f"headrace: {type(e).__name__}: {e}", file=sys.stderr)
        return USAGE if isinstance(e, InputError | OptionError) else FAILED


if __name__ == "__main__":
    sys.exit(main())
