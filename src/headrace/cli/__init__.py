"""The command line: parse and print.

Exit status: 0 done; 1 an answer differs from ``--expect``, a program leaves its lane (``--confinement``), or no split into lanes meets the
targets (``bench``); 2 the command line, an input or a path is at fault; 3 the program, a delegate or a device is; 130 interrupted. ``audit``: 0 clean; 1 problems; 2 usage, or nothing to inspect.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

import numpy as np

import headrace

from .. import bench
from ..audit import command as audit
from ..errors import HeadraceError, InputError, OptionError
from ..export import command as export_command
from .describe import print_diagnosis, print_file, print_sdk
from .printing import DIFFERS, FAILED, INTERRUPTED, OK, USAGE, print_json
from .run import import_modules, made_up, run

__all__ = ["main"]


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
    import_modules(args.modules)
    rng = np.random.default_rng(0)
    found = bench.measure(args, lambda method: [made_up(info, rng) for info in method.inputs])
    if args.json:
        print_json("bench", {"device": args.device, "calls": args.calls, **found})
    else:
        print(bench.table(found))
    return DIFFERS if "proposal" in found and found["proposal"]["lanes"] is None else OK


def _export(args: argparse.Namespace) -> int:
    module, _, _ = args.model.partition(":")
    export_command.check(args)
    # What the model's code prints is not a part of the one object.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        import_modules([module], "MODEL")
        exported = export_command.run(args)
    if args.json:
        print_json("export", export_command.described(exported))
    else:
        print(exported.split)
        print(exported.verification or "not verified")
        for path in (exported.path, *exported.data):
            print(f"{path}: {path.stat().st_size} bytes")
    if args.plot is not None:
        try:
            exported.plot(args.plot)
        except (OSError, OptionError) as e:  # the program is there all the same, and told of
            sys.stdout.flush()
            print(f"headrace: --plot, {args.plot}: {type(e).__name__}: {e}", file=sys.stderr)
            return USAGE
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace", description=headrace.__doc__, epilog=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("doctor", help="what this installation has and lacks")
    one.set_defaults(run=print_diagnosis)

    one = commands.add_parser("inspect", help="what a .pte or .ptd file holds; runs nothing of it")
    one.add_argument("file", metavar="FILE")
    one.set_defaults(run=print_file)

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
        metavar="DIR|FILE.npz",
        help="write outputs to the folder as out0.npy, …, or to one archive, which --expect reads (bfloat16 as "
        "float32, None not at all)",
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
        "--confinement",
        action="store_true",
        help="look whether the program stays in its lane, in calls and replayed: see docs/lanes.md; the exit status is 1 "
        "where it does not",
    )
    one.add_argument(
        "--check-ordering",
        action="store_true",
        help="record the calls; fail where nothing orders two accesses to one buffer",
    )
    one.add_argument("--trace", metavar="FILE", help="record the calls; write a trace that Perfetto opens")
    one.add_argument("--plot", metavar="FILE.svg", help="record the calls; write them as a picture")
    _add_import(one)
    one.set_defaults(run=run)

    one = commands.add_parser("bench", help="latencies of programs side by side, in lanes and without them")
    bench.add_arguments(one)
    _add_import(one)
    one.set_defaults(run=_bench)

    one = commands.add_parser("sdk", help="the folders of the C++ SDK; one alone is printed bare")
    one.add_argument("--cmake-dir", action="store_true", help="for CMake: -Dheadrace_DIR=…")
    one.add_argument("--include-dir", action="store_true", help="for the compiler: -I…")
    one.add_argument("--library-dir", action="store_true", help="for the linker: -L…")
    one.set_defaults(run=print_sdk)
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
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except HeadraceError as e:
        if args.json:
            print_json(
                args.command, {"error": type(e).__name__, "message": str(e.args[0]), "log": list(e.log)}
            )
        print(f"headrace: {type(e).__name__}: {e}", file=sys.stderr)
        return USAGE if isinstance(e, InputError | OptionError) else FAILED
    except OSError as e:
        # A file that the command line named and that cannot be written: a full disk, a folder that is gone.
        if args.json:
            print_json(args.command, {"error": type(e).__name__, "message": str(e), "log": []})
        print(f"headrace: {type(e).__name__}: {e}", file=sys.stderr)
        return USAGE
