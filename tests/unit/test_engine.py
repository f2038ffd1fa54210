"""The engine: one run time in a process, of exactly the build that the package was made for, without torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import headrace
from headrace.engine import LIBRARIES, RUNTIME, engine
from tests import programs
from tests.conftest import run_python, succeeded

# The libraries beside the extension, also where an installed ExecuTorch is in use.
BUNDLED = Path(sys.modules["headrace._core"].__file__ or "").parent / "lib"
WANTED = json.loads((BUNDLED / "engine.json").read_text())

IMPORTS = """
import sys
try:
    import headrace
except ImportError as e:
    assert type(e).__name__ == "EngineError", type(e)
    assert "headrace" not in sys.modules, "half imported"
    print(e)
else:
    raise SystemExit("imported")
"""


@pytest.fixture(scope="session")
def stock() -> Path:
    """The stock ``executorch`` package that the tests' programs are exported with."""
    code = "import importlib.util as u; print(*u.find_spec('executorch').submodule_search_locations)"
    done = subprocess.run(
        [programs.export_python(), "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    package = Path(done.stdout.strip())
    assert (package / "lib" / RUNTIME).is_file()
    return package


def fake(folder: Path, version: str | None, runtime: bytes | Path | None) -> dict[str, str]:
    """An ``executorch`` package in ``folder``, and the environment that puts it first on the path."""
    package = folder / "executorch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('executorch was imported')")
    if version is not None:
        (package / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\n")
    if isinstance(runtime, bytes):
        (package / "lib" / RUNTIME).write_bytes(runtime)
    elif runtime is not None:
        shutil.copy(runtime, package / "lib" / RUNTIME)
    return {"PYTHONPATH": str(folder)}


# ------------------------------------------------------------------- PK1


def test_dependencies_are_numpy_and_flatbuffers_alone() -> None:
    """PK1: what pip installs beside the package."""
    required = importlib.metadata.requires("headrace") or []
    names = {re.split(r"[\s<>=!~;\[]", r)[0] for r in required if "extra ==" not in r.replace("'", '"')}
    assert names == {"numpy", "flatbuffers"}


def test_running_a_program_maps_no_torch_and_no_cuda_library() -> None:
    """PK1: modules and mappings of a process that has loaded and run programs."""
    out = succeeded(
        run_python(
            """
            import sys, headrace
            from tests import programs
            for name in ("cnn_xnnpack", "mlp_portable", "external_weights"):
                p = programs.load(name)
                with headrace.load(p.path, data=p.data) as loaded:
                    loaded["forward"](p.calls[0].inputs[0].data)
            print(*sorted({m.partition(".")[0] for m in sys.modules}))
            print(*{line.split()[5] for line in open("/proc/self/maps") if len(line.split()) > 5})
            """
        )
    )
    modules, maps = out.splitlines()
    assert not {"torch", "executorch", "torchao"} & set(modules.split())
    libraries = {Path(path).name for path in maps.split() if ".so" in path}
    assert RUNTIME in libraries
    assert not {n for n in libraries if re.match(r"lib(torch|c10|cuda|cudart|nv)", n)}


def test_importing_the_command_line_and_the_reader_imports_nothing_else() -> None:
    """PK1: beside the standard library, the two dependencies."""
    out = succeeded(
        run_python(
            """
            import sys
            before = set(sys.modules)
            import headrace, headrace.cli, headrace.pte
            new = {m.partition(".")[0] for m in set(sys.modules) - before}
            print(*sorted(m for m in new if m not in sys.stdlib_module_names and not m.startswith("_")))
            """
        )
    )
    assert set(out.split()) <= {"headrace", "numpy", "flatbuffers"}
    assert {"headrace", "numpy"} <= set(out.split())


def test_importing_leaves_less_than_60_mb_resident() -> None:
    """PK1: NumPy included."""
    code = "import headrace, re; print(*re.findall(r'VmRSS:\\s+(\\d+) kB', open('/proc/self/status').read()))"
    assert 0 < int(succeeded(run_python(code))) * 1024 < 60_000_000


# ------------------------------------------------------------------- PK7


def test_the_bundled_engine_is_used_where_none_is_installed() -> None:
    """PK7"""
    assert engine().source == "bundled"
    assert (engine().version, Path(engine().folder)) == (WANTED["version"], BUNDLED)


def test_an_installed_engine_of_this_very_build_is_used_instead(stock: Path, tmp_path: Path) -> None:
    """PK7: the stock wheel's own files, and no second copy of any of them."""
    (tmp_path / "executorch").symlink_to(stock)
    out = succeeded(
        run_python(
            """
            import sys, headrace
            from headrace.engine import engine
            from tests import programs
            from tests.conftest import assert_close
            for name in ("cnn_xnnpack", "mlp_portable"):
                p = programs.load(name)
                with headrace.load(p.path) as loaded:
                    for call in p.calls:
                        (got,) = loaded["forward"](call.inputs[0].data)
                        assert_close(got, call.outputs[0], p.rtol, p.atol)
            assert not [m for m in sys.modules if m.partition(".")[0] in ("torch", "executorch")]
            print(engine().source, engine().folder)
            print(*sorted({l.split()[5] for l in open("/proc/self/maps") if "/libexecutorch" in l}))
            """,
            environment={"PYTHONPATH": str(tmp_path)},
        )
    )
    first, maps = out.splitlines()
    assert first == f"installed {tmp_path / 'executorch/lib'}"
    assert sorted(maps.split()) == sorted(str(stock.resolve() / "lib" / name) for name in LIBRARIES)


@pytest.mark.parametrize("version", ["1.5.0", "1.6.0", "1.5.1+cu130", "1.5.1rc1", "2.0.0a0+abcdef"])
def test_another_version_is_refused_by_name(version: str, tmp_path: Path) -> None:
    """PK7: naming the package, both versions, and what to do; also a local version of ours."""
    environment = fake(tmp_path, version, BUNDLED / RUNTIME)
    out = succeeded(run_python(IMPORTS, environment=environment))
    assert out.startswith(
        f"{tmp_path}/executorch: expected executorch {WANTED['version']} or none, got {version}; install "
    )
    assert "executorch==1.5.1" in out and "headrace brings its own" in out


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    """PK7: a package with libraries whose version nobody tells."""
    out = succeeded(run_python(IMPORTS, environment=fake(tmp_path, None, BUNDLED / RUNTIME)))
    assert "got an unknown version" in out


def test_another_build_of_the_same_version_is_refused(tmp_path: Path) -> None:
    """PK7: told by the run time's hash; the bundled file differs from the stock one by its search path."""
    out = succeeded(run_python(IMPORTS, environment=fake(tmp_path, WANTED["version"], BUNDLED / RUNTIME)))
    assert f"{tmp_path}/executorch/lib/{RUNTIME}: expected the stock build of executorch" in out
    assert "got another build of the same version" in out


def test_an_installed_engine_without_its_run_time_is_refused(tmp_path: Path) -> None:
    """PK7: a source package, or a broken installation."""
    out = succeeded(run_python(IMPORTS, environment=fake(tmp_path, WANTED["version"], None)))
    assert f"{RUNTIME}: expected the run time of executorch {WANTED['version']}, got no such file" in out


def test_an_installed_engine_that_lacks_a_library_is_refused(stock: Path, tmp_path: Path) -> None:
    """PK7, DE5: the library that is missing is named."""
    environment = fake(tmp_path, WANTED["version"], stock / "lib" / RUNTIME)
    out = succeeded(run_python(IMPORTS, environment=environment))
    assert f"{tmp_path}/executorch/lib/{LIBRARIES[1]}: expected a library that loads, got: " in out


def test_a_folder_that_only_has_the_name_is_no_installed_engine(tmp_path: Path) -> None:
    """A checkout's folder or a project of that name in the working directory is not a package of it."""
    (tmp_path / "executorch").mkdir()
    (tmp_path / "executorch" / "notes.txt").write_text("mine")
    out = succeeded(
        run_python(
            "import headrace.engine as e; print(e.engine().source)", environment={"PYTHONPATH": str(tmp_path)}
        )
    )
    assert out == "bundled\n"


def test_a_second_run_time_in_the_process_is_refused_naming_both(tmp_path: Path) -> None:
    """PK7: one that something else loaded before, from another file."""
    other = Path(shutil.copy(BUNDLED / RUNTIME, tmp_path))
    out = succeeded(run_python(f"import ctypes; ctypes.CDLL({str(other)!r})\n{IMPORTS}"))
    assert f"got {other}, loaded before headrace, beside {BUNDLED / RUNTIME}" in out


def test_a_run_time_whose_file_is_gone_is_refused_too(tmp_path: Path) -> None:
    """PK7: the mapping says so, though nothing lies at its path."""
    other = Path(shutil.copy(BUNDLED / RUNTIME, tmp_path))
    code = f"import ctypes, os; ctypes.CDLL({str(other)!r}); os.unlink({str(other)!r})\n{IMPORTS}"
    assert f"got {other}" in succeeded(run_python(code))


def test_the_same_run_time_loaded_before_is_fine() -> None:
    """PK7: the same file is the same library, by whoever loaded it."""
    path = str(BUNDLED / RUNTIME)
    succeeded(run_python(f"import ctypes; ctypes.CDLL({path!r}); import headrace"))


REGISTERED = {
    "a delegate 'CudaBackend'": """
        class Backend(ctypes.Structure):
            _fields_ = [("name", ctypes.c_char_p), ("backend", ctypes.c_void_p)]
        backend = Backend(b"CudaBackend", 16)
        engine["_ZN10executorch7runtime16register_backendERKNS0_7BackendE"](ctypes.byref(backend))
        """,
    "an allocator for CUDA memory": """
        # An object of one virtual table, every entry of which answers 1: DeviceType::CUDA.
        answer = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
        table = (ctypes.c_void_p * 16)(*[ctypes.cast(answer, ctypes.c_void_p).value] * 16)
        allocator = (ctypes.c_void_p * 1)(ctypes.addressof(table))
        engine["_ZN10executorch7runtime25register_device_allocatorEPNS0_15DeviceAllocatorE"](allocator)
        """,
}


@pytest.mark.parametrize("what", REGISTERED)
def test_cuda_parts_that_somebody_registered_before_are_refused(what: str) -> None:
    """PK7: both registries are asked first."""
    code = f"import ctypes; engine = ctypes.CDLL({str(BUNDLED / RUNTIME)!r})\n"
    code += textwrap.dedent(REGISTERED[what]) + IMPORTS
    assert f"got {what}, registered before headrace" in succeeded(run_python(code))


# ------------------------------------------- beside the stock run time


@pytest.fixture
def beside_stock(stock: Path, tmp_path: Path) -> dict[str, str]:
    """The environment in which the exporter's Python, with torch and stock ExecuTorch, has headrace too."""
    done = subprocess.run(
        [programs.export_python(), "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    extension = BUNDLED.parent / f"_core{done.stdout.strip()}"
    if not extension.exists():
        pytest.skip(f"the exporter's Python is of another version: no {extension.name}")
    package = tmp_path / "headrace"
    package.mkdir()
    for folder in (Path(headrace.__file__).parent, BUNDLED.parent):
        for entry in folder.iterdir():
            if entry.name != "__pycache__" and not (package / entry.name).exists():
                (package / entry.name).symlink_to(entry)
    return {"PYTHONPATH": str(tmp_path)}


STOCK = "import torch; from executorch.runtime import Runtime; runtime = Runtime.get()"


@pytest.mark.parametrize("order", ["stock first", "headrace first"])
def test_stock_runtime_and_headrace_share_a_process(order: str, beside_stock: dict[str, str]) -> None:
    """PK7: in either order of import, on one copy of every library, with torch's tensors going in by DLPack."""
    imports = [STOCK, "import headrace"][:: 1 if order == "stock first" else -1]
    done = run_python(
        "\n".join(imports)
        + """
import numpy as np
from tests import programs
for name in ("mlp_xnnpack", "mlp_portable"):
    p = programs.load(name)
    theirs = runtime.load_program(p.path).load_method("forward")
    with headrace.load(p.path) as ours:
        for call in p.calls:
            x = torch.from_numpy(call.inputs[0].data)
            (got,) = ours["forward"](x)
            assert np.array_equal(got, theirs.execute([x])[0].numpy())
            out = torch.zeros_like(x).t().contiguous().t()
            assert ours["forward"](x.t().contiguous().t(), out=[out])[0] is out
            assert np.array_equal(got, out.numpy())
            try:
                ours["forward"](x.requires_grad_())
            except headrace.InputError as e:
                assert "input 0: expected an array that gives itself by DLPack, got BufferError" in str(e), e
            else:
                raise SystemExit("a tensor with a gradient went in")
from headrace.engine import engine
print(engine().source)
maps = {l.split()[5] for l in open("/proc/self/maps") if "/libexecutorch" in l and ".so" in l}
names = [path.rpartition("/")[2] for path in maps]
print(len(names) == len(set(names)))
""",
        environment=beside_stock,
        python=programs.export_python(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["installed", "True"], done.stdout


def test_every_library_of_the_engine_is_loaded_and_known() -> None:
    """The five that the package bundles, of which the tracer is loaded by nobody yet."""
    assert {p.name for p in BUNDLED.glob("libexecutorch*.so")} == {*LIBRARIES, "libexecutorch_etdump.so"}
    for name in LIBRARIES:
        # Found by name alone: it is in the process.
        ctypes.CDLL(name, mode=4)  # RTLD_NOLOAD
    assert "XnnpackBackend" in headrace.engine.core.delegates()
    assert len(headrace.engine.core.kernels()) > 200
