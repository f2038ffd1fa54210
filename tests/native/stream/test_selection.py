"""The thread's selection (CS1, CS2, CS7): from C++, from C, and through the loader."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native import compiler
from tests.native.stream.conftest import HERE, Run

C = """
#include <headrace/caller_stream.h>
int main(void) {
  headrace_selection zero = {0, 2, 1};
  headrace_selection former = headrace_exchange_selection(zero);
  headrace_selection now = headrace_exchange_selection(former);
  if (headrace_stream_abi() != HEADRACE_STREAM_ABI || headrace_get_selection().selected) return 1;
  return former.selected == 0 && now.stream == (cudaStream_t)1 && now.device == 2 && now.selected == 1 ? 0 : 2;
}
"""


def link(built: Path) -> list[object]:
    return ["-I", compiler.INCLUDE, built, f"-Wl,-rpath,{built.parent}"]


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_guards_nest_and_restore_on_every_exit(tmp_path: Path, built: Path, standard: str) -> None:
    program = tmp_path / "selection"
    source = HERE / "selection.cpp"
    compiler.build(f"-std={standard}", *compiler.STRICT, source, *link(built), "-pthread", "-o", program)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "32 checks\n"


def test_c_programs_have_the_same_functions(tmp_path: Path, built: Path) -> None:
    (tmp_path / "program.c").write_text(C)
    options = ("-std=c11", *compiler.STRICT, tmp_path / "program.c", *link(built), "-o", tmp_path / "program")
    compiler.build(*options, language="c")
    assert subprocess.run([tmp_path / "program"]).returncode == 0


def test_library_may_be_loaded_late(child: Run, built: Path) -> None:
    """Threads that were there before it have no selection, and each gets its own."""
    child(
        """
        seen, loaded, looked = {}, threading.Event(), threading.Barrier(5)
        def work(name):
            loaded.wait()
            seen[name] = [stream.get()]
            stream.exchange(0x100 + name, name)
            looked.wait()
            seen[name].append(stream.get())
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads: thread.start()
        stream = Stream(library)
        assert stream.exchange(0x99) is None
        loaded.set()
        looked.wait()
        for thread in threads: thread.join()
        assert seen == {i: [None, (0x100 + i, i)] for i in range(4)}
        assert stream.get() == (0x99, -1)
        """,
        library=built,
    )


def test_nothing_selected_and_handle_zero_differ(child: Run, built: Path) -> None:
    child(
        """
        stream = Stream(library)
        assert stream.get() is None
        assert stream.exchange(0) is None
        assert stream.get() == (1, -1)
        assert stream.exchange(2, 5) == (1, -1)
        assert stream.exchange(0, 5, selected=0) == (2, 5)
        assert stream.get() is None
        """,
        library=built,
    )


def test_a_forked_process_keeps_its_thread_s_selection(child: Run, built: Path) -> None:
    child(
        """
        stream = Stream(library)
        stream.exchange(0x40, 1)
        pid = os.fork()
        if pid == 0:
            ok = stream.get() == (0x40, 1) and stream.exchange(0x50) == (0x40, 1)
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert stream.get() == (0x40, 1)
        """,
        library=built,
    )
