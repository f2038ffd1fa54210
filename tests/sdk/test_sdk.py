"""The C++ SDK as it is installed: found by CMake, linked, opened, moved; its answers are Python's."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

import headrace
from headrace import cli, sdk
from tests.conftest import run_python, succeeded
from tests.sdk import project

HERE = Path(__file__).parent
CMAKE = project.cmake()
CONFIG = f"-Dheadrace_DIR={sdk.cmake_dir()}"


def needed(path: Path) -> list[str]:
    with path.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".dynamic")
        return [t.needed for t in section.iter_tags() if t.entry.d_tag == "DT_NEEDED"]


# ------------------------------------------------------------------ folders


def test_folders_are_those_of_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    """PK4: from Python, and from the command line bare, as a table and as JSON."""
    assert (sdk.include_dir() / "headrace/program.h").is_file()
    assert (sdk.include_dir() / "engine/executorch/extension/module/module.h").is_file()
    assert (sdk.library_dir() / "libheadrace.so").is_file()
    assert (sdk.cmake_dir() / "headrace-config.cmake").is_file()
    folders = {"cmake": sdk.cmake_dir(), "include": sdk.include_dir(), "library": sdk.library_dir()}
    for name, folder in folders.items():
        assert cli.main(["sdk", f"--{name}-dir"]) == 0
        assert capsys.readouterr().out == f"{folder}\n"
    assert cli.main(["sdk"]) == 0
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        [f"{name}_dir", str(folder)] for name, folder in folders.items()
    ]
    assert cli.main(["sdk", "--json", "--include-dir", "--library-dir"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "command": "sdk",
        "version": 1,
        "include_dir": str(sdk.include_dir()),
        "library_dir": str(sdk.library_dir()),
    }


# ------------------------------------------------------------------ found, or not


def find(folder: Path, arguments: str, *options: object, then: str = "") -> tuple[int, str]:
    """Configures a project that does nothing but find the package; no compiler is looked for."""
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.16)\nproject(find LANGUAGES NONE)\nfind_package(headrace {arguments})\n{then}\n"
    )
    done = project.configure(CMAKE, folder, folder / "build", *options)
    # One line, since CMake breaks messages where they are long.
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_a_missing_component_fails_while_configuring_and_is_named(tmp_path: Path) -> None:
    """PK4: one that there is not, and what there is."""
    status, text = find(tmp_path, "REQUIRED COMPONENTS cuda tensorrt", CONFIG)
    assert status != 0
    assert "component 'tensorrt': expected one of caller_stream, headrace, cuda, executorch" in text
    status, text = find(
        tmp_path,
        "REQUIRED COMPONENTS cuda OPTIONAL_COMPONENTS tensorrt",
        CONFIG,
        then='message(STATUS "found ${headrace_FOUND} ${headrace_cuda_FOUND} ${headrace_tensorrt_FOUND}")',
    )
    assert status == 0, text
    assert "found 1 TRUE FALSE" in text


def test_a_component_whose_file_is_missing_fails_and_the_file_is_named(tmp_path: Path) -> None:
    """PK4: a package that lost a library; components that do not need it are found."""
    package = tmp_path / "moved"
    shutil.copytree(
        sdk.library_dir().parent, package, ignore=shutil.ignore_patterns("*.pyc", "libheadrace_cuda.so")
    )
    there = f"-Dheadrace_DIR={package / 'lib/cmake/headrace'}"
    assert find(tmp_path, "REQUIRED COMPONENTS headrace", there)[0] == 0
    for components in ("COMPONENTS cuda", ""):
        status, text = find(tmp_path, f"REQUIRED {components}", there)
        assert status != 0
        assert "component 'cuda': expected" in text and "lib/libheadrace_cuda.so, got no such file" in text


def test_another_version_is_refused_naming_both(tmp_path: Path) -> None:
    """PK4: the package's version is this one's; before 1.0 a minor version may change everything."""
    version = headrace.__version__
    major, minor, _ = version.split(".")
    for wanted in (version, f"{major}.{minor}"):
        then = 'message(STATUS "version ${headrace_VERSION}.")'
        status, text = find(tmp_path, f"{wanted} REQUIRED", CONFIG, then=then)
        assert status == 0 and f"version {version}." in text, text
    for wanted in (f"{major}.{int(minor) + 1}", f"{int(major) + 1}.0"):
        status, text = find(tmp_path, f"{wanted} REQUIRED", CONFIG)
        assert status != 0
        assert f'version "{wanted}"' in text and f"version: {version}" in text, text


@pytest.mark.parametrize("up", [0, 1], ids=["package", "site-packages"])
def test_it_is_found_by_a_prefix(up: int, tmp_path: Path) -> None:
    """PK4: CMAKE_PREFIX_PATH may name the package's folder, or the one that pip installs to."""
    prefix = [sdk.library_dir().parent, sdk.library_dir().parents[1]][up]
    then = 'message(STATUS "at ${headrace_DIR}.")'
    status, text = find(
        tmp_path, "REQUIRED COMPONENTS caller_stream cuda", f"-DCMAKE_PREFIX_PATH={prefix}", then=then
    )
    assert status == 0 and f"at {sdk.cmake_dir()}." in text, text


