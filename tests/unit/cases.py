"""Cases for a process that has torch: a module marks its functions ``@case`` and runs them all in one process, since
importing torch takes longer than most of them; a test in this environment reads what came of each.

The module: ``case = Cases()``, and at its end ``if __name__ == "__main__": case.main()``. It is started as
``python -m MODULE FOLDER PACKAGE… -- ARGUMENT…`` and prints a JSON object: for each case "" or what went wrong.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

__all__ = ["Cases", "named", "ran"]

Function = Callable[[Path], None]


class Cases:
    """A decorator that collects functions. Each is called with a folder of its own."""

    def __init__(self) -> None:
        self.functions: dict[str, Function] = {}

    def __call__(self, function: Function) -> Function:
        self.functions[function.__name__] = function
        return function

    def main(self) -> None:
        """Run them, in a process without the run time."""
        from tests.programs.exporting import arguments_of, without_run_time

        packages, _ = arguments_of(sys.argv[2:])
        without_run_time(packages)
        warnings.simplefilter("ignore")
        results = {}
        for name, function in self.functions.items():
            there = Path(sys.argv[1]) / name
            there.mkdir()
            try:
                function(there)
                results[name] = ""
            except BaseException:
                results[name] = traceback.format_exc()[-3000:]
        print(json.dumps(results))


def named(module: str) -> list[str]:
    """The names of its cases, by its text: it cannot be imported here."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    return re.findall(r"^@case\ndef (\w+)", Path(found.origin).read_text(), re.MULTILINE)


def ran(module: str, folder: Path, *arguments: str) -> dict[str, str]:
    """What each of its cases said, in a process with torch."""
    from tests import programs

    command = [
        programs.export_python(),
        "-m",
        module,
        str(folder),
        *programs.package_folders(),
        "--",
        *arguments,
    ]
    done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert list(results) == named(module)
    return results
