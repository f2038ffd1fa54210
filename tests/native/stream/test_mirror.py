"""The selection in ExecuTorch's own caller-stream library for the length of a call (CS3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native import compiler
from tests.native.conftest import SHARED
from tests.native.stream.conftest import Run

Copy = Callable[..., Path]
Upstream = Callable[..., Path]


def test_without_such_a_library_nothing_happens(child: Run, built: Path) -> None:
    child(
        """
        stream = Stream(library)
        count, mirror = stream.begin(0x70)
        assert count == 0
        stream.end(mirror)
        assert stream.unmirrored() is None
        """,
        library=built,
    )


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_selection_is_mirrored_whoever_came_first(
    child: Run, built: Path, upstream: Upstream, first: str, mode: str
) -> None:
    child(
        """
        mode = getattr(ctypes, mode)
        if first == "ours":
            stream = Stream(library)
            count, mirror = stream.begin(0x60)      # an answer of "none" must not outlive the next load
            stream.end(mirror)
            assert count == 0
            theirs = Upstream(upstream, mode)
        else:
            theirs = Upstream(upstream, mode)
            stream = Stream(library)
        for value in (0x70, 0x80):
            assert theirs.get() is None
            count, mirror = stream.begin(value)
            assert (count, theirs.get()) == (1, value)
            stream.end(mirror)
        assert theirs.get() is None
        assert stream.get() is None                 # ours is not touched
        """,
        library=built,
        upstream=upstream(),
        first=first,
        mode=mode,
    )


def test_handle_zero_is_mirrored_as_one(child: Run, built: Path, upstream: Upstream) -> None:
    child(
        """
        stream, theirs = Stream(library), Upstream(upstream)
        for given, kept in ((0, 1), (1, 1), (2, 2)):
            count, mirror = stream.begin(given)
            assert (count, theirs.get()) == (1, kept)
            stream.end(mirror)
        """,
        library=built,
        upstream=upstream(),
    )


def test_calls_nest_and_their_own_selection_comes_back(child: Run, built: Path, upstream: Upstream) -> None:
    child(
        """
        stream, theirs = Stream(library), Upstream(upstream)
        theirs.select(0x10)
        _, outer = stream.begin(0x20)
        _, inner = stream.begin(0x30)
        assert theirs.get() == 0x30
        stream.end(inner)
        assert theirs.get() == 0x20
        stream.end(outer)
        assert theirs.get() == 0x10
        stream.end(outer)                           # ended already: nothing
        assert theirs.get() == 0x10
        """,
        library=built,
        upstream=upstream(),
    )


def test_nothing_selected_leaves_theirs_alone(child: Run, built: Path, upstream: Upstream) -> None:
    child(
        """
        stream, theirs = Stream(library), Upstream(upstream)
        theirs.select(0x10)
        count, mirror = stream.begin(0x20, selected=0)
        assert (count, theirs.get()) == (0, 0x10)
        stream.end(mirror)
        assert theirs.get() == 0x10
        """,
        library=built,
        upstream=upstream(),
    )


def test_other_threads_are_not_touched(child: Run, built: Path, upstream: Upstream) -> None:
    child(
        """
        stream, theirs = Stream(library), Upstream(upstream)
        begun, seen = threading.Barrier(9), {}
        def work(i):
            before = theirs.get()
            count, mirror = stream.begin(0x100 + i)
            begun.wait()                            # all are inside at once, this thread with nothing
            seen[i] = (before, count, theirs.get())
            begun.wait()
            stream.end(mirror)
            seen[i] += (theirs.get(),)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads: thread.start()
        begun.wait()
        assert theirs.get() is None
        begun.wait()
        for thread in threads: thread.join()
        assert seen == {i: (None, 1, 0x100 + i, None) for i in range(8)}
        """,
        library=built,
        upstream=upstream(),
    )


def test_two_of_them_under_different_names_are_both_served(
    child: Run, built: Path, upstream: Upstream, copy: Copy
) -> None:
    """ExecuTorch's wheel and Torch-TensorRT's bring one each."""
    child(
        """
        stream, one, two = Stream(library), Upstream(one), Upstream(two)
        count, mirror = stream.begin(0x70)
        assert (count, one.get(), two.get()) == (2, 0x70, 0x70)
        stream.end(mirror)
        assert (one.get(), two.get()) == (None, None)
        """,
        library=built,
        one=upstream(),
        two=copy(upstream(), "libexecutorch_extension_cuda.so"),
    )


def test_libraries_that_depend_on_theirs_do_not_count(
    child: Run, built: Path, upstream: Upstream, tmp_path: Path
) -> None:
    source = tmp_path / "delegate.cpp"
    source.write_text(
        "#include <optional>\nstruct CUstream_st;\n"
        "namespace executorch::extension::cuda { std::optional<CUstream_st*> getCallerStream(); }\n"
        'extern "C" long theirs() { auto s = executorch::extension::cuda::getCallerStream();'
        " return s ? reinterpret_cast<long>(*s) : -1; }\n"
    )
    theirs = upstream()
    rpath = f"-Wl,-rpath,{theirs.parent}"
    compiler.build("-std=c++20", *SHARED, rpath, source, theirs, "-o", tmp_path / "delegate.so")
    child(
        """
        stream, delegate = Stream(library), ctypes.CDLL(delegate)
        assert delegate.theirs() == -1
        count, mirror = stream.begin(0x70)
        assert (count, delegate.theirs()) == (1, 0x70)
        stream.end(mirror)
        assert delegate.theirs() == -1
        """,
        library=built,
        delegate=tmp_path / "delegate.so",
    )


def test_a_library_that_its_owner_closes_during_a_call_stays(
    child: Run, built: Path, upstream: Upstream
) -> None:
    child(
        """
        stream, theirs = Stream(library), Upstream(upstream)
        count, mirror = stream.begin(0x70)
        assert count == 1
        theirs.close()
        assert is_mapped(upstream)
        assert theirs.get() == 0x70
        stream.end(mirror)
        assert theirs.get() is None
        """,
        library=built,
        upstream=upstream(),
    )


def test_a_library_that_is_being_loaded_is_waited_for(child: Run, built: Path, upstream: Upstream) -> None:
    """Another thread is inside its constructors: its functions must not be called before they are done."""
    child(
        """
        stream = Stream(library)
        dlopen = ctypes.CDLL(None).dlopen           # as a foreign call it runs without the interpreter's lock
        loader = threading.Thread(target=dlopen, args=(upstream.encode(), os.RTLD_NOW))
        loader.start()
        deadline = time.monotonic() + 60
        while not is_mapped(upstream):
            assert time.monotonic() < deadline
        started = time.monotonic()
        while True:
            count, mirror = stream.begin(0x70)
            if count == 1: break
            assert count == 0 and time.monotonic() < deadline
        waited = time.monotonic() - started
        theirs = Upstream(upstream)
        assert ctypes.c_int.in_dll(theirs.library, "constructors_done").value == 1
        assert theirs.get() == 0x70
        assert waited > 0.1, waited                 # the constructor takes 0.5 s: it was waited for
        stream.end(mirror)
        loader.join()
        """,
        library=built,
        upstream=upstream("SLOW"),
    )


@pytest.mark.parametrize("wrong", ["KEEPS", "LARGER", "WITHOUT_GUARD"])
def test_one_that_behaves_otherwise_is_refused_by_name(
    child: Run, built: Path, upstream: Upstream, wrong: str
) -> None:
    child(
        """
        stream, right, other = Stream(library), Upstream(right), ctypes.CDLL(wrong)
        for _ in range(2):
            count, mirror = stream.begin(0x70)
            assert count == -1
            assert right.get() is None              # nothing is selected anywhere
            stream.end(mirror)
            assert stream.unmirrored() == wrong
        import _ctypes
        _ctypes.dlclose(other._handle)
        assert not is_mapped(wrong)
        assert stream.unmirrored() is None
        count, mirror = stream.begin(0x70)
        assert (count, right.get()) == (1, 0x70)
        """,
        library=built,
        right=upstream(),
        wrong=upstream(wrong),
    )


def test_more_than_there_is_room_for_is_refused_by_name(
    child: Run, built: Path, upstream: Upstream, copy: Copy
) -> None:
    names = {f"copy{i}": copy(upstream(), f"{i}/libextension_cuda.so") for i in range(5)}
    child(
        """
        stream = Stream(library)
        theirs = [Upstream(path) for path in (copy0, copy1, copy2, copy3)]
        count, mirror = stream.begin(0x70)
        assert (count, [t.get() for t in theirs]) == (4, [0x70] * 4)
        stream.end(mirror)
        fifth = Upstream(copy4)
        count, mirror = stream.begin(0x80)
        assert (count, stream.unmirrored()) == (-1, copy4)
        assert [t.get() for t in (*theirs, fifth)] == [None] * 5
        """,
        library=built,
        **names,
    )
