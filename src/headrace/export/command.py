"""``headrace export``: the arguments of the call, as options of a command line. Imports no torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ..errors import ExportError, OptionError
from . import Exported, export
from .delegates import Aoti, Claims, Python, TensorRT, Xnnpack
from .files import writable
from .target import Target, planned_on
from .verification import Verify

__all__ = ["add_arguments", "check", "described", "run"]

# TensorRT's options that a line can hold; profiles need the call, or the mapping.
ENGINE = (
    "builder",
    "compute_capabilities",
    "hardware_compatibility",
    "version_compatible",
    "precision",
    "tf32",
    "optimization_level",
    "workspace_nbytes",
    "weight_streaming",
)


def add_arguments(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "model",
        metavar="MODULE:CALLABLE",
        help="gives (model, example_inputs), or a mapping with these and delegates, dynamic_shapes, verify",
    )
    one.add_argument("-o", "--output", required=True, metavar="FILE", help="the program to write")
    one.add_argument(
        "--delegate",
        action="append",
        default=[],
        dest="delegates",
        metavar="DELEGATE",
        help="who takes what, in order; may be repeated: aoti, xnnpack, tensorrt, python:NAME, each with options behind a "
        "colon: operators=aten.linear+aten.add,modules=layers.*,exclude=…,min_size=N,merge=no,module=…; for tensorrt "
        f"also {', '.join(ENGINE)} (default: aoti)",
    )
    one.add_argument("--target", default="host", help="what to compile for (default: host)")
    one.add_argument(
        "--device",
        default="cuda:0",
        help="where islands' arguments are planned: cuda:0, whichever device the program is loaded on; cpu or none: host memory",
    )
    one.add_argument(
        "--resident", action="store_true", help="inputs and outputs are the caller's device memory"
    )
    one.add_argument(
        "--weights", choices=("inside", "beside"), default="inside", help="beside: in a .ptd file"
    )
    one.add_argument("--no-verify", action="store_true", help="do not compare the result with eager PyTorch")
    one.add_argument("--no-cache", action="store_true", help="compile every island anew, and keep none")
    one.add_argument("--rtol", type=float, help="relative tolerance of the verification (default: by dtype)")
    one.add_argument("--atol", type=float, help="absolute tolerance of the verification (default: by dtype)")
    one.add_argument("--python", help="the interpreter that verifies; it needs headrace, not torch")
    one.add_argument("--plot", metavar="FILE.svg", help="write the split as a picture")
    one.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _called(name: str) -> Any:
    """What the callable MODULE:CALLABLE gives."""
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise OptionError(f"export: expected MODULE:CALLABLE, got {name!r}; write my_models:make")
    made = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(made, part):
            raise OptionError(
                f"export: expected {module} to have {path}, got no {part!r}; check the name behind the colon"
            )
        made = getattr(made, part)
    if not callable(made):
        raise OptionError(
            f"export: expected {name} to be a callable, got {type(made).__name__}; name a function or a class that gives the model"
        )
    try:
        return made()
    except Exception as error:  # the module's own code runs
        raise ExportError(
            f"export: expected {name} to make a model, got {type(error).__name__}: {error}; call it from Python to see where it fails"
        ) from error


def _delegate(text: str) -> Claims:
    """A delegate as an option writes it: ``xnnpack``, ``aoti:exclude=aten.topk,min_size=3``, ``python:NAME:…``."""
    kind, _, rest = text.partition(":")
    name: tuple[str, ...] = ()
    if kind == "python":
        first, _, rest = rest.partition(":")
        name = (first,)
    kinds: dict[str, Any] = {
        "aoti": Aoti,
        "xnnpack": Xnnpack,
        "tensorrt": TensorRT,
        "python": Python,
    }
    if kind not in kinds:
        raise OptionError(
            f"--delegate: expected aoti, xnnpack, tensorrt or python:NAME, got {text!r}; name one of these, once for each delegate, in order"
        )
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        known: tuple[str, ...] = (
            "operators",
            "modules",
            "exclude",
            "min_size",
            "merge",
            *(("module",) if name else ()),
        )
        known += ENGINE if kind == "tensorrt" else ()
        if not equals or key not in known:
            raise OptionError(
                f"--delegate {text!r}: expected {', '.join(known)} with a value, got {item!r}; write it behind an equals sign"
            )
        if key in options:
            raise OptionError(f"--delegate {text!r}: expected {key} once, got it again; join names with +")
        try:
            options[key] = READ.get(key, _names)(value)
        except ValueError:
            raise OptionError(
                f"--delegate {text!r}: expected a number or yes or no, got {item!r}; write one of these behind the equals sign"
            ) from None
    delegate: Claims = kinds[kind](*name, **options)
    return delegate


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


def _names(text: str) -> list[str]:
    return text.split("+")


READ: dict[str, Callable[[str], Any]] = {
    "min_size": int,
    "merge": _yes,
    "module": str,
    "builder": str,
    "hardware_compatibility": str,
    "version_compatible": _yes,
    "precision": str,
    "tf32": _yes,
    "optimization_level": int,
    "workspace_nbytes": int,
    "weight_streaming": _yes,
}


def check(args: argparse.Namespace) -> None:
    """What can be known before the model's module is imported. Raises OptionError."""
    for text in args.delegates:
        _delegate(text)
    Target.parse(args.target)
    planned_on(_device(args))
    program = writable("--output", args.output)
    if args.plot is not None and writable("--plot", args.plot, ".svg").resolve() == program.resolve():
        raise OptionError(
            f"--plot, {args.plot}: expected another file than the program's, got the same; name another file"
        )


