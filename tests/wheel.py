"""What `make wheel` built, as a user gets it: contents, size, and a run in a clean environment.

::

    python -m tests.wheel dist

Ends with a message and a status other than 0 at the first thing that is not as promised.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from elftools.elf.elffile import ELFFile

from tests import programs

GREATEST_NBYTES = 12_000_000
# Beside the standard library of Python, for `venv` and pip.
PATH = "/usr/bin:/bin"
WANTED = [
    r"headrace/__init__\.py",
    r"headrace/_core\.[\w.-]+\.so",
    r"headrace/_schema/program\.py",
    r"headrace/include/headrace/program\.h",
    r"headrace/lib/engine\.json",
    r"headrace/lib/libheadrace(_cuda|_shims|_stream)?\.so",
    r"headrace/lib/libexecutorch(_threadpool|_kernels_optimized|_backend_xnnpack|_etdump)?\.so",
    r"headrace/lib/LICENSE\.executorch",
    r"headrace-[\w.]+\.dist-info/licenses/(LICENSE|NOTICE)",
    r"headrace-[\w.]+\.dist-info/entry_points\.txt",
]
UNWANTED = r"\.(cpp|cc|cmake|a|o|pyc)$|(^|/)(native|tests|cmake|build|benchmarks|examples)/|CMakeLists|\.txt$"


def must(so: bool, message: str) -> None:
    if not so:
        raise SystemExit(f"wheel: {message}")


def check_contents(wheel: Path) -> None:
    size = wheel.stat().st_size
    must(size <= GREATEST_NBYTES, f"expected at most {GREATEST_NBYTES} bytes, got {size}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for pattern in WANTED:
            must(any(re.fullmatch(pattern, n) for n in names), f"expected {pattern}, got no such file")
        licences = [n for n in names if "/licenses/" in n]
        must(len(licences) == 2, f"expected two licence files of our own, got {licences}")
        extra = [n for n in names if re.search(UNWANTED, n) and not n.endswith("entry_points.txt")]
        must(not extra, f"expected no sources of the build, got {extra}")
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        required = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
        always = sorted(re.split(r"[^\w]", r)[0] for r in required if "extra ==" not in r)
        must(always == ["flatbuffers", "numpy"], f"expected numpy and flatbuffers alone, got {always}")
        libraries = [n for n in names if n.endswith(".so")]
        for library in libraries:
            with archive.open(library) as stream:
                data = stream.read()
            with tempfile.TemporaryFile() as file:
                file.write(data)
                section = ELFFile(file).get_section_by_name(".dynamic")
                search = [t.runpath for t in section.iter_tags() if t.entry.d_tag == "DT_RUNPATH"]
            depth = "$ORIGIN/lib" if "_core" in library else "$ORIGIN"
            must(search == [depth], f"{library}: expected the search path {depth}, got {search}")
            if "libexecutorch" not in library:
                for folder in (programs.ROOT, Path.home(), "/tmp"):
                    must(
                        os.fsencode(f"{folder}/") not in data,
                        f"{library}: got a path of this machine, {folder}",
                    )
    print(f"wheel: {wheel.name}: {size / 1e6:.2f} MB, {len(names)} files, {len(libraries)} libraries")


def check_run(wheel: Path) -> None:
    """Installed by pip into an empty environment, where no compiler and no toolkit is on the path."""
    program = programs.load("mlp_xnnpack")
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        call = program.calls[0]
        np.save(here / "x.npy", call.inputs[0].data)
        np.savez(here / "want.npz", call.outputs[0].data)
        subprocess.run([sys.executable, "-m", "venv", here / "clean"], check=True)
        kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        environment = {"PATH": PATH, "HOME": folder, **kept}
        python = here / "clean/bin/python"

        def run(*command: object) -> str:
            done = subprocess.run(
                [str(c) for c in command], cwd=here, env=environment, capture_output=True, text=True
            )
            must(
                done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
            )
            return done.stdout

        run(python, "-m", "pip", "install", "--quiet", wheel.resolve())
        listed = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
        packages = sorted({p["name"].lower() for p in listed} - {"pip", "setuptools", "wheel"})
        must(packages == ["flatbuffers", "headrace", "numpy"], f"expected two dependencies, got {packages}")
        headrace = here / "clean/bin/headrace"
        found = json.loads(run(headrace, "doctor", "--json"))
        must(found["engine_source"] == "bundled", f"expected the bundled engine, got {found}")
        must(found["torch_loaded"] is False, "expected no torch")
        out = run(headrace, "run", program.path, "--input", "x.npy", "--expect", "want.npz")
        must("output 0: equal" in out, out)
        print(f"wheel: installed with {', '.join(packages)}; {program.name} equals eager PyTorch")


def main() -> None:
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    check_contents(wheel)
    check_run(wheel)


if __name__ == "__main__":
    main()
