"""From load to exit: files that change, memory that comes back, an interpreter that ends early."""

from __future__ import annotations

import os
import shutil
import textwrap
from pathlib import Path

import pytest

import headrace
from tests import programs
from tests.conftest import array_of, assert_close, run_python, succeeded


def check(loaded: headrace.Program, program: programs.Program) -> None:
    for call in program.calls:
        for got, want in zip(loaded[call.method](*map(array_of, call.inputs)), call.outputs, strict=True):
            assert_close(got, want, program.rtol, program.atol)


@pytest.mark.parametrize("name", ["mlp_portable", "mlp_xnnpack", "external_weights", "external_xnnpack"])
@pytest.mark.parametrize("what", ["deleted", "truncated", "overwritten", "replaced"])
def test_a_file_may_change_while_its_program_is_loaded(name: str, what: str, tmp_path: Path) -> None:
    """The bytes that were checked are the bytes that run."""
    program = programs.load(name)
    files = [Path(shutil.copy(p, tmp_path)) for p in (program.path, *program.data)]
    with headrace.load(files[0], data=files[1:], instances=2) as loaded:
        for file in files:
            size = file.stat().st_size
            if what == "deleted":
                file.unlink()
            elif what == "truncated":
                os.truncate(file, 0)
            elif what == "overwritten":
                with file.open("r+b") as stream:
                    stream.write(b"\xff" * size)
            else:
                other = tmp_path / "other"
                other.write_bytes(b"something else")
                other.rename(file)
        check(loaded, program)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("name", ["mlp_xnnpack", "external_weights"])
def test_a_program_comes_from_bytes_that_may_go_or_change(name: str, kind: type) -> None:
    """The bytes are copied; what the caller does with them afterwards changes nothing."""
    program = programs.load(name)
    sources = [bytearray(p.read_bytes()) for p in (program.path, *program.data)]
    given = [kind(source) for source in sources]
    with headrace.load(given[0], data=given[1:]) as loaded:
        for source, one in zip(sources, given, strict=True):
            for memory in (source, one):
                if not isinstance(memory, bytes):
                    memory[:] = b"\xff" * len(memory)
        del given, sources
        check(loaded, program)


def test_a_method_keeps_what_it_needs() -> None:
    program = programs.load("external_weights")
    method = headrace.load(program.path, data=program.data)["forward"]
    call = program.calls[0]
    assert_close(method(call.inputs[0].data)[0], call.outputs[0], program.rtol, program.atol)


def test_closing_twice_is_fine_and_calls_afterwards_are_refused() -> None:
    program = programs.load("two_methods")
    loaded = headrace.load(program.path)
    methods = list(loaded.values())
    loaded.close()
    loaded.close()
    for method in methods:
        inputs = next(c for c in program.calls if c.method == method.name).inputs
        with pytest.raises(headrace.ProgramError, match=f"^{method.name}: expected an open program, got one"):
            method(*map(array_of, inputs))
        assert method.inputs and method.outputs and method.stats.calls == 0
    assert loaded.memory().uses == ()


def test_two_hundred_cycles_of_load_call_and_close_are_flat() -> None:
    """LT3: resident memory, descriptors and mappings after the first ones."""
    out = succeeded(
        run_python(
            """
            import gc, os, headrace
            from tests import programs
            from tests.conftest import array_of
            names = ("mlp_portable", "cnn_xnnpack", "external_weights", "external_xnnpack", "two_methods", "loop")
            kept = [programs.load(n) for n in names]

            def cycle():
                for p in kept:
                    with headrace.load(p.path, data=p.data, instances=2) as loaded:
                        for c in p.calls[:1]:
                            loaded[c.method](*map(array_of, c.inputs))
                    loaded = headrace.load(p.path.read_bytes(), data=p.data)
                    held = [loaded[c.method](*map(array_of, c.inputs)) for c in p.calls[:1]]
                    try:
                        headrace.load(p.path.read_bytes()[:-64], data=[*p.data, *p.data])
                    except headrace.ProgramError:
                        pass

            def now():
                gc.collect()
                pages = int(open("/proc/self/statm").read().split()[1])
                return pages * 4, len(os.listdir("/proc/self/fd")), len(open("/proc/self/maps").readlines())

            for _ in range(20):
                cycle()
            before = now()
            for _ in range(200):
                cycle()
            after = now()
            print(before, after)
            assert after[0] - before[0] < 1024, "KiB resident"
            assert after[1] == before[1], "descriptors"
            assert after[2] - before[2] <= 4, "mappings"
            """,
            environment={"MALLOC_ARENA_MAX": "1"},
        )
    )
    assert out


