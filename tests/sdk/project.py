"""A C++ project built against an installed headrace, with nothing on the path but the system's compiler and make.

``make wheel`` uses this too, with the environment that it installed the wheel in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/cpp"
DIGITS = ROOT / "examples/digits"
PATH = "/usr/bin:/bin"


def environment(home: Path) -> dict[str, str]:
    """No toolkit, no search path for libraries, nothing of this environment but the package index."""
    return {"PATH": PATH, "HOME": str(home), **{k: v for k, v in os.environ.items() if k.startswith("PIP_")}}


def run(home: Path, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(c) for c in command],
        cwd=home,
        env=environment(home) | more,
        capture_output=True,
        text=True,
        timeout=600,
    )


def cmake() -> Path:
    """pip's, beside the interpreter; else the one on the path."""
    beside = Path(sys.executable).with_name("cmake")
    found = shutil.which("cmake")
    assert beside.exists() or found, "expected cmake, got none; pip install cmake"
    return beside if beside.exists() else Path(str(found))


def configure(cmake: Path, source: Path, build: Path, *options: object) -> subprocess.CompletedProcess[str]:
    build.mkdir(parents=True, exist_ok=True)
    # make is the system's; where there is none, ninja will do.
    ninja = None if shutil.which("make", path=PATH) else shutil.which("ninja")
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}") if ninja else ()
    return run(build, cmake, *generator, "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *options)


def build(cmake: Path, source: Path, folder: Path, *options: object) -> Path:
    """Configured and built, or an AssertionError with what was printed."""
    done = configure(cmake, source, folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(folder, cmake, "--build", folder, "-j", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def images() -> np.ndarray:
    """The held-out digits: float32[n, 1, 8, 8]."""
    with np.load(DIGITS / "digits.npz") as held_out:
        return np.ascontiguousarray(held_out["images"][:, None].astype(np.float32))


def classify(program: str, built: Path, folder: Path, *options: str) -> tuple[np.ndarray, list[str]]:
    """What the application of examples/cpp answers, and the lines it prints."""
    images().tofile(folder / "images")
    done = run(folder, built / "digits", DIGITS / program, "images", "scores", *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return np.fromfile(folder / "scores", np.float32).reshape(-1, 10), done.stdout.splitlines()


def check_lines(lines: list[str], device: str, split: bool) -> None:
    """The application tells which stream the caller had set, and where its delegate ran, truly."""
    assert lines[0].startswith(f"device: {device}"), lines
    assert [line for line in lines if line.startswith("caller")] == [
        f"caller stream set: {answer}" for answer in ("no", "yes", "no")
    ]
    ran = [line.partition(": ")[2] for line in lines if line.startswith("the delegate ran on")]
    # With none selected a device's work goes to the per-thread stream; the cpu has no use for one.
    first = "none" if device == "cpu" else "the per-thread stream"
    assert ran == ([first, "the caller's stream"] if split else []), lines
