"""Write the type stub of the extension, from the extension that is installed and the rules of ``_core.nbpat``.

::

    python native/python/stub.py                   # write src/headrace/_core.pyi
    python native/python/stub.py --check FILE      # exit status 1, and the difference, where FILE is another

What nanobind writes may change with its minor version, so the stub's first line names that: `version_of` reads it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/headrace"
STUB = SOURCE / "_core.pyi"
RULES = SOURCE / "_core.nbpat"


def installed() -> str:
    """The minor version of nanobind that is installed, such as ``"3.1"``."""
    return ".".join(importlib.import_module("nanobind").__version__.split(".")[:2])


def version_of(text: str) -> str:
    """The minor version of nanobind that a stub was made by. Raises SystemExit where its first line does not say."""
    found = re.match(r"# Made by `make stubs` with nanobind ([0-9]+\.[0-9]+) ", text)
    if found is None:
        raise SystemExit("stub: expected a first line that names nanobind's version, got none; make it anew")
    return found[1]


def stub(rules: Path) -> str:
    """The stub's text. Raises SystemExit where a rule fits nothing, as after a name of the bindings changed."""
    importlib.import_module("headrace")  # it loads what the extension needs
    stubgen = importlib.import_module("nanobind.stubgen")
    patterns = stubgen.load_pattern_file(str(rules))
    made = stubgen.StubGen(
        module=importlib.import_module("headrace._core"), include_private=True, patterns=patterns, quiet=True
    )
    made.put(made.module)
    if idle := [pattern.query.pattern for pattern in patterns if pattern.matches == 0]:
        raise SystemExit(
            f"{rules}: expected rules that fit names of the extension, got {', '.join(idle)}; name what is there"
        )
    head = f"# Made by `make stubs` with nanobind {installed()} from the bindings and _core.nbpat: change those.\n"
    return head + str(made.get())


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write the type stub of the extension, or compare one with it."
    )
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare this stub, and write nothing")
    parser.add_argument("--rules", type=Path, default=RULES, help="nanobind's pattern file")
    args = parser.parse_args()
    text = stub(args.rules)
    if args.check is None:
        STUB.write_text(text)
        return 0
    there = args.check.read_text()
    difference = difflib.unified_diff(
        there.splitlines(True), text.splitlines(True), str(args.check), "the extension"
    )
    sys.stdout.writelines(difference)
    return int(there != text)


if __name__ == "__main__":
    sys.exit(main())