def _device(args: argparse.Namespace) -> str | None:
    return None if args.device == "none" else str(args.device)


def run(args: argparse.Namespace) -> Exported:
    """Export what ``args`` say, but for the picture. Raises OptionError, and what ``headrace.export`` raises."""
    delegates = [_delegate(text) for text in args.delegates]
    target = Target.parse(args.target)
    made = _called(args.model)
    options: dict[str, Any] = {}
    if isinstance(made, Mapping):
        options = dict(made)
        unknown = sorted(set(options) - {"model", "example_inputs", "delegates", "dynamic_shapes", "verify"})
        if unknown or not {"model", "example_inputs"} <= set(options):
            raise OptionError(
                f"export: expected {args.model} to give model and example_inputs, and at most delegates, dynamic_shapes "
                f"and verify, got {', '.join(map(str, made))}; return a dict with these keys"
            )
    elif isinstance(made, tuple) and len(made) == 2:
        options = {"model": made[0], "example_inputs": made[1]}
    else:
        raise OptionError(
            f"export: expected {args.model} to give (model, example_inputs) or a mapping, got {type(made).__name__}; return one of these"
        )
    if delegates:
        options["delegates"] = delegates
    if args.no_verify:
        options["verify"] = False
    elif args.rtol is not None or args.atol is not None or args.python is not None:
        given = options.get("verify")
        base = given if isinstance(given, Verify) else Verify()
        changes = {
            k: v
            for k, v in (("rtol", args.rtol), ("atol", args.atol), ("python", args.python))
            if v is not None
        }
        options["verify"] = replace(base, **changes)
    return export(
        options.pop("model"),
        options.pop("example_inputs"),
        path=args.output,
        target=target,
        device=_device(args),
        resident=args.resident,
        weights=args.weights,
        cache=not args.no_cache,
        progress=None if args.quiet else lambda line: print(line, file=sys.stderr, flush=True),
        **options,
    )


def described(exported: Exported) -> dict[str, Any]:
    """What was written, for ``--json``."""
    return {
        "file": str(exported.path),
        "data": [str(path) for path in exported.data],
        "islands": [asdict(island) for island in exported.split.islands],
        "split": [asdict(node) for node in exported.split],
        "notes": list(exported.split.notes),
        "verification": asdict(exported.verification) if exported.verification else None,
    }
