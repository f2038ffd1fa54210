"""The device cuda without a GPU: on a fake driver in host memory, and on machines whose driver lacks something.

The fake is compiled as libcuda.so.1 and found by LD_LIBRARY_PATH, so what is tested is what a user's machine opens.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from tests.conftest import run_python, succeeded
from tests.native import compiler
from tests.native.device import test_device as device_tests

HERE = Path(__file__).parent
NATIVE = compiler.ROOT / "native"
BUILD = compiler.ROOT / "build/native-tests"


@functools.cache
def fake(*without: str) -> Path:
    """The folder of a libcuda.so.1 that lacks what is named."""
    sources = [HERE / "fake_driver.cpp", NATIVE / "device/driver.h"]
    digest = hashlib.sha256(repr(without).encode() + b"".join(s.read_bytes() for s in sources)).hexdigest()[
        :20
    ]
    folder = BUILD / f"fake-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    device_tests.make(
        folder / "libcuda.so.1",
        *(
            "-std=c++20",
            "-O1",
            "-g",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Werror",
        ),
        *(f"-D{name}" for name in without),
        *(f"-I{NATIVE}", f"-I{compiler.INCLUDE}", HERE / "fake_driver.cpp"),
    )
    return folder


@functools.cache
def binary() -> Path:
    """The C++ tests, with AddressSanitizer; objects of the device are the other native tests' own."""
    flags = ["-std=c++20", *compiler.STRICT, "-O1", "-g", "-fno-omit-frame-pointer"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    BUILD.mkdir(parents=True, exist_ok=True)
    sources = [
        *sorted((NATIVE / "device").glob("*.cpp")),
        NATIVE / "cuda/temporaries.cpp",
        device_tests.HERE / "main.cpp",
        HERE / "test_cuda.cpp",
    ]
    objects = []
    for source in sources:
        digest = device_tests.digest(flags, source, *device_tests.HEADERS)
        target = BUILD / f"{source.stem}-{digest}.o"
        includes = (f"-I{NATIVE}", f"-I{compiler.INCLUDE}")
        objects.append(device_tests.make(target, *flags, *includes, "-c", source))
    target = BUILD / f"cuda-{device_tests.digest(flags, *objects)}"
    return device_tests.make(target, *flags, *objects, "-pthread", "-ldl")


def environment(folder: Path, **variables: str) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(folder), **variables}


@pytest.mark.parametrize(
    ("without", "version"),
    [((), "13000"), (("NO_NEWER",), "13000"), ((), "13010")],
    ids=["of CUDA 13.0", "of CUDA 12.4", "of CUDA 13.1"],
)
def test_the_device_keeps_the_rules(without: tuple[str, ...], version: str) -> None:
    """LT1, LT3, LT4, GR4, GR8, GC1, GC2, CS6, SY2, DM3, DM4: sentences in test_cuda.cpp; entry points that came later
    are looked up and done without."""
    # The fake makes some objects for the process, which are no leaks of ours: it counts those itself.
    variables = environment(fake(*without), ASAN_OPTIONS="detect_leaks=0", FAKE_VERSION=version)
    done = subprocess.run(
        [str(binary())], capture_output=True, text=True, env={**os.environ, **variables}, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-6000:] + done.stderr[-6000:]
    assert "32 tests" in done.stdout and " 0 failures" in done.stdout


def test_programs_and_arrays_on_the_fake_device(upstream: Callable[..., Path]) -> None:
    """SY4, SY5, DM3, CS3, CS5, CS6, LT3, DE3: from Python; what each part shows is in child.py."""
    right, wrong = str(upstream()), str(upstream("KEEPS"))
    child = f"from tests.native.cuda.child import main; main({right!r}, {wrong!r})"
    assert (
        succeeded(run_python(child, environment=environment(fake(), FAKE_DEVICES="2"), timeout_s=600))
        == "done\n"
    )


def test_graphs_on_the_fake_device() -> None:
    """GR1, GR2, GR3, GR4, GR5, GR6, GR8, BY3, LT4: from Python, with a fault at every call to the driver; what each part
    shows is in child_graphs.py."""
    child = "from tests.native.cuda.child_graphs import main; main()"
    assert succeeded(run_python(child, environment=environment(fake()), timeout_s=600)) == "done\n"


def test_aotinductor_on_the_fake_device() -> None:
    """DE1, DE5, SY4, LT2, LT3, LT4, GR1, GR2, OP3: a real CUDA library, with a fault at every call to the driver; what
    each part shows is in child_aoti.py."""
    child = "from tests.native.cuda.child_aoti import main; main()"
    done = run_python(child, environment=environment(fake(), FAKE_DEVICES="2"), timeout_s=600)
    # Libraries print the text of their own failures, and nothing else is printed.
    theirs = ("Error: ", "Failed to ")
    assert all(line.startswith(theirs) for line in done.stderr.splitlines()), done.stderr[-3000:]
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]


