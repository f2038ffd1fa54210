"""PK6: a build row is decided by its whole word; one classifier serves build, packaging and command."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.audit import rows
from headrace.audit.rows import Row, RowError, classify, toolkit_version

SCRIPT = Path(rows.__file__)
TRAINS = [("cu126", (12, 6)), ("cu130", (13, 0)), ("cu132", (13, 2))]
WITHOUT_CUDA = [
    ("", "cpu"),
    ("cpu", "cpu"),
    ("cpu-aarch64", "cpu"),
    ("cpu-cxx11-abi", "cpu"),
    ("cpu-s390x", "cpu"),
    ("rocm6.2", "rocm"),
    ("rocm6.2.4", "rocm"),
    ("rocm7", "rocm"),
    ("rocm13.2", "rocm"),
    ("rocm13.0", "rocm"),
    ("rocm12.6", "rocm"),
    ("xpu", "xpu"),
]
UNSUPPORTED = [
    "cu80",
    "cu92",
    "cu102",
    "cu113",
    "cu118",
    "cu121",
    "cu124",
    "cu125",
    "cu128",
    "cu129",
    "cu131",
    "cu133",
    "cu134",
    "cu140",
    "cu000",
    "cu1300",
]
NO_ROW = [
    "CU130",
    "Cu132",
    "cu",
    "cu1",
    "cu13.0",
    "cu-130",
    "cu_130",
    "cu130-full",
    "cu130-aarch64",
    "cu130a",
    "acu130",
    "xcu132",
    "cu132rocm",
    "cuda",
    "cuda13.0",
    "cuda-13.0",
    "13.0",
    "130",
    "+cu130",
    " cu130",
    "cu130 ",
    "cu130\n",
    "\tcpu",
    "cu13O",
    "cu１３０",
    "cu130;cpu",
    "cpu132",
    "cpu-cu130",
    "rocm",
    "rocm6.2.4.1",
    "rocmcu132",
    "rocm-13.2",
    "xpu132",
    "xpu2025",
    "XPU",
    "none",
    "mps",
    "$(cu130)",
    "cu1111111111111111111111111111111111111111",
]


@pytest.mark.parametrize(("word", "train"), TRAINS)
def test_supported_train_turns_cuda_on_by_name(word: str, train: tuple[int, int]) -> None:
    """PK6: explicit, so that a builder without a compiler fails while configuring."""
    row = classify(word)
    assert row == Row(word, "cuda", train)
    facts = row.facts()
    assert facts["HEADRACE_CUDA"] == "ON"
    assert facts["HEADRACE_CUDA_VERSION"] == "{}.{}".format(*train)
    assert facts["HEADRACE_CMAKE_ARGS"] == "-DHEADRACE_CUDA=ON"


@pytest.mark.parametrize(("word", "kind"), WITHOUT_CUDA)
def test_rows_without_cuda_turn_it_off_by_name(word: str, kind: str) -> None:
    """PK6: by the whole row, never by its digits: rocm13.2 is not cu132."""
    row = classify(word)
    assert (row.kind, row.cuda) == (kind, None)
    assert row.facts()["HEADRACE_CUDA"] == "OFF"


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_unsupported_train_names_the_supported_ones(word: str) -> None:
    """PK6."""
    with pytest.raises(
        RowError, match=rf"{word}.*unsupported.*cu126, cu130, cu132|{word[:60]}.*no known row"
    ):
        classify(word)


def test_cu118_and_cu125_are_told_apart_from_misspellings() -> None:
    """PK6."""
    for word in ("cu118", "cu125"):
        with pytest.raises(
            RowError, match=f"row {word}: an unsupported CUDA train; supported are cu126, cu130, cu132"
        ):
            classify(word)


@pytest.mark.parametrize("word", NO_ROW)
def test_a_word_that_is_no_row_is_refused(word: str) -> None:
    """PK6: what is misspelt must not be built as a CPU row."""
    with pytest.raises(RowError, match=r"cu126, cu130, cu132"):
        classify(word)


def test_the_table_holds_thirty_spellings_beyond_the_promise() -> None:
    """PK6."""
    promised = {
        "cu126",
        "cu130",
        "cu132",
        "cpu",
        "cpu-aarch64",
        "rocm6.2",
        "rocm13.2",
        "xpu",
        "",
        "cu118",
        "cu125",
    }
    tried = {word for word, _ in TRAINS + WITHOUT_CUDA} | set(UNSUPPORTED) | set(NO_ROW)
    assert promised <= tried
    assert len(tried - promised) >= 30


NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0
"""