def test_a_million_bytes_of_outputs_are_not_kept_for_ever() -> None:
    """Blocks beyond what a method keeps for later calls are freed."""
    program = programs.load("mlp_portable")
    x = program.calls[0].inputs[0].data
    with headrace.load(program.path) as loaded:
        held = [loaded["forward"](x) for _ in range(1000)]
        full = loaded.memory().nbytes()
        del held
        assert full - loaded.memory().nbytes() >= 900 * 4 * 64 * 4


EXITS = {
    "programs in globals": """
        program = headrace.load(P.path); y = program["forward"](*X)
        """,
    "a method alone": """
        method = headrace.load(P.path)["forward"]; y = method(*X)
        """,
    "in a cycle with itself": """
        program = headrace.load(P.path); box = [program]; box.append(box); program.__dict__["box"] = box
        """,
    "in thread-locals": """
        local = threading.local(); local.program = headrace.load(P.path)
        def go(): local.program = headrace.load(P.path); local.y = local.program["forward"](*X)
        t = threading.Thread(target=go); t.start(); t.join()
        """,
    "in an exit handler": """
        program = headrace.load(P.path)
        atexit.register(lambda: program["forward"](*X))
        """,
    "in a destructor at the very end": """
        class Late:
            def __init__(self): self.program = headrace.load(P.path)
            def __del__(self): self.program["forward"](*X); self.program.close()
        sys.late = Late()
        """,
    "in a thread that ends with the process": """
        program = headrace.load(P.path, instances=2)
        def go():
            while True: program["forward"](*X)
        for _ in range(4): threading.Thread(target=go, daemon=True).start()
        time.sleep(0.05)
        """,
    "loading in a thread that ends with the process": """
        def go():
            while True: headrace.load(P.path)["forward"](*X)
        for _ in range(3): threading.Thread(target=go, daemon=True).start()
        time.sleep(0.05)
        """,
    "waiting for its turn in a thread that ends with the process": """
        program = headrace.load(P.path)
        def go():
            while True: program["forward"](*X)
        for _ in range(8): threading.Thread(target=go, daemon=True).start()
        time.sleep(0.05)
        """,
    "leaving while a thread that ends with the process begins": """
        program = headrace.load(P.path)
        def go():
            while True: program["forward"](*X)
        threading.Thread(target=go, daemon=True).start()
        sys.exit(0)
        """,
    "in a forked child": """
        program = headrace.load(P.path); program["forward"](*X)
        child = os.fork()
        program["forward"](*X)
        if child == 0:
            headrace.load(P.path)["forward"](*X)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
}


@pytest.mark.parametrize("name", ["add", "cnn_xnnpack"])
@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_ends_well_with_a_live_program(how: str, name: str) -> None:
    """LT3: exit status 0 and nothing on stderr, whatever is alive and running."""
    code = """
import atexit, os, sys, threading, time, warnings, numpy as np, headrace
warnings.simplefilter("ignore")
from tests import programs
P = programs.load(sys.argv[1]); X = [v.data for v in P.calls[0].inputs]
""" + textwrap.dedent(EXITS[how])
    for _ in range(3):
        succeeded(run_python(code, name))


def test_a_process_forked_during_a_call_says_so() -> None:
    """LT3: the child neither hangs nor crashes; the parent goes on."""
    code = """
import os, threading, numpy as np, headrace
from examples.scale import PROGRAM, Scale
inside, go = threading.Event(), threading.Event()
class Waits(headrace.Delegate, name="Scale"):
    load = Scale.load
    def run(self, inputs, outputs, stream):
        inside.set()
        assert go.wait(60)
        Scale.run(self, inputs, outputs, stream)
program = headrace.load(PROGRAM, device="sim")
x, results = np.ones(4, np.float32), []
thread = threading.Thread(target=lambda: results.extend(program["forward"](x)))
thread.start()
assert inside.wait(60)
child = os.fork()
if child == 0:
    told = 0
    for use in (
        lambda: program["forward"](x),
        lambda: program["forward"].capture(x),
        lambda: headrace.load(PROGRAM, device="sim"),
        program.close,
    ):
        try:
            use()
        except headrace.EngineError as error:
            told += "forked" in str(error)
    os._exit(0 if told == 4 else 1)
assert os.waitpid(child, 0)[1] == 0
go.set()
thread.join()
np.testing.assert_array_equal(results[0].numpy(), 6 * x)
print("right")
"""
    assert succeeded(run_python(code)) == "right\n"
