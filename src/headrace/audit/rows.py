#!/bin/sh
""":"
for python in python3 python; do
  command -v "$python" >/dev/null 2>&1 && exec "$python" "$0" "$@"
done
echo "rows.py: expected python3 or python on PATH, found neither" >&2
exit 127

What a build row means: the value that a wheel matrix calls CU_VERSION, read as one word.

A row is the whole word. ``rocm13.2`` holds the digits of ``cu132`` and is not CUDA; ``cu130-full`` starts
like a train and is none. A word that is no known row is refused rather than taken for a CPU row: a typing
error would otherwise publish a wheel without GPU code under a CUDA label.

The file stands alone. A build runs it from the source tree, before the native extension exists, in
whichever of two ways suits it::

    row=$(src/headrace/audit/rows.py "$CU_VERSION" --toolkit "$(nvcc --version)") || exit 1
    eval "$row"                                  # HEADRACE_ROW_KIND, HEADRACE_CUDA, ...
    python src/headrace/audit/rows.py cu130 --json

The lines above this text are a shell program: started as a command, the file runs under ``python3`` or
``python``, whichever exists. Standard error is left alone, so what went wrong is seen. It needs Python 3.6
and the standard library, since the Python of a build image may be that old.

Exit codes: 0 the row is decided, 1 the row or the toolkit is refused, 2 wrong usage.
"""

# ruff: noqa: UP006, UP007, UP035, UP045  (newer annotations do not parse under Python 3.6)
import argparse
import json
import re
import sys
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

__all__ = ["SUPPORTED_TRAINS", "Row", "RowError", "classify", "toolkit_version"]

#: CUDA trains that wheels are built for: the row's word, and the toolkit's (major, minor).
SUPPORTED_TRAINS = {"cu126": (12, 6), "cu130": (13, 0), "cu132": (13, 2)}  # type: Dict[str, Tuple[int, int]]

#: Rows without CUDA, each a pattern for the whole word.
OTHER_ROWS = (
    ("cpu", r"|cpu|cpu-(?:aarch64|cxx11-abi|s390x)"),
    ("rocm", r"rocm[0-9]+(?:\.[0-9]+){0,2}"),
    ("xpu", r"xpu"),
)

#: ``release 13.0`` as nvcc prints it, or a bare version: 13.0, 13.0.88, V13.0.88.
NVCC_RELEASE = re.compile(r"\brelease ([0-9]{1,4})\.([0-9]{1,4})\b")
BARE_VERSION = re.compile(r"[Vv]?([0-9]{1,4})\.([0-9]{1,4})(?:\.[0-9]{1,9}){0,2}")


class RowError(ValueError):
    """A row or a toolkit is refused; the message says what was expected, what came and what to do."""


class Row(NamedTuple):
    """What a row means. ``kind`` is ``cuda``, ``cpu``, ``rocm`` or ``xpu``; ``cuda`` is (major, minor) or
    None."""

    word: str
    kind: str
    cuda: Optional[Tuple[int, int]]

    def facts(self) -> Dict[str, Union[str, int]]:
        """Names and values for a build, in a fixed order; every name is there for every row.

        ``HEADRACE_CUDA`` is ON or OFF, never absent: a CUDA row asks for CUDA by name, so that configuring
        without a compiler fails instead of leaving the GPU code out.
        """
        major, minor = self.cuda if self.cuda else ("", "")
        return {
            "HEADRACE_ROW": self.word,
            "HEADRACE_ROW_KIND": self.kind,
            "HEADRACE_CUDA": "ON" if self.cuda else "OFF",
            "HEADRACE_CUDA_MAJOR": major,
            "HEADRACE_CUDA_MINOR": minor,
            "HEADRACE_CUDA_VERSION": "{}.{}".format(*self.cuda) if self.cuda else "",
            "HEADRACE_LOCAL_VERSION": self.word.replace("-", ".") or self.kind,
            "HEADRACE_CMAKE_ARGS": "-DHEADRACE_CUDA={}".format("ON" if self.cuda else "OFF"),
        }

    def shell(self) -> str:
        """``NAME=VALUE`` lines for ``eval``. No value needs quotes: each matched a pattern without blanks,
        quotes or dollar signs."""
        return "".join(f"{name}={value}\n" for name, value in self.facts().items())

    def as_json(self) -> str:
        return json.dumps({"version": 1, "row": self._asdict(), "facts": self.facts()}, indent=2) + "\n"


def toolkit_version(text: str) -> Tuple[int, int]:
    """Major and minor of a CUDA toolkit, from a version or from the whole output of ``nvcc --version``.

    Raises RowError when the text holds neither, as it does when there is no compiler.
    """
    match = BARE_VERSION.fullmatch(text.strip()) or NVCC_RELEASE.search(text)
    if match is None:
        came = f"{text.strip()[:60]!r}" if text.strip() else "nothing"
        raise RowError(
            f"toolkit: expected a version such as 13.0 or the output of `nvcc --version`, got {came}; "
            "is nvcc installed and on PATH?"
        )
    return int(match.group(1)), int(match.group(2))


def classify(word: str, toolkit: Optional[str] = None) -> Row:
    """The row that ``word`` names.

    ``toolkit`` is the version of the CUDA toolkit at hand, or what nvcc printed; None means that none was
    asked for. For a CUDA row it must have the row's major and minor; other rows use no toolkit, so theirs is
    not looked at. Raises RowError.
    """
    supported = ", ".join(SUPPORTED_TRAINS)
    if word in SUPPORTED_TRAINS:
        train = SUPPORTED_TRAINS[word]
        if toolkit is not None:
            found = toolkit_version(toolkit)
            if found != train:
                raise RowError(
                    f"row {word}: expected a CUDA {train[0]}.{train[1]} toolkit, got {found[0]}.{found[1]}; "
                    "install the row's toolkit or build another row"
                )
        return Row(word, "cuda", train)
    for kind, pattern in OTHER_ROWS:
        if re.fullmatch(pattern, word):
            return Row(word, kind, None)
    if re.fullmatch(r"cu[0-9]{2,4}", word):
        raise RowError(f"row {word}: an unsupported CUDA train; supported are {supported}; use one of them")
    raise RowError(
        f"row {word[:60]!r}: no known row; expected {supported}, or cpu, cpu-aarch64, rocmX.Y, xpu or an "
        "empty word for a build without CUDA; correct the spelling (case, blanks and suffixes count)"
    )


def main(arguments: Optional[List[str]] = None) -> int:
    """The command: print what a row means. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="rows.py", description="Say what a build row means.")
    parser.add_argument("row", metavar="CU_VERSION", help="the row's whole word; empty means CPU")
    parser.add_argument("--toolkit", metavar="VERSION", help="version of the CUDA toolkit, or nvcc's output")
    parser.add_argument("--json", action="store_true", help="print JSON instead of shell lines")
    options = parser.parse_args(arguments)
    try:
        row = classify(options.row, options.toolkit)
    except RowError as refusal:
        print(f"rows.py: {refusal}", file=sys.stderr)
        return 1
    sys.stdout.write(row.as_json() if options.json else row.shell())
    return 0


if __name__ == "__main__":
    sys.exit(main())