@pytest.mark.parametrize("without", [(), ("NO_NODES",)], ids=["of CUDA 13.0", "that tells no nodes"])
def test_compiled_kernels_are_looked_at_in_their_lane(without: tuple[str, ...]) -> None:
    """GC2: a real CUDA library on the fake device; what each part shows is in child_aoti.py."""
    child = f"from tests.native.cuda.child_aoti import look_at_a_lane as main; main(nodes={not without})"
    assert succeeded(run_python(child, environment=environment(fake(*without)))) == "done\n"


def test_a_library_for_another_gpu_is_refused_by_name() -> None:
    """DE5."""
    child = "from tests.native.cuda.child_aoti import refuse_another_architecture as main; main()"
    variables = environment(fake(), FAKE_CAPABILITY="100")
    assert succeeded(run_python(child, environment=variables)) == "done\n"


def test_an_engine_of_tensorrt_for_another_gpu_is_refused_by_the_driver_s_word() -> None:
    """DE2, OP3: the compute capability of a GPU is the driver's, for an engine that fits it and for one that does not."""
    out = succeeded(
        run_python(
            """
            import headrace
            from headrace.delegate import nvinfer
            from headrace.pte.tensorrt import Built, read, write
            from headrace.testing.tensorrt import StandIn, Tensor, bindings, build, stand_in
            x, y = Tensor("x", "float32", (4,)), Tensor("y", "float32", (4,))
            engine = build(inputs=[x], outputs=[y], steps=[{"op": "mul", "out": "y", "args": ["x", 2.0]}])
            module, gpu = StandIn("tensorrt_rtx", "1.0.0.0"), headrace.device("cuda:0")
            def load(capability):
                built = Built("tensorrt_rtx", "1.0.0.0", (capability,))
                return nvinfer.load_engine(read(write(engine, bindings(engine), (), built=built)), gpu)
            with stand_in("tensorrt_rtx", module):
                print(load("9.0").kind)
                try:
                    load("12.0")
                except headrace.DelegateUnavailable as error:
                    print(error)
            """,
            environment=environment(fake()),
        )
    )
    loaded, refused = out.splitlines()
    assert loaded == "tensorrt_rtx"
    assert re.search(
        r"for .*12\.0, .* on cuda:0, compute capability 9\.0: a GPU that the engine was not", refused
    )


