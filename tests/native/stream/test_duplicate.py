"""Another copy of the library in the process is found, and both files are named (CS3)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import run_python, succeeded
from tests.native import compiler
from tests.native.conftest import SHARED
from tests.native.stream.conftest import Run

Copy = Callable[..., Path]

DEPENDS = """
#include <headrace/caller_stream.h>
extern "C" __attribute__((visibility("default"))) headrace_selection (*where())() { return headrace_get_selection; }
extern "C" __attribute__((visibility("default"))) int32_t theirs() {
  const auto now = headrace::caller_stream();
  return now ? static_cast<int32_t>(reinterpret_cast<intptr_t>(*now)) : -1;
}
"""
# Takes the address of an exported function, which a program that is not position-independent answers itself.
PROGRAM = """
#include <cstdio>
#include <headrace/caller_stream.h>
int main() {
  static int32_t (*volatile abi)() = headrace_stream_abi;
  char ours[4096] = "", other[4096] = "";
  const int count = headrace_find_duplicate(ours, sizeof ours, other, sizeof other);
  std::printf("%d %d\\n%s\\n%s\\n", abi(), count, ours, other);
}
"""


def test_one_copy_is_no_duplicate(child: Run, built: Path) -> None:
    child(
        """
        stream = Stream(library)
        assert stream.duplicates() == (0, library, "") or stream.duplicates() == (0, "", "")
        assert Stream(library).duplicates()[0] == 0
        """,
        library=built,
    )


@pytest.mark.parametrize("name", ["elsewhere/libheadrace_stream.so", "renamed.so", "libheadrace_stream.so.1"])
@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_a_copy_is_found_from_both_sides(child: Run, built: Path, copy: Copy, name: str, mode: str) -> None:
    child(
        """
        first = Stream(library, getattr(ctypes, mode))
        assert first.duplicates()[0] == 0           # and this answer is remembered until something is loaded
        second = Stream(other, getattr(ctypes, mode))
        for _ in range(2):
            assert first.duplicates() == (1, library, other)
            assert second.duplicates() == (1, other, library)
        """,
        library=built,
        other=copy(built, name),
        mode=mode,
    )


def test_a_third_copy_counts(child: Run, built: Path, copy: Copy) -> None:
    child(
        """
        first, *others = (Stream(path) for path in (library, second, third))
        assert first.duplicates() == (2, library, second)
        assert [other.duplicates() for other in others] == [(2, second, library), (2, third, library)]
        """,
        library=built,
        second=copy(built, "2.so"),
        third=copy(built, "3.so"),
    )


def test_a_copy_that_is_gone_is_no_duplicate(child: Run, built: Path, copy: Copy) -> None:
    child(
        """
        first, second = Stream(library), ctypes.CDLL(other)
        assert first.duplicates()[0] == 1
        import _ctypes
        _ctypes.dlclose(second._handle)
        assert not is_mapped(other)
        assert first.duplicates()[0] == 0
        Stream(other)
        assert first.duplicates() == (1, library, other)
        """,
        library=built,
        other=copy(built, "other.so"),
    )


def test_another_name_of_the_same_file_is_no_copy(child: Run, built: Path, tmp_path: Path) -> None:
    (tmp_path / "link.so").symlink_to(built)
    child(
        """
        first, second = Stream(library), Stream(link)
        first.exchange(0x70)
        assert second.get() == (0x70, -1)
        assert first.duplicates()[0] == 0
        """,
        library=built,
        link=tmp_path / "link.so",
    )


@pytest.mark.parametrize("hashes", ["gnu", "sysv", "both"])
def test_a_copy_inside_another_library_is_found(
    child: Run, built: Path, objects: list[Path], tmp_path: Path, hashes: str
) -> None:
    other = tmp_path / "libdelegate.so"
    compiler.build("-shared", f"-Wl,--hash-style={hashes}", *objects, "-o", other, "-ldl")
    child(
        """
        first = Stream(library)
        ctypes.CDLL(other)
        assert first.duplicates() == (1, library, other)
        """,
        library=built,
        other=other,
    )


def test_a_copy_inside_the_program_is_found(built: Path, objects: list[Path], tmp_path: Path) -> None:
    program, source = tmp_path / "program", tmp_path / "program.cpp"
    loads = "int main(int, char** arguments) {\n  if (dlopen(arguments[1], RTLD_NOW) == nullptr) return 1;"
    source.write_text("#include <dlfcn.h>\n" + PROGRAM.replace("int main() {", loads))
    compiler.build("-std=c++20", "-I", compiler.INCLUDE, source, *objects, "-rdynamic", "-o", program, "-ldl")
    done = subprocess.run([program, built], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 1", str(program), str(built)]


def test_libraries_that_depend_on_it_are_no_copies(child: Run, built: Path, tmp_path: Path) -> None:
    (tmp_path / "delegate.cpp").write_text(DEPENDS)
    # The older table lists what a library wants beside what it has.
    for name, hashes in (("one", "gnu"), ("two", "sysv")):
        options = ("-I", compiler.INCLUDE, f"-Wl,-rpath,{built.parent},--hash-style={hashes}")
        compiler.build(
            "-std=c++20", *SHARED, *options, tmp_path / "delegate.cpp", built, "-o", tmp_path / name
        )
    child(
        """
        one = ctypes.CDLL(one)
        stream = Stream(library)
        two = ctypes.CDLL(two)
        stream.exchange(0x70)
        assert one.theirs() == two.theirs() == 0x70
        assert stream.duplicates()[0] == 0
        """,
        library=built,
        one=tmp_path / "one",
        two=tmp_path / "two",
    )


@pytest.mark.parametrize("hashes", ["gnu", "sysv"])
@pytest.mark.parametrize(
    "kind", [("-fPIE", "-pie"), ("-fno-pie", "-no-pie"), ("-fno-pie", "-no-pie", "-rdynamic")]
)
def test_a_program_that_depends_on_it_is_no_copy(
    built: Path, tmp_path: Path, kind: tuple[str, ...], hashes: str
) -> None:
    program, source = tmp_path / "program", tmp_path / "program.cpp"
    source.write_text(PROGRAM)
    options = ("-I", compiler.INCLUDE, f"-Wl,-rpath,{built.parent},--hash-style={hashes}")
    compiler.build("-std=c++20", *kind, *options, source, built, "-o", program)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1 0"


def test_names_are_cut_to_the_room_there_is(child: Run, built: Path, copy: Copy) -> None:
    child(
        """
        first, second = Stream(library), Stream(other)
        assert first.duplicates(8) == (1, library[:7], other[:7])
        assert first.duplicates(1) == (1, "", "")
        assert first.duplicates(0) == (1, "", "")
        assert first.library.headrace_find_duplicate(None, 0, None, 0) == 1
        """,
        library=built,
        other=copy(built, "other.so"),
    )


# A copy of the same name that is there first is the one that headrace gets: one copy, and no duplicate.
OURS = str(Path(sys.modules["headrace._core"].__file__ or "").parent / "lib/libheadrace_stream.so")
SECOND = f"""
import ctypes, importlib
import numpy as np
ours = {OURS!r}
def refused(call):
    try:
        call()
    except ImportError as error:
        assert type(error).__name__ == "EngineError", type(error)
        assert ours in str(error) and other in str(error), error
        print("refused")
