"""How a library gets into a process and out of it: names, copies, places, many processes, beside torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import headrace
from tests import programs
from tests.conftest import run_python, succeeded
from tests.native import compiler
from tests.programs import AOTI

from .conftest import arguments, assert_right, check, mapped

X = np.array([1, 2, 3], np.float32)
BUNDLED = Path(sys.modules["headrace._core"].__file__ or "").parent / "lib"

# Runs two programs, and prints from where their libraries were loaded.
RUN = """
from tests.aoti.conftest import check
from tests.programs import AOTI
places = set()
for name in ("add_one", "mlp"):
    with AOTI.load(name).open("cpu", options=OPTIONS) as loaded:
        check(AOTI.load(name), loaded)
        for line in open("/proc/self/maps"):
            if "memfd:headrace:" in line:
                places.add("memory")
            elif "/library.so" in line:
                places.add(line.split()[5].removesuffix("/library.so"))
print(*sorted(places))
"""


def test_two_different_libraries_one_after_the_other_are_two() -> None:
    """LT5: also where the second gets the descriptor number that the first one had."""
    first, second = AOTI.load("add_one"), AOTI.load("mlp_host")
    for _ in range(5):
        for program_ in (first, second):
            with program_.open("cpu") as loaded:
                check(program_, loaded)
    with first.open("cpu") as one, second.open("cpu") as two:
        for _ in range(3):
            check(first, one)
            check(second, two)


def test_a_library_is_mapped_once_however_often_it_is_loaded() -> None:
    """LT4: programs, instances and islands share it; it goes with the last, in whatever order they are closed."""
    before = mapped()
    programs_ = [AOTI.load("add_one").open("cpu", instances=3) for _ in range(4)]
    assert mapped() == before + 1
    for k in (2, 0, 3):
        programs_[k].close()
        assert mapped() == before + 1
        assert np.array_equal(programs_[1]["forward"](X)[0], X + 1)
    programs_[1].close()
    assert mapped() == before


def test_two_hundred_cycles_are_flat() -> None:
    """LT3, LT5: mappings, descriptors and threads, with calls from threads that live on; two libraries that take turns."""
    code = """
        import os, threading, queue
        import headrace
        from tests.aoti.conftest import arguments, assert_right, check
        from tests.programs import AOTI

        work, done = queue.Queue(), queue.Queue()
        def worker():
            while (job := work.get()) is not None:
                done.put(job())
        threading.Thread(target=worker, daemon=True).start()

        def cycle(k):
            program = AOTI.load(("add_one", "mlp_host")[k % 2])
            with program.open("cpu") as loaded:
                check(program, loaded)
                work.put(lambda: loaded["forward"](*arguments(program.calls[0])))
                assert_right(program, done.get(), program.calls[0])
            with AOTI.load("mlp").open(headrace.device("sim", schedule="late")) as loaded:
                loaded["forward"](AOTI.load("mlp").calls[0].inputs[0].data)

        def now():
            maps = open("/proc/self/maps").read().splitlines()
            files = [line for line in maps if "headrace:" in line]
            return len(files), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        for k in range(4):
            cycle(k)
        first = now()
        for k in range(200):
            cycle(k)
        print(first == now() and first[0] == 0, first, now())
        """
    assert succeeded(run_python(code, timeout_s=300)).startswith("True"), code


def child(options: str = "None", before: str = "") -> str:
    return f"{before}\nOPTIONS = {options}\n{RUN}"


def test_eight_processes_at_once() -> None:
    """LT5: each loads from memory of its own."""
    code = child()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=programs.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    for process in children:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "") and out == "memory\n", (out, err)


FORBID = """
import ctypes, struct
# A filter of the kernel's: memfd_create (319) is answered with EACCES, as where vm.memfd_noexec is 2.
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 319), (0x06, 0, 0, 0x00050000 | 13), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
program = struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
import os
try:
    os.memfd_create("x")
except PermissionError:
    pass
else:
    raise SystemExit("the filter does nothing")
"""


def test_where_memory_files_are_forbidden_a_private_folder_serves(tmp_path: Path) -> None:
    """LT5: one that the system has, or the user's; nothing is left in it."""
    out = succeeded(run_python(child(before=FORBID)))
    assert out.startswith(("/dev/shm/headrace-", "/tmp/headrace-")), out
    assert not Path(out.split()[0]).exists()
    options = repr({"CudaBackend": {"library_directory": str(tmp_path)}})
    out = succeeded(run_python(child(options, before=FORBID)))
    assert out.startswith(f"{tmp_path}/headrace-"), out
    assert list(tmp_path.iterdir()) == []