MISSING = {
    "no driver": (None, {}, ("an NVIDIA driver", "none", "libcuda.so.1", "device='sim'", "--device cpu")),
    "not a driver": (("NO_DRIVER",), {}, ("a libcuda.so.1 that is none", "ldconfig")),
    "an old driver": ((), {"FAKE_VERSION": "11080"}, ("12.0 or newer", "CUDA 11.8", "update the driver")),
    "a driver that lacks an entry": (
        ("NO_POOL_ENTRY",),
        {},
        ("without cuMemPoolCreate", "update the driver"),
    ),
    "no GPU": ((), {"FAKE_DEVICES": "0"}, ("a GPU", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES")),
    "a driver that was updated": ((), {"FAKE_INIT": "803"}, ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart")),
    "no memory pools": ((), {"FAKE_NO_POOLS": "1"}, ("cuda:0, open", "stream-ordered memory pools", "vGPU")),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_named_with_what_to_do(what: str, tmp_path: Path) -> None:
    """GC4: by type, from device(), from load() and by the doctor; everything else works."""
    without, variables, words = MISSING[what]
    folder = tmp_path if without is None else fake(*without)
    out = succeeded(
        run_python(
            """
            import numpy as np
            import headrace
            from headrace.doctor import diagnose
            from tests.contract import delegates
            from tests.contract.conftest import golden

            delegates.install(delegates.OneCall)
            try:
                headrace.device("cuda:0")
            except headrace.DeviceError as error:
                print(error)
            program = golden("two_islands")
            try:
                headrace.load(program.path)
            except headrace.DeviceError as error:
                assert error.device == "cuda:0" and "two_islands.pte" in str(error)
                print(error)
            found = diagnose().cuda
            print(found.missing or found.gpus[0].problem)
            assert (headrace.device("sim").to_device(np.ones(3)).numpy() == 1).all()
            assert headrace.device("cpu").name == "cpu"
            """,
            environment=environment(folder, **variables),
        )
    )
    device, loaded, doctor = out.splitlines()
    for word in words:
        assert word in device and word in loaded, (word, device, loaded)
    assert words[-2] in doctor or words[0] in doctor


def test_without_green_contexts_the_rest_works() -> None:
    """GC1: split() says which entry point the driver lacks; nothing falls back."""
    out = succeeded(
        run_python(
            """
            import numpy as np
            import headrace
            from headrace.doctor import diagnose

            gpu = headrace.device("cuda:0")
            assert (gpu.to_device(np.ones(3), stream=gpu.stream()).numpy() == 1).all()
            assert gpu.sm_count == 132
            try:
                gpu.partition(sms=8)
            except headrace.DeviceError as error:
                print(error)
            print(diagnose().cuda.partitions)
            """,
            environment=environment(fake("NO_GREEN")),
        )
    )
    refusal, doctor = out.splitlines()
    assert "green contexts" in refusal and "cuDeviceGetDevResource" in refusal and "13.0" in refusal
    assert doctor == "the driver has no cuDeviceGetDevResource"


SHARED = {
    "a GPU without": (
        {"FAKE_GREEN": "801"},
        ("CUDA_ERROR_NOT_SUPPORTED", "cuDeviceGetDevResource", "whole device"),
    ),
    "MPS": (
        {"FAKE_GREEN": "801", "FAKE_MPS": "1"},
        ("cuDeviceGetDevResource", "under MPS", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    ),
    "MPS, later": (
        {"FAKE_GREEN_CREATE": "915", "FAKE_MPS": "1"},
        ("INVALID_RESOURCE_CONFIGURATION", "cuGreenCtxCreate", "under MPS", "without the MPS server"),
    ),
    "MPS, another failure": ({"FAKE_GREEN_CREATE": "700", "FAKE_MPS": "1"}, ("ILLEGAL_ADDRESS", "under MPS")),
    "MIG": (
        {"FAKE_GREEN": "914", "FAKE_NAME": "NVIDIA H200 MIG 1g.18gb"},
        ("a MIG instance", "NVIDIA H200 MIG 1g.18gb", "let an instance be the lane"),
    ),
}


@pytest.mark.parametrize("what", SHARED)
def test_a_gpu_that_is_shared_or_cannot_be_split_says_so_and_what_to_do(what: str) -> None:
    """GC1: a DeviceError; nothing falls back, nothing is taken; the planner and the doctor go on."""
    variables, words = SHARED[what]
    out = succeeded(
        run_python(
            """
            import numpy as np
            import headrace
            from headrace import lanes

            gpu = headrace.device("cuda:0")
            for _ in range(2):
                try:
                    gpu.partition(sms=8)
                except headrace.DeviceError as error:
                    assert error.device == "cuda:0"
                    print(error)
            if gpu.sm_limits["least"] == 0:
                try:
                    lanes.propose([lanes.Tenant("none.pte", (), target_us=1)], device=gpu)
                except headrace.DeviceError as error:
                    print(error)
            assert (gpu.to_device(np.ones(3), stream=gpu.stream()).numpy() == 1).all()
            """,
            environment=environment(fake(), **variables),
        )
    )
    lines = out.splitlines()
    assert len(lines) == (3 if "FAKE_GREEN" in variables else 2)
    for line in lines:
        assert line.startswith("cuda:0, split: ")
        for word in words:
            assert word in line, (word, line)


WORKQUEUES = {
    "granted": ({"FAKE_VERSION": "13010"}, "4 None"),
    "granted less": ({"FAKE_VERSION": "13020", "FAKE_CONNECTIONS": "2"}, "2 None"),
    "an older driver": (
        {},
        "cuda:0, split: expected a driver that gives green contexts workqueues (CUDA 13.1, driver 590), got one for CUDA "
        "13.0; update the driver, or ask for no workqueue concurrency limit",
    ),
    "a driver that has none all the same": (
        {"FAKE_VERSION": "13010", "FAKE_NO_WORKQUEUES": "1"},
        "got CUDA_ERROR_INVALID_RESOURCE_TYPE",
    ),
    "a driver that shares them": (
        {"FAKE_VERSION": "13010", "FAKE_UNBALANCED": "1"},
        "expected workqueues that are balanced with those of other partitions, got a limit of 4 in scope 0",
    ),
}


@pytest.mark.parametrize("what", WORKQUEUES)
def test_a_workqueue_concurrency_limit_is_granted_or_refused(what: str) -> None:
    """GC1: as read back from the context; a driver that lacks it is named and nothing is taken; the doctor agrees."""
    variables, want = WORKQUEUES[what]
    out = succeeded(
        run_python(
            """
            import headrace
            from headrace.doctor import diagnose

            gpu = headrace.device("cuda:0")
            try:
                lanes = [gpu.partition(sms=8, workqueue_concurrency_limit=4), gpu.partition(sms=8)]
                print(*[lane.workqueue_concurrency_limit for lane in lanes])
                del lanes
            except headrace.DeviceError as error:
                assert error.device == "cuda:0"
                print(error)
            assert gpu.partition(sms=132).sm_count == 132
            print(diagnose().cuda.workqueues)
            """,
            environment=environment(fake(), **variables),
        )
    )
    told, doctor = out.splitlines()
    assert want in told
    assert bool(doctor) == ("FAKE_VERSION" not in variables)
    assert not doctor or "CUDA 13.1" in doctor


DOCTOR = {
    "whole": ({}, False, False, None),
    "MPS": ({"FAKE_GREEN": "801", "FAKE_MPS": "1"}, True, False, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    "MPS that splits": ({"FAKE_MPS": "1"}, True, False, None),
    "MIG": (
        {"FAKE_GREEN": "914", "FAKE_NAME": "NVIDIA H200 MIG 1g.18gb"},
        False,
        True,
        "let an instance be the lane",
    ),
    "MIG that splits": ({"FAKE_NAME": "NVIDIA H200 MIG 1g.18gb"}, False, True, None),
    "a GPU without": ({"FAKE_GREEN": "801"}, False, False, "use the whole device"),
}


@pytest.mark.parametrize("what", DOCTOR)
def test_the_doctor_names_mps_and_mig_and_says_what_partitions_would(what: str) -> None:
    """GC1, GC4: in the words of the refusal of partition(), without a context, in text and as JSON."""
    variables, mps, mig, advice = DOCTOR[what]
    out = succeeded(
        run_python(
            """
            import ctypes
            import json
            import headrace
            from headrace import cli

            assert cli.main(["doctor", "--json"]) == 0
            print("----")
            assert cli.main(["doctor"]) == 0
            print("----")
            assert ctypes.CDLL("libcuda.so.1").fake_calls(b"cuDevicePrimaryCtxRetain") == 0
            try:
                print(headrace.device("cuda:0").partition(sms=8).sm_count)
            except headrace.DeviceError as error:
                print(error)
            """,
            environment=environment(fake(), **variables),
        )
    )
    as_json, text, refusal = out.split("----\n")
    cuda = json.loads(as_json)["cuda"]
    (found,) = cuda["gpus"]
    assert (found["mps"], found["mig"], cuda["partitions"]) == (mps, mig, "")
    (row,) = [line for line in text.splitlines() if line.startswith("cuda:0 ")]
    assert ("an MPS client" in row) == mps and ("a MIG instance" in row) == mig
    if advice is None:
        assert found["partitions"] == "" and "no partitions" not in row and refusal == "8\n"
    else:
        assert advice in found["partitions"] and f"no partitions: {found['partitions']}" in row
        assert refusal.strip().endswith(f"got {found['partitions']}")


def test_the_kernel_that_says_where_it_runs_assembles() -> None:
    """GC2: by NVIDIA's assembler, which comes with the exporter's Triton, for what it knows of; the fake reads no PTX."""
    source = (NATIVE / "device/cuda_probe.cpp").read_text()
    (code,) = re.findall(r'kCode = R"\((.*?)\)";', source, re.DOTALL)
    found = subprocess.run(
        [programs.export_python(), "-c", "import triton; print(triton.__path__[0])"],
        capture_output=True,
        text=True,
    )
    assembler = Path(found.stdout.strip()) / "backends/nvidia/bin/ptxas"
    if found.returncode or not assembler.exists():
        pytest.skip("the exporter's Python has no Triton: set HEADRACE_EXPORT_PYTHON")
    for architecture in ("sm_75", "sm_80", "sm_90"):
        done = subprocess.run(
            [assembler, f"-arch={architecture}", "-o", os.devnull, "-"],
            input=code,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), architecture


def test_our_declarations_are_nvidia_s() -> None:
    """Every signature, layout and number beside cuda.h, from pip's own package."""
    files = importlib.metadata.distribution("nvidia-cuda-runtime").files or ()
    (header,) = [f for f in files if f.as_posix().endswith("/include/cuda.h")]
    include = Path(str(header.locate())).parent
    source = HERE / "test_driver_declarations.cpp"
    compiler.build(
        *("-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-isystem", include),
        *(f"-I{NATIVE}", f"-I{compiler.INCLUDE}", source),
    )
