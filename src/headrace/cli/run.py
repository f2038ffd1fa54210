"""``run``: a method of a program on inputs from files or made up, its outputs compared, written or summed up."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import re
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

import headrace

from .. import lanes
from ..device import Device, Partition
from ..device import device as open_device
from ..errors import InputError, OptionError
from ..ordering import record
from ..program import Method, ValueInfo
from ..stats import GraphStats
from .printing import DIFFERS, OK, print_json, shape_text

__all__ = ["import_modules", "made_up", "run"]

# Relative and absolute: what rounding in another order of operations may change.
TOLERANCE = {
    "float64": (1e-7, 1e-9),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "bfloat16": (2e-2, 1e-2),
}


def made_up(info: ValueInfo, rng: np.random.Generator | None) -> Any:
    """An input of the greatest shape: ones, or random numbers; ints stay 0 or 1, so that they index."""
    if info.kind == "none":
        return None
    if info.kind != "tensor":
        raise InputError(
            f"--ones and --random: expected a method with tensors only, got an input of kind {info.kind}; "
            "call it from Python"
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
    except (FileNotFoundError, IsADirectoryError) as e:
        got = "a folder" if isinstance(e, IsADirectoryError) else "no such file"
        raise InputError(f"{name}: expected {expected}, got {got}; check the path") from None
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(f"{name}: expected {expected}, got: {e}; write it again") from None


def _inputs(args: argparse.Namespace, method: Method) -> list[Any]:
    if args.input:
        arrays: list[Any] = []
        for i, name in enumerate(args.input):
            array = _read(name, "an array written by numpy.save")
            if isinstance(array, list):
                raise InputError(
                    f"{name}: expected an array written by numpy.save, got an archive of arrays; give each in a file of its own"
                )
            narrow = (
                i < len(method.inputs) and method.inputs[i].dtype == "bfloat16" and array.dtype == "float32"
            )
            arrays.append(headrace.Buffer.from_float32(array) if narrow else array)
        return arrays
    if method.inputs and not (args.ones or args.random is not None):
        raise InputError(
            f"{method.name}: expected {len(method.inputs)} input{'s'[: len(method.inputs) != 1]}, got none; give --input FILE.npy for each, "
            "--ones or --random SEED"
        )
    rng = np.random.default_rng(args.random) if args.random is not None else None
    return [made_up(info, rng) for info in method.inputs]


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
        raise InputError(
            f"{args.expect}: expected arrays written by numpy.savez, got a single array; write it by savez"
        )
    given = [i for i, output in enumerate(outputs) if output is not None]
    if len(wanted) != len(given):
        raise InputError(
            f"{args.expect}: expected {len(given)} arrays, one for each output that is not None, "
            f"got {len(wanted)}; write one for each, in their order"
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
                f"{args.expect}: expected numbers to compare output {i} with, got {want.dtype} beside {got.dtype}; "
                "compare it in Python"
            )
        if got.shape != want.shape:
            row |= {"equal": False, "largest_deviation": None}
        else:
            row |= {"equal": _equal(got, want, rtol, atol), "largest_deviation": _deviation(got, want)}
        rows.append(row)
    return rows


def _device(args: argparse.Namespace) -> Device | str | None:
    """The device of --device and --schedule; None where neither was given."""
    if args.schedule is None:
        given: str | None = args.device
        return given
    name = args.device or "sim"
    if not name.startswith("sim"):
        raise OptionError(
            f"--schedule: expected a simulated device, got --device {name}; give --device sim, or no --schedule"
        )
    # At most 18 digits: any seed of 64 bits has a twin among them, and Python reads no number of thousands.
    seed = re.fullmatch(r"-?[0-9]{1,18}", args.schedule)
    return open_device(name, schedule=int(args.schedule) if seed else args.schedule)


def _lane(lane: Partition | None, args: argparse.Namespace) -> dict[str, int]:
    """What was asked for and what was granted; empty where there is no lane."""
    if lane is None:
        return {}
    return {"asked": args.green_context_sms, "granted": lane.sm_count, "total": lane.device.sm_count}


def import_modules(modules: Sequence[str], said: str = "--import") -> None:
    """Import modules that define delegates or models; the current folder counts, as it does for ``python -m``."""
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as e:  # the module's own code runs
            raise OptionError(
                f"{said} {module}: expected a module that can be imported, got {type(e).__name__}: {e}; "
                "call it where Python finds the module, and mend what that says"
            ) from e


def _check_options(args: argparse.Namespace) -> None:
    if args.random is not None and args.random < 0:
        raise OptionError(f"--random: expected a seed of 0 or more, got {args.random}; choose one of these")
    for option, value in (("--rtol", args.rtol), ("--atol", args.atol)):
        if value is not None and not 0 <= value < math.inf:
            raise OptionError(
                f"{option}: expected a finite number of 0 or more, got {value}; choose one of these"
            )
    if args.repeat < 1:
        raise OptionError(f"--repeat: expected 1 or more, got {args.repeat}; choose one of these")
    if args.green_context_sms is not None and not 1 <= args.green_context_sms < 2**31:
        raise OptionError(
            f"--green-context-sms: expected 1 to 2**31 - 1, got {args.green_context_sms}; choose one of these"
        )
    if args.confinement and args.green_context_sms is None:
        raise OptionError("--confinement: expected a lane to look at, got none; give --green-context-sms N")


def _write(target: Path, outputs: Sequence[Any]) -> None:
    """Arrays in files of a folder, or in one archive where the name ends so."""
    arrays = {f"out{i}": _as_array(output) for i, output in enumerate(outputs) if output is not None}
    try:
        if target.suffix == ".npz":
            target.parent.mkdir(parents=True, exist_ok=True)
            np.savez(target, **arrays)  # type: ignore[arg-type]
            return
        target.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(target / f"{name}.npy", array, allow_pickle=False)
    except OSError as e:
        raise InputError(
            f"--output: expected a folder or an archive that can be written, got: {e}; choose another path"
        ) from None


@dataclass(frozen=True)
class _Ran:
    """What one command found."""

    method: Method
    outputs: Sequence[Any]
    seconds: Sequence[float]
    compared: Sequence[dict[str, Any]]
    planned: Sequence[dict[str, Any]]
    ordering: Any
    graph: GraphStats | None
    lane: dict[str, int]
    confinement: lanes.Confinement | None

    @property
    def median_us(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2] * 1e6

    def as_dict(self) -> dict[str, Any]:
        infos = zip(self.method.outputs, self.outputs, strict=True)
        return {
            "method": self.method.name,
            "device": self.method.device.name,
            "islands": [asdict(i) for i in self.method.islands],
            "outputs": [asdict(info) | {"actual": _as_array(o).shape} for info, o in infos],
            "compared": self.compared,
            "calls": len(self.seconds),
            "median_us": self.median_us,
            "ordering": asdict(self.ordering) if self.ordering else None,
            "graph": asdict(self.graph) if self.graph else None,
            "planned": self.planned,
            "lane": self.lane,
            "confinement": self.confinement.as_dict() if self.confinement else None,
        }

    def lines(self) -> Iterator[str]:
        islands = self.method.islands
        who = ", ".join(i.delegate for i in islands) or "CPU kernels only"
        yield f"method {self.method.name} on {self.method.device.name}: {who}"
        if self.lane:
            yield "  lane: {granted} SMs of {total} granted, {asked} asked for".format(**self.lane)
            for use in self.planned:
                yield "  planned memory of {method}: {nbytes} bytes on {device}".format(**use)
        if self.confinement:
            yield f"  {self.confinement}".replace("\n", "\n  ")
        for i, (info, output) in enumerate(zip(self.method.outputs, self.outputs, strict=True)):
            yield f"  output {i}: {shape_text(info)}, got {_summary(output)}"
        for row in self.compared:
            verdict = "equal" if row["equal"] else "DIFFERENT"
            detail = (
                f"shape {list(row['shape'])} instead of {list(row['expected_shape'])}"
                if row["largest_deviation"] is None
                else f"largest deviation {row['largest_deviation']:.3g}"
            )
            tolerance = f"{row['rtol']:g} relative + {row['atol']:g}"
            yield f"  output {row['output']}: {verdict}, {detail} (tolerance {tolerance})"
        if self.graph:
            yield f"  graph: {len(islands)} islands in one launch, {self.graph.memory_nbytes} bytes"
        if len(self.seconds) > 1:
            what = "replays" if self.graph else "calls"
            yield f"  {len(self.seconds)} {what}, median {self.median_us:.1f} µs"
        if self.ordering:
            counts = f"{self.ordering.accesses} accesses in {self.ordering.operations} operations"
            yield f"  order: {counts}, no conflicts"
            for unseen in self.ordering.unseen:
                yield f"  order: not seen: {unseen}"


def run(args: argparse.Namespace) -> int:
    import_modules(args.modules)
    if args.threads is not None:
        headrace.set_num_threads(args.threads)
    _check_options(args)
    device, lane = _device(args), None
    if args.green_context_sms is not None:
        device = open_device(device or "cuda:0") if device is None or isinstance(device, str) else device
        lane = device.partition(sms=args.green_context_sms)
    with headrace.load(args.file, data=args.data, device=device, lane=lane) as program:
        name = program.methods[0] if args.method is None else args.method
        if name not in program:
            raise InputError(
                f"--method: expected one of {', '.join(program.methods)}, got {name!r}; choose one of these"
            )
        method = program[name]
        inputs = _inputs(args, method)
        seconds = []
        recorded = record() if args.check_ordering or args.trace or args.plot else None
        with contextlib.nullcontext() if recorded is None else recorded:
            graph = method.capture(*inputs) if args.graph else None
            step = method if graph is None else graph.replay
            for _ in range(args.repeat):
                began = time.perf_counter()
                outputs = step(*inputs)
                seconds.append(time.perf_counter() - began)
        if recorded is not None and args.trace:
            recorded.trace(args.trace)
        if recorded is not None and args.plot:
            recorded.plot(args.plot)
        ordering = recorded.check() if recorded is not None and args.check_ordering else None
        compared = _compare(args, method, outputs) if args.expect else []
        if args.output:
            _write(Path(args.output), outputs)
        uses = [use for use in program.memory().uses if use.what == "planned"]
        planned = [{"method": use.method, "device": use.device, "nbytes": use.nbytes} for use in uses]
        stats = graph.stats if graph else None
        confined = None
        if args.confinement:
            assert lane is not None  # _check_options
            tenant = lanes.Tenant(args.file, inputs, data=args.data, method=name)
            confined = lanes.confinement(tenant, lane)
        ran = _Ran(method, outputs, seconds, compared, planned, ordering, stats, _lane(lane, args), confined)
        if args.json:
            print_json("run", {"file": args.file, **ran.as_dict()})
        else:
            print(f"{args.file}, " + "\n".join(ran.lines()))
        stays = confined is None or confined.confined
        return OK if stays and all(row["equal"] for row in compared) else DIFFERS
