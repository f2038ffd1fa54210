"""A process that has torch and the run time: the exporter's Python with this build of headrace.

::

    PYTHON -m tests.programs.with_run_time PACKAGE… -- ARGUMENTS OF THE COMMAND LINE…

The exporter's interpreter and the one that headrace is built for have to be of one version.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from . import ROOT, export_python, package_folders

__all__ = ["SCRIPT", "install", "interpreter"]

# For ``python -c``: runs the code that is its first argument there, with ``arguments``, those behind ``--``.
SCRIPT = """
import sys, textwrap
from tests.programs.with_run_time import install
at = sys.argv.index("--")
install(sys.argv[2:at])
exec(compile(textwrap.dedent(sys.argv[1]), "code", "exec"), {"arguments": sys.argv[at + 1 :]})
"""


def interpreter() -> list[str]:
    """The command line to put the arguments of ``headrace`` behind."""
    return [export_python(), "-W", "ignore", "-m", "tests.programs.with_run_time", *package_folders(), "--"]


def install(folders: list[str]) -> None:
    """Make ``headrace`` the package of these folders, its ``__init__`` included."""
    init = Path(folders[0]) / "__init__.py"
    assert init == ROOT / "src" / "headrace" / "__init__.py"
    spec = importlib.util.spec_from_file_location("headrace", init, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["headrace"] = module
    spec.loader.exec_module(module)


def main(arguments: list[str]) -> int:
    at = arguments.index("--")
    install(arguments[:at])
    from headrace import cli

    return cli.main(arguments[at + 1 :])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