"""


@pytest.fixture
def theirs(objects: list[Path], tmp_path: Path) -> str:
    """Another copy, under a name that no library of headrace asks for."""
    library = tmp_path / "libtheirs.so"
    compiler.build("-shared", "-Wl,-soname,libtheirs.so", *objects, "-o", library, "-ldl")
    return str(library)


def test_a_second_copy_is_refused_at_load(theirs: str) -> None:
    """CS3: whoever brings it, whenever; programs that were loaded before go on."""
    code = """
import headrace
from tests.contract import delegates
from tests.contract.conftest import golden
delegates.install(delegates.OneCall)
program = golden("two_islands")
before = headrace.load(program.path, device="cpu")
ctypes.CDLL(other)
refused(lambda: headrace.load(program.path, device="cpu"))
refused(lambda: headrace.load(program.path, device="sim"))
inputs, outputs = program.calls[0]
(result,) = before["forward"](*inputs)
np.testing.assert_allclose(result, outputs[0], rtol=1e-5)
"""
    assert succeeded(run_python(f"other = {theirs!r}\n{SECOND}{code}")) == "refused\n" * 2


def test_a_second_copy_is_refused_at_import(theirs: str) -> None:
    """CS3: one that was there first, before anything runs on either."""
    code = """
ctypes.CDLL(other)
refused(lambda: importlib.import_module("headrace"))
"""
    assert succeeded(run_python(f"other = {theirs!r}\n{SECOND}{code}")) == "refused\n"