def in_namespace(tmp_path: Path, mounts: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run the code where ``mounts`` has been done, in a mount namespace of its own; skips where there is none."""
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"needs mount namespaces: {probe.stderr.strip()}")
    script = tmp_path / "run.py"
    script.write_text(code)
    command = f"set -e; {mounts}; exec {sys.executable} {script}"
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        cwd=programs.ROOT,
        env={**os.environ, "PYTHONPATH": str(programs.ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("how", ["noexec", "ro"])
def test_temporary_folders_that_hold_no_programs_are_no_obstacle(how: str, tmp_path: Path) -> None:
    """LT5: `noexec` and read-only: the library comes from memory."""
    mounts = "; ".join(f"mount -t tmpfs -o {how} none {folder}" for folder in ("/dev/shm", "/var/tmp"))
    done = in_namespace(tmp_path, mounts, child())
    assert (done.returncode, done.stdout) == (0, "memory\n"), done.stderr


def test_no_place_at_all_is_an_error_that_names_each_and_the_option(tmp_path: Path) -> None:
    """LT5, OP3: memory files forbidden, and the folder `noexec`."""
    place = tmp_path / "place"
    place.mkdir()
    code = (
        FORBID
        + f"""
import headrace
from tests.programs import AOTI
try:
    AOTI.load("add_one").open("cpu", options={{"CudaBackend": {{"library_directory": {str(place)!r}}}}})
except headrace.DelegateUnavailable as error:
    print(error)
"""
    )
    done = in_namespace(tmp_path, f"mount -t tmpfs -o noexec none {place}", code)
    assert done.returncode == 0, done.stderr
    for word in (
        "memory file: Permission denied",
        f"{place}: ",
        "failed to map segment",
        "library_directory",
    ):
        assert word in done.stdout, done.stdout
    assert not list(place.iterdir())


# ------------------------------------------------------------ beside torch


@pytest.fixture
def beside_torch(tmp_path: Path) -> dict[str, str]:
    """The environment in which the exporter's Python, with torch, has headrace too."""
    done = subprocess.run(
        [programs.export_python(), "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    extension = BUNDLED.parent / f"_core{done.stdout.strip()}"
    if not extension.exists():
        pytest.skip(f"the exporter's Python is of another version: no {extension.name}")
    package = tmp_path / "site" / "headrace"
    package.mkdir(parents=True)
    for folder in (Path(headrace.__file__).parent, BUNDLED.parent):
        for entry in folder.iterdir():
            if entry.name != "__pycache__" and not (package / entry.name).exists():
                (package / entry.name).symlink_to(entry)
    return {"PYTHONPATH": str(package.parent)}


def bindings(folder: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Where the loader bound `aoti_…` functions of libraries that were loaded from memory, and of all others: the
    library that has it, and the second word of its name. From what LD_DEBUG wrote into ``folder``."""
    ours, theirs = set(), set()
    line = re.compile(r"binding file (\S+) \[0\] to (\S+) \[0\]: normal symbol `aoti_([a-z]+)_")
    for log in folder.glob("bindings.*"):
        for source, target, word in line.findall(log.read_text(errors="replace")):
            # A question for a name (dlsym) is written down as a library's binding to itself.
            if source != target:
                (ours if "/proc/self/fd" in source else theirs).add((target.rpartition("/")[2], word))
    return ours, theirs


@pytest.mark.parametrize("order", ["ours first", "torch first"])
@pytest.mark.parametrize("scope", ["local", "global"])
def test_in_one_process_each_library_binds_its_own_functions(
    order: str, scope: str, beside_torch: dict[str, str], tmp_path: Path
) -> None:
    """DE1: our library binds our shims, torch's own runner binds torch's; also with torch loaded globally; both
    answer right."""
    package = AOTI.ensure() / "torch.pt2"
    ours = """
import headrace
from tests.programs import AOTI
loaded = AOTI.load("add_one").open("cpu")
assert np.array_equal(loaded["forward"](X)[0], X + 1)
"""
    theirs = f"""
import torch
{'ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)' if scope == "global" else ""}
model = torch._inductor.aoti_load_package({str(package)!r})
assert np.array_equal(model(torch.from_numpy(X)).numpy(), X + 1)
"""
    both = [ours, theirs] if order == "ours first" else [theirs, ours]
    again = """
assert np.array_equal(loaded["forward"](X + 1)[0], X + 2)
assert np.array_equal(model(torch.from_numpy(X + 1)).numpy(), X + 2)
loaded.close()
assert np.array_equal(model(torch.from_numpy(X)).numpy(), X + 1)
"""
    log = tmp_path / "bindings"
    code = "import ctypes\nimport numpy as np\nX = np.array([1, 2, 3], np.float32)\n" + "".join(both) + again
    environment = {**beside_torch, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(log)}
    done = run_python(code, environment=environment, python=programs.export_python(), timeout_s=300)
    assert done.returncode == 0, done.stderr
    ours_to, theirs_to = bindings(tmp_path)
    assert ours_to == {("libheadrace_shims.so", "hrace")}
    assert theirs_to == {("libtorch_cpu.so", "torch")}, theirs_to


PROGRAM = r"""
// Links libtorch and runs a library of torch's own beside a program of ours.
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>
#include "headrace/program.h"

extern "C" {
int aoti_torch_create_tensor_from_blob(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, void**);
int aoti_torch_get_data_ptr(void*, void**);
int aoti_torch_delete_tensor_object(void*);
int32_t aoti_torch_dtype_float32();
}

static float x[3] = {1, 2, 3};

static bool ours(const char* path) {
  if (!headrace::initialize().ok()) return false;
  auto file = headrace::Bytes::read(path);
  if (!file.ok()) return false;
  auto program = headrace::Program::load(*file, {});
  if (!program.ok()) { std::fprintf(stderr, "%s\n", program.status().message().c_str()); return false; }
  headrace::Value value;
  value.kind = headrace::Value::Kind::kTensor;
  value.tensor.data = x;
  value.tensor.ndim = 1;
  value.tensor.sizes[0] = 3;
  value.tensor.strides_bytes[0] = 4;
  std::vector<headrace::Value> out;
  headrace::Status status = (*program)->method("forward")->run({&value, 1}, {}, {}, out);
  if (!status.ok()) { std::fprintf(stderr, "%s\n", status.message().c_str()); return false; }
  const float* y = static_cast<const float*>(out[0].tensor.data);
  return y[0] == 2 && y[1] == 3 && y[2] == 4;
}

static bool theirs(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) { std::fprintf(stderr, "%s\n", dlerror()); return false; }
  auto create = reinterpret_cast<int (*)(void**, size_t, const char*, const char*)>(dlsym(library, "AOTInductorModelContainerCreateWithDevice"));
  auto run = reinterpret_cast<int (*)(void*, void**, size_t, void**, size_t, void*, void*)>(dlsym(library, "AOTInductorModelContainerRun"));
  void *container, *in, *out, *data;
  int64_t sizes[] = {3}, strides[] = {1};
  if (create(&container, 1, "cpu", nullptr) != 0) return false;
  if (aoti_torch_create_tensor_from_blob(x, 1, sizes, strides, 0, aoti_torch_dtype_float32(), 0, -1, &in) != 0) return false;
  if (run(container, &in, 1, &out, 1, nullptr, nullptr) != 0 || aoti_torch_get_data_ptr(out, &data) != 0) return false;
  const float* y = static_cast<const float*>(data);
  return y[0] == 2 && y[1] == 3 && y[2] == 4;
}

int main(int, char** argv) {
  bool first = std::strcmp(argv[1], "ours") == 0;
  bool a = first ? ours(argv[2]) : theirs(argv[3]);
  bool b = first ? theirs(argv[3]) : ours(argv[2]);
  std::printf("%d %d\n", a, b);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The program above, torch's library, and the folder of libtorch."""
    folder = tmp_path_factory.mktemp("linked")
    found = subprocess.run(
        [programs.export_python(), "-c", "import torch; print(torch.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    torch = Path(found.stdout.strip()) / "lib"
    with zipfile.ZipFile(AOTI.ensure() / "torch.pt2") as package:
        (name,) = [n for n in package.namelist() if n.endswith(".so")]
        (folder / "theirs.so").write_bytes(package.read(name))
    (folder / "main.cpp").write_text(PROGRAM)
    libraries = ["headrace", "headrace_cuda", "executorch_kernels_optimized", "executorch_backend_xnnpack"]
    compiler.build(
        "-std=c++20",
        f"-I{compiler.INCLUDE}",
        folder / "main.cpp",
        *("-o", folder / "main", "-Wl,--no-as-needed", f"-L{torch}", "-ltorch_cpu", "-lc10", f"-L{BUNDLED}"),
        *(f"-l{name}" for name in libraries),
        *(f"-Wl,-rpath,{BUNDLED}", f"-Wl,-rpath,{torch}", f"-Wl,-rpath-link,{BUNDLED}"),
    )
    return folder / "main", folder / "theirs.so", torch


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_in_a_program_that_links_libtorch_each_binds_its_own(
    first: str, program: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """DE1: libtorch's names are visible from the start there."""
    main, theirs, _ = program
    done = subprocess.run(
        [main, first, AOTI.load("add_one").path, theirs],
        env={**os.environ, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr
    ours_to, theirs_to = bindings(tmp_path)
    assert ours_to == {("libheadrace_shims.so", "hrace")}
    assert theirs_to == {("libtorch_cpu.so", "torch")}


def test_a_library_may_be_closed_on_another_thread_than_it_ran_on() -> None:
    """LT4, LT3: while the thread that ran it lives on, and after it ended."""
    import threading

    before = mapped()
    program_ = AOTI.load("add_one")
    loaded = program_.open("cpu")
    go, ended = threading.Event(), threading.Event()

    def run() -> None:
        assert_right(program_, loaded["forward"](*arguments(program_.calls[0])), program_.calls[0])
        ended.set()
        go.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ended.wait()
    loaded.close()
    assert mapped() == before
    go.set()
    thread.join()
    with program_.open("cpu") as again:
        check(program_, again)