# ------------------------------------------------------------------ linked, opened, moved


@pytest.fixture(scope="session")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/sdk/consumer, against a copy of the package: in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("consumer")
    package = folder / "moved elsewhere/headrace"
    shutil.copytree(sdk.library_dir().parent, package, ignore=shutil.ignore_patterns("*.pyc"))
    config = f"-Dheadrace_DIR={package / 'lib/cmake/headrace'}"
    return project.build(CMAKE, HERE / "consumer", folder / "build", config, f"-DEXAMPLES={project.EXAMPLES}")


@pytest.mark.parametrize("name", ["linked", "opened", "both"])
def test_the_delegate_registers_once(name: str, consumer: Path) -> None:
    """PK4: whether linked, opened at run time, or both; the engine's kernels and XNNPACK come with headrace."""
    done = project.run(consumer, consumer / name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 1 1\n", "")
    assert ("libheadrace_cuda.so" in needed(consumer / name)) == (name != "opened")


def test_the_small_library_needs_nothing_else(consumer: Path) -> None:
    """CS4: from C, with no CUDA toolkit; what the program and the library load is the C library."""
    done = project.run(consumer, consumer / "small")
    assert (done.returncode, done.stdout) == (0, "1 0 1\n"), done.stderr
    assert needed(consumer / "small") == ["libheadrace_stream.so", "libc.so.6"]
    # The loader is the C library's, which keeps the thread's state.
    needs = set(needed(sdk.library_dir() / "libheadrace_stream.so"))
    assert {"libc.so.6"} <= needs <= {"libc.so.6", "ld-linux-x86-64.so.2"}


def test_programs_find_the_libraries_of_the_package_they_were_built_with(consumer: Path) -> None:
    """PK2, PK4: the moved one, all of them."""
    done = project.run(consumer, "/usr/bin/ldd", consumer / "linked")
    paths = [line.split("=>")[1].rsplit(" (", 1)[0].strip() for line in done.stdout.splitlines() if "libheadrace" in line or "libexecutorch" in line]  # fmt: skip
    assert len(paths) == 8, done.stdout
    assert {str(Path(path).parent) for path in paths} == {
        str(consumer.parent / "moved elsewhere/headrace/lib")
    }


def test_the_first_program_of_the_page_is_built_and_prints_what_is_shown(tmp_path: Path) -> None:
    """PK4: docs/cpp.md, taken as it stands."""
    page = (project.ROOT / "docs/cpp.md").read_text()
    # The first of each kind.
    blocks = dict(reversed(re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)))
    assert set(blocks) == {"cpp", "cmake", "text"}
    (tmp_path / "main.cpp").write_text(blocks["cpp"])
    (tmp_path / "CMakeLists.txt").write_text(blocks["cmake"])
    built = project.build(CMAKE, tmp_path, tmp_path / "build", CONFIG)
    done = project.run(tmp_path, built / "first", project.DIGITS / "digits.pte")
    assert (done.returncode, done.stdout, done.stderr) == (0, blocks["text"], "")
    failed = project.run(tmp_path, built / "first", "nowhere.pte")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("nowhere.pte: expected")