@pytest.mark.parametrize("toolkit", ["13.0", "13.0.2", "13.0.88", "V13.0.88", " 13.0\n", NVCC])
def test_a_toolkit_of_the_row_is_taken(toolkit: str) -> None:
    """PK6."""
    assert toolkit_version(toolkit) == (13, 0)
    assert classify("cu130", toolkit).cuda == (13, 0)


@pytest.mark.parametrize(
    ("row", "toolkit", "named"),
    [
        ("cu130", "12.6", ("13.0", "12.6")),
        ("cu130", "13.2", ("13.0", "13.2")),
        ("cu132", NVCC, ("13.2", "13.0")),
        ("cu126", "12.60", ("12.6", "12.60")),
        ("cu126", "126.0", ("12.6", "126.0")),
    ],
)
def test_a_toolkit_of_another_major_or_minor_names_both(
    row: str, toolkit: str, named: tuple[str, str]
) -> None:
    """PK6."""
    with pytest.raises(RowError) as refusal:
        classify(row, toolkit)
    assert f"CUDA {named[0]} toolkit" in str(refusal.value)
    assert f"got {named[1]};" in str(refusal.value)


@pytest.mark.parametrize("toolkit", ["", "  ", "13", "thirteen", "nvcc: command not found", "13.0.0.0.0"])
def test_no_toolkit_is_not_any_toolkit(toolkit: str) -> None:
    """PK6: `--toolkit "$(nvcc --version)"` on a machine without nvcc."""
    with pytest.raises(RowError, match="nvcc"):
        classify("cu130", toolkit)


def test_a_row_without_cuda_looks_at_no_toolkit() -> None:
    """PK6: a builder may have a toolkit that a CPU row does not use."""
    assert classify("cpu", "12.6").cuda is None
    assert classify("", "").cuda is None


def run(*command: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path or os.environ["PATH"]}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)


def test_the_file_is_a_command_under_python3_or_python(tmp_path: Path) -> None:
    """PK6: whichever exists; here the one, the other, and neither."""
    for name in ("python3", "python"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(sys.executable)
        done = run("/bin/sh", str(SCRIPT), "cu130", path=str(folder))
        assert (done.returncode, done.stderr) == (0, "")
        assert "HEADRACE_CUDA_MAJOR=13\n" in done.stdout
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run("/bin/sh", str(SCRIPT), "cu130", path=str(empty))
    assert (done.returncode, done.stdout) == (127, "")
    assert "python3 or python" in done.stderr
    assert os.access(SCRIPT, os.X_OK)


def test_the_script_keeps_standard_error_and_says_so_by_its_exit_code() -> None:
    """PK6: a shell that captures the lines still shows why a row was refused."""
    refused = run(sys.executable, str(SCRIPT), "cu118")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "cu126, cu130, cu132" in refused.stderr
    usage = run(sys.executable, str(SCRIPT))
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "CU_VERSION" in usage.stderr
    other = run(sys.executable, str(SCRIPT), "cu130", "--toolkit", "")
    assert (other.returncode, other.stdout) == (1, "")
    assert "nvcc" in other.stderr


@pytest.mark.parametrize("word", ["cu132", "", "cpu-aarch64", "rocm6.2"])
def test_a_shell_reads_the_lines(word: str) -> None:
    """PK6: by eval, without quotes; the script never imports the package, which may not be built."""
    script = f'row=$("{sys.executable}" -I "{SCRIPT}" "{word}") || exit 9; eval "$row"'
    script += '; echo "$HEADRACE_ROW|$HEADRACE_CUDA|$HEADRACE_CUDA_MAJOR"'
    done = run("/bin/sh", "-euc", script)
    cuda = classify(word).cuda
    assert done.stdout == f"{word}|{'ON' if cuda else 'OFF'}|{cuda[0] if cuda else ''}\n"


def test_json_says_the_same_as_the_lines() -> None:
    """PK6."""
    told = json.loads(run(sys.executable, str(SCRIPT), "cu126", "--json").stdout)
    assert told["version"] == 1
    assert told["row"] == {"word": "cu126", "kind": "cuda", "cuda": [12, 6]}
    lines = run(sys.executable, str(SCRIPT), "cu126").stdout.splitlines()
    assert lines == [f"{name}={value}" for name, value in told["facts"].items()]


def test_every_row_has_every_name() -> None:
    """PK6: a build script under `set -u` may read each of them."""
    names = {tuple(classify(word).facts()) for word, _ in TRAINS + WITHOUT_CUDA}
    assert len(names) == 1


def test_the_file_is_read_by_an_old_python() -> None:
    """PK6: the Python of a build image; the file says 3.6."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"argparse", "json", "re", "sys", "typing"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_toolkit_at_hand_is_understood() -> None:
    """PK6: what the real compiler prints."""
    printed = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    assert toolkit_version(printed)[0] >= 11
