"""``headrace audit``: parse, call, print.

Exit codes: 0 nothing is wrong, 1 problems were found or a row was refused, 2 wrong usage, or something could
not be inspected.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any, Final

from headrace.audit import audit, default_policy, load_policy, rows
from headrace.errors import AuditError

__all__ = ["add_arguments", "run"]

CLEAN, PROBLEMS, UNUSABLE = 0, 1, 2

_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "paths": {
        "metavar": "PATH",
        "nargs": "*",
        "help": "a wheel, a folder, a .dist-info folder or the name of something installed",
    },
    "--policy": {"metavar": "FILE", "help": "TOML file with allowances, requirements, declarations"},
    "--arch": {
        "metavar": "ARCH",
        "action": "append",
        "help": "a GPU architecture that the wheel is for: sm_90a (SASS), compute_90 (PTX); repeatable",
    },
    "--row": {
        "metavar": "CU_VERSION",
        "help": "without PATH: say what a build row means; with PATH: the row that it was built for",
    },
    "--toolkit": {
        "metavar": "VERSION",
        "help": "with --row: the CUDA toolkit's version, or what `nvcc --version` printed",
    },
    "--rules": {"action": "store_true", "help": "list every rule with its reason and fix"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``headrace audit``."""
    for name, options in _OPTIONS.items():
        parser.add_argument(name, **options)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, which carries a version")
    form.add_argument("--annotations", action="store_true", help="print lines that code hosts show")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code; what cannot be inspected is said on standard error."""
    try:
        if args.row is not None:
            row = rows.classify(args.row, args.toolkit)
            if not args.paths:
                sys.stdout.write(row.as_json() if args.json else row.shell())
                return CLEAN
        if args.rules:
            return _rules(args)
        if not args.paths:
            print("headrace audit: expected a PATH or --row, got neither; see --help", file=sys.stderr)
            return UNUSABLE
        return _paths(args)
    except rows.RowError as refusal:
        print(f"headrace audit: {refusal}", file=sys.stderr)
        return PROBLEMS
    except AuditError as fault:
        print(f"headrace audit: {fault}", file=sys.stderr)
        return UNUSABLE


def _paths(args: argparse.Namespace) -> int:
    policy = load_policy(args.policy) if args.policy else default_policy()
    if args.arch:
        policy = policy.with_architectures(tuple(args.arch))
    if args.row is not None:
        policy = replace(policy, row=args.row)
    code = CLEAN
    reports = []
    for path in args.paths:
        try:
            reports.append(audit(path, policy=policy))
        except AuditError as fault:
            print(f"headrace audit: {fault}", file=sys.stderr)
            code = UNUSABLE
    if args.json:
        print(json.dumps({"version": 1, "reports": [report.as_dict() for report in reports]}, indent=2))
    else:
        for report in reports:
            sys.stdout.write(report.annotations() if args.annotations else report.text())
    return code or (CLEAN if all(report.ok for report in reports) else PROBLEMS)


def _rules(args: argparse.Namespace) -> int:
    rules = default_policy().rules.values()
    if args.json:
        print(json.dumps({"version": 1, "rules": [vars(rule) for rule in rules]}, indent=2))
    for rule in () if args.json else rules:
        print(f"{rule.id} ({rule.level}): {rule.title}\n  why: {rule.reason}\n  fix: {rule.fix}")
    return CLEAN


if __name__ == "__main__":
    alone = argparse.ArgumentParser(prog="headrace audit")
    add_arguments(alone)
    sys.exit(run(alone.parse_args()))