# ------------------------------------------------------------------ examples/cpp


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project.build(CMAKE, project.EXAMPLES, tmp_path_factory.mktemp("cpp"), CONFIG)


@pytest.fixture(scope="session")
def answers() -> dict[str, np.ndarray]:
    """What Python answers, its own delegate included."""
    from examples.digits import normalize

    assert normalize.Normalize
    found = {}
    for program in ("digits.pte", "digits_split.pte"):
        sim = headrace.device("sim")
        with headrace.load(project.DIGITS / program, device=sim) as loaded:
            (found[program],) = loaded["forward"](project.images())
    return found


@pytest.mark.parametrize("option", [(), ("--sim",)], ids=["cpu", "sim"])
@pytest.mark.parametrize("program", ["digits.pte", "digits_split.pte"])
def test_the_application_answers_exactly_as_python_does(
    program: str, option: tuple[str, ...], built: Path, answers: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """PK4, CS1, CS3, BY2: bit for bit, and it says truly when a stream was set and which one its delegate ran on."""
    scores, lines = project.classify(program, built, tmp_path, *option)
    np.testing.assert_array_equal(scores, answers[program])
    project.check_lines(lines, "sim:0" if option else "cpu", split=program == "digits_split.pte")


def test_without_a_driver_the_application_says_what_is_missing(built: Path, tmp_path: Path) -> None:
    """GC4, PK4: with one, the test below compares its answers."""
    try:
        headrace.device("cuda:0")
    except headrace.DeviceError:
        project.images().tofile(tmp_path / "images")
        command = (built / "digits", project.DIGITS / "digits_split.pte", "images", "scores", "--cuda")
        done = project.run(tmp_path, *command)
        assert done.returncode == 1
        assert done.stderr.startswith("digits: cuda: expected an NVIDIA driver")
        assert not (tmp_path / "scores").exists()
    else:
        pytest.skip("there is a driver here")


@pytest.mark.cuda
@pytest.mark.parametrize("program", ["digits.pte", "digits_split.pte"])
def test_on_a_gpu_the_answers_are_the_same(
    program: str, built: Path, answers: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """PK4, CS1: the delegate launches its kernel on the caller's stream, and adds in the same order."""
    scores, lines = project.classify(program, built, tmp_path, "--cuda")
    np.testing.assert_array_equal(scores, answers[program])
    project.check_lines(lines, "cuda:0", split=program == "digits_split.pte")


def test_the_delegate_needs_the_small_library_alone(built: Path) -> None:
    """CS3: of headrace; the engine is what it is a delegate of."""
    ours = [n for n in needed(built / "libnormalize.so") if "headrace" in n]
    assert ours == ["libheadrace_stream.so"]
    exported = ctypes.CDLL(str(sdk.library_dir() / "libheadrace_stream.so"))
    assert exported.headrace_stream_abi() == 1


def test_modules_of_the_engine_run_on_the_guard_s_device(
    consumer: Path, answers: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """PK4, DM1, OR1: stock Module and DeviceGuard by the public headers alone; the delegate saw the guard's stream, and
    copies wait for it."""
    project.images().tofile(tmp_path / "images")
    done = project.run(tmp_path, consumer / "module", project.DIGITS / "digits_split.pte", "images", "scores")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 1\n", "")
    np.testing.assert_array_equal(
        np.fromfile(tmp_path / "scores", np.float32).reshape(-1, 10), answers["digits_split.pte"]
    )


def test_python_runs_the_delegate_of_cpp(built: Path) -> None:
    """CS3: loaded into a process of Python's it registers with the same engine, and reads the same selection."""
    out = succeeded(
        run_python(
            """
            import ctypes, sys
            import numpy as np
            import headrace
            from tests.sdk import project
            normalize = ctypes.CDLL(sys.argv[1])
            assert "DigitsNormalize" in headrace.engine.core.delegates()
            maps = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/lib" in line}
            names = sorted(p.rpartition("/")[2] for p in maps if "libexecutorch" in p or "libheadrace" in p)
            assert len(names) == len(set(names)), names
            print(*names)
            """,
            built / "libnormalize.so",
        )
    )
    assert {"libheadrace_stream.so", "libexecutorch.so"} <= set(out.split())
