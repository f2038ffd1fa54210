"""What is refused before an island runs: options, libraries, payloads, memory; each by type, saying what and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import pte
from tests.conftest import run_python
from tests.programs import AOTI

from . import forge
from .conftest import arguments, check

ADD = "add_one"


def raw() -> bytes:
    return AOTI.load(ADD).path.read_bytes()


def call(program: bytes, *inputs: Any, **options: Any) -> Any:
    """Load and call the program once."""
    with headrace.load(program, **options) as loaded:
        return loaded["forward"](*inputs)


def refused(program: bytes, error: type[Exception], *words: str, **options: Any) -> Any:
    with pytest.raises(error) as caught:
        headrace.load(program, **options)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return caught.value


# ---------------------------------------------------------------- options


def test_a_shared_stream_of_the_delegate_s_own_is_not_supported() -> None:
    """OP1: true is NotSupported, what is no bool an OptionError, false is accepted."""
    program = AOTI.load(ADD)

    def options(value: Any) -> Any:
        return {"CudaBackend": {"use_shared_cuda_stream": value}}

    with pytest.raises(headrace.NotSupported, match=r"use_shared_cuda_stream.*caller"):
        program.open("cpu", options=options(True))
    for value in (1, 0, "true", ""):
        with pytest.raises(headrace.OptionError, match=r"expected a bool, got an? (int|text)") as caught:
            program.open("cpu", options=options(value))
        assert not isinstance(caught.value, headrace.NotSupported)
    with program.open("cpu", options=options(False)) as loaded:
        check(program, loaded)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("use_shared_cuda_streams", "use_shared_cuda_stream"),
        ("cuda_graph_for_method", "enable_cuda_graph_for_method"),
        ("library_dir", "library_directory"),
        ("weight_sharing", "weight_sharing_across_methods"),
    ],
)
def test_unknown_options_are_refused_naming_the_nearest(given: str, nearest: str) -> None:
    """OP2"""
    with pytest.raises(headrace.OptionError, match=f"got '{given}'; the nearest is '{nearest}'"):
        AOTI.load(ADD).open("cpu", options={"CudaBackend": {given: True}})


def test_options_that_would_not_be_honoured_are_refused(tmp_path: Path) -> None:
    """OP1, OP2: stock ExecuTorch's other options, and a folder that is none."""
    program = AOTI.load(ADD)
    for key in ("enable_cuda_graph_for_method", "skip_copy_output_to_cpu_for_method"):
        with pytest.raises(headrace.NotSupported, match=f"{key}.*got 'forward', which is not supported"):
            program.open("cpu", options={"CudaBackend": {key: "forward"}})
    for folder in ("relative", str(tmp_path / "none"), str(program.path)):
        with pytest.raises(headrace.OptionError, match="absolute path of a folder"):
            program.open("cpu", options={"CudaBackend": {"library_directory": folder}})
    accepted = {
        "enable_cuda_graph_for_method": "",
        "weight_sharing_across_methods": True,
        "library_directory": str(tmp_path),
    }
    with program.open("cpu", options={"CudaBackend": accepted}) as loaded:
        check(program, loaded)


# -------------------------------------------------------------- libraries


def test_a_damaged_library_is_refused_before_it_is_loaded() -> None:
    """LT5, OP3: one flipped bit anywhere in it is told by its SHA-256."""
    program = raw()
    _, offset, nbytes = forge.place(program)
    for at in (0, nbytes // 2, nbytes - 1):
        damaged = bytearray(program)
        damaged[offset + at] ^= 1
        refused(bytes(damaged), headrace.ProgramError, "SHA-256", "damaged, export it again")


def test_bytes_that_are_no_library_are_refused() -> None:
    """DE1: under their true name, so that the loader's own checks are what refuses them."""
    for other, words in (
        (b"not a library", "no ELF file"),
        (forge.library(raw())[:4000], "no dynamic symbols"),
        (forge.library(raw()).replace(b"\x7fELF\x02", b"\x7fELF\x01", 1), "not 64-bit"),
    ):
        refused(forge.replace_library(raw(), other), headrace.ProgramError, "AOTInductor made", words)


def test_a_missing_shim_is_named_with_the_library_s_symbol(tmp_path: Path) -> None:
    """DE1: before the library is loaded, as the library calls it."""
    head = 'extern "C" int aoti_torch_cpu_convolution(int); extern "C" int aoti_torch_cpu__fft_r2c();\n'
    body = "return aoti_torch_cpu_convolution(1) + aoti_torch_cpu__fft_r2c();"
    other = forge.replace_library(raw(), forge.shared_library(tmp_path, body, head=head))
    error = refused(
        other,
        headrace.DelegateUnavailable,
        "aoti_torch_cpu__fft_r2c, aoti_torch_cpu_convolution",
        "instruction",
    )
    assert error.delegate == "CudaBackend" and error.method == "forward"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"GLIBC_2.34\0", b"GLIBC_9.34\0", "'GLIBC_9.34' of libc.so.6 (this system has glibc "),
        (b"GLIBCXX_3.4.30\0", b"GLIBCXX_9.4.30\0", "'GLIBCXX_9.4.30' of libstdc++.so.6"),
        (b"GOMP_4.0\0", b"GOMP_9.0\0", "'GOMP_9.0' of libgomp.so.1"),
        (b"libgomp.so.1\0", b"libgomp.so.9\0", "the library 'libgomp.so.9' (libgomp.so.9: cannot open"),
    ],
)
def test_what_a_library_asks_of_the_system_is_checked_at_load(old: bytes, new: bytes, words: str) -> None:
    """DE1, DE5: glibc, libstdc++, libgomp, by version."""
    program = AOTI.load("mlp")
    original = program.path.read_bytes()
    made = forge.replace_library(original, forge.replace_everywhere(forge.library(original), old, new))
    refused(made, headrace.DelegateUnavailable, words, "asks of the system", data=program.data, device="cpu")


@pytest.mark.parametrize(
    ("march", "words"),
    [("x86-64-v9", "got code for 'x86-64-v9'"), ("znver4, ok", "got code for 'znver4, ok'")],
)
def test_code_for_a_processor_that_cannot_be_checked_is_refused(march: str, words: str) -> None:
    """DE1, DE5"""
    old = b'"march": "x86-64-v3"'
    new = f'"march": "{march}"'.encode()
    # The same length: the spec's JSON allows spaces.
    new += b" " * (len(old) - len(new))
    made = raw()
    if len(new) > len(old):
        old, new = (
            b'"version": 1, ' + old,
            (b'"version":1,' + f'"march":"{march}"'.encode()).ljust(len(old) + 14),
        )
    refused(forge.replace_everywhere(made, old, new), headrace.DelegateUnavailable, words)


def test_code_for_a_processor_that_this_one_is_not_is_refused() -> None:
    """DE1, DE5: x86-64-v4 where the processor lacks AVX-512."""
    has = "avx512f" in Path("/proc/cpuinfo").read_text()
    made = forge.replace_everywhere(raw(), b'"x86-64-v3"', b'"x86-64-v4"')
    if has:
        headrace.load(made).close()
    else:
        refused(made, headrace.DelegateUnavailable, "lacks instructions")


def test_a_library_without_aotinductor_s_functions_is_refused(tmp_path: Path) -> None:
    """DE1: another version's, or no library of AOTInductor at all; naming the first function that is missing."""
    library = forge.shared_library(tmp_path)
    without = library.replace(
        b"AOTInductorModelContainerGetNumOutputs\0", b"AOTInductorModelContainerGetNumOutputz\0"
    )
    refused(
        forge.replace_library(raw(), without),
        headrace.ProgramError,
        "AOTInductorModelContainerGetNumOutputs",
        "2.13",
    )


def test_what_a_library_says_when_it_fails_comes_with_the_error(tmp_path: Path) -> None:
    """OP3: at a call."""
    made = forge.replace_library(raw(), forge.shared_library(tmp_path))
    with pytest.raises(
        headrace.DelegateError,
        match="library: expected success while it ran, got: made to fail; call it with",
    ):
        call(made, np.zeros(3, np.float32))


def test_a_library_that_does_not_fit_the_program_is_refused(tmp_path: Path) -> None:
    """OP5: another number of inputs or outputs at load; another output at the call, and memory stays whole."""
    for inputs, outputs in ((2, 1), (0, 1), (1, 3)):
        library = forge.shared_library(tmp_path, inputs=inputs, outputs=outputs)
        refused(
            forge.replace_library(raw(), library),
            headrace.ProgramError,
            f"{outputs} outputs" if outputs > 1 else f"{inputs} inputs",
        )
    head = """
    #include <cstdint>
    extern "C" int aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
    """
    for ndim, size, dtype in ((1, 5, 6), (2, 3, 6), (1, 3, 7)):
        body = f"""
        int64_t sizes[] = {{{size}, 1}}, strides[] = {{1, 1}};
        return aoti_torch_empty_strided({ndim}, sizes, strides, {dtype}, 0, 0, out);
        """
        library = forge.shared_library(tmp_path, body, head=head)
        with pytest.raises(headrace.DelegateError, match="output 0: expected"):
            call(forge.replace_library(raw(), library), np.zeros(3, np.float32))
    # One that makes nothing.
    library = forge.shared_library(tmp_path, "out[0] = nullptr; return 0;")
    with pytest.raises(headrace.DelegateError, match="expected a tensor, got none"):
        call(forge.replace_library(raw(), library), np.zeros(3, np.float32))


PARALLEL = """
    // As Inductor writes it: one region, a barrier behind each loop, a check before each element.
    void* data = nullptr; int64_t sizes[] = {3}, strides[] = {1};
    aoti_torch_get_data_ptr(in[0], &data);
    const float* x = static_cast<const float*>(data);
    static float table[100]; static float sums[8]; float total = 0;
    for (int i = 0; i < 100; ++i) table[i] = 1;
    #pragma omp parallel num_threads(4)
    {
      for (int round = 0; round < 3; ++round) {
        #pragma omp for
        for (int i = 0; i < 1000; ++i) {
          int64_t index = i % 100;
          if (i == static_cast<int>(x[0]) || i == static_cast<int>(x[1])) index = int64_t{1} << 40;
          if (!(index < 100)) aoti_torch_check(false, "kernel", "file", 7, "index out of bounds: 0 <= index < 100");
          sums[i % 8] = table[index];
        }
      }
    }
    for (float s : sums) total += s;
    int code = aoti_torch_empty_strided(1, sizes, strides, 6, 0, 0, out);
    aoti_torch_get_data_ptr(out[0], &data);
    for (int i = 0; i < 3; ++i) static_cast<float*>(data)[i] = total;
    return code;
"""


@pytest.mark.parametrize("more", ["", "#pragma omp critical\n    total = 0;"])
def test_a_check_that_fails_on_a_thread_of_openmp_is_a_typed_error(more: str, tmp_path: Path) -> None:
    """OP3, OP5: one thread or two of a parallel region meet an index far outside: no access, no deadlock, no end of
    the process; and the next call is right. A library that uses more of OpenMP keeps its own regions."""
    head = """
    #include <cstdint>
    extern "C" {
    int aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
    int aoti_torch_get_data_ptr(void*, void**);
    void aoti_torch_check(bool, const char*, const char*, uint32_t, const char*);
    }
    """
    body = PARALLEL.replace("float total = 0;", f"float total = 0;\n    {more}\n")
    if more:
        body = body.replace("int64_t{1} << 40", "105 - 100")
    library = forge.shared_library(tmp_path, body, head=head, flags=("-fopenmp",))
    made = tmp_path / "program.pte"
    made.write_bytes(forge.replace_library(raw(), library))
    code = f"""
        import numpy as np
        import headrace
        with headrace.load({str(made)!r}, device="cpu") as loaded:
            told = 0
            for k in range(50):
                for bad in ([57, -1, 0], [57, 903, 0], [0, 999, 0]):
                    try:
                        loaded["forward"](np.array(bad, np.float32))
                    except headrace.DelegateError as error:
                        told += "index out of bounds: 0 <= index < 100 (kernel, line 7)" in str(error)
                assert loaded["forward"](np.array([-1, -1, -1], np.float32))[0].tolist() == [8, 8, 8]
            print(told)
        """
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "0\n" if more else "150\n"), done.stderr


def test_native_code_can_be_refused() -> None:
    """DE5: allow_native_code=False; nothing of the library is loaded."""
    refused(raw(), headrace.DelegateUnavailable, "runs as code in this process", allow_native_code=False)


# --------------------------------------------------------------- payloads


@pytest.mark.parametrize(
    ("magic", "words"),
    [
        (b"ETCUDAFQN4", "'ETCUDAFQN4', of another version of ExecuTorch"),
        (b"ETCUDAFQN5", "'ETCUDAFQN5', of another version of ExecuTorch"),
        (b"_so_blob\n_", "other bytes"),
        (b"\0" * 10, "other bytes"),
    ],
)
def test_payloads_of_other_versions_are_refused_by_name(magic: bytes, words: str) -> None:
    """DE1: and the advice is to export again."""
    error = refused(forge.replace_everywhere(raw(), b"ETCUDAFQN3", magic), headrace.ProgramError, words)
    assert "export it" in str(error)


def read(payload: bytes) -> str:
    """What the reader says of a payload; empty: it is well formed."""
    from headrace.engine import core

    try:
        core.read_aoti_payload(payload, "forward")
    except headrace.ProgramError as error:
        return str(error)
    return ""


def test_constants_that_reach_beyond_their_bytes_are_refused() -> None:
    """DE1: offset, sizes and strides against the size, with no overflow; what lies inside is accepted."""
    key = "0" * 64 + "_so_blob"

    def said(*args: Any, **other: int) -> str:
        return read(forge.payload(key, forge.constant("w", "k", *args, **other)))

    for args, other in (
        ((24, (2, 3), (3, 1)), {}),
        ((24, (3, 2), (1, 3)), {}),
        ((4, (), ()), {}),
        ((4, (5,), (0,)), {}),
        ((24, (2,), (3,)), {"offset": 2}),
        ((0, (0, 5), (1, 1)), {}),
        ((2, (1,), (1,)), {"dtype": 15}),
    ):
        assert said(*args, **other) == "", (args, other)
    for args, other in (
        ((23, (2, 3), (3, 1)), {}),
        ((24, (2,), (3,)), {"offset": 3}),
        ((24, (2, 3), (4, 1)), {}),
        ((0, (1,), (1,)), {}),
        ((24, (-1,), (1,)), {}),
        ((24, (2,), (-1,)), {}),
        ((24, (1,), (1,)), {"offset": -1}),
        ((24, (2**62, 4), (4, 1)), {}),
        ((24, (2**33, 2**33), (0, 0)), {}),
        ((24, (2,), (2**62,)), {"offset": 2**62}),
        ((2**64 - 1, (2**61,), (1,)), {"offset": 2**63 - 1}),
    ):
        assert "reaches beyond its bytes" in said(*args, **other), (args, other)
    assert "dtype number 12" in said(24, (1,), (1,), dtype=12)
    assert "dtype number -1" in said(24, (1,), (1,), dtype=-1)
    assert "device type 2" in said(24, (1,), (1,), device=2)
    assert "rank 17" in said(24, (1,) * 17, (1,) * 17)


def test_payloads_that_are_cut_off_or_too_long_are_refused() -> None:
    """DE1: the cursor ends where the payload does."""
    key = "0" * 64 + "_so_blob"
    whole = forge.payload(key, forge.constant("w", "k", 24, (2, 3), (3, 1)))
    assert read(whole) == ""
    for end in range(1, len(whole)):  # nothing at all is an older form
        assert read(whole[:end]) != "", end
    assert "1 bytes behind its end" in read(whole + b"\0")
    assert "4294967295 constants in too few bytes" in read(forge.payload(key, count=2**32 - 1))
    assert "is no text" in read(whole.replace(b"w", b"\xff", 1))


def test_data_that_a_payload_names_must_be_there_and_of_its_size(tmp_path: Path) -> None:
    """DE1, OP4: a data file that is missing, one of another program, and one with other bytes under the same name."""
    program, other = AOTI.load("mlp_resident"), AOTI.load("constants")
    raw = program.path.read_bytes()
    key = pte.read_data(program.data[0]).entries[0].key
    for data in ((), other.data):
        refused(raw, headrace.ProgramError, key, "got none", "pass the .ptd files", data=data)
    foreign = other.data[0].read_bytes()
    for entry in pte.read_data(foreign).entries:
        path = tmp_path / "foreign.ptd"
        path.write_bytes(forge.replace_everywhere(foreign, entry.key.encode(), key.encode()))
        with pytest.raises(headrace.ProgramError, match=f"bytes under the key '{key}', got {entry.nbytes}"):
            headrace.load(raw, data=[path])


# ------------------------------------------------------------- host specs


def host_spec(program: bytes) -> bytes:
    found = re.search(rb'\{"version": 1.*?\]\]\}', program)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (b'{"version": 2}', "expected version 1, got 2"),
        (b"{}", "expected version 1, got none"),
        (b'{"version": 1, "outputs": []}', "expected the sizes of 1 outputs"),
        (b'{"version": 1, "outputs": [[3], [3]]}', "expected the sizes of 1 outputs"),
        (b'{"version": 1, "outputs": [["s0"]]}', "a symbol that is defined, got 's0'"),
        (b'{"version": 1, "symbols": {"a": [7, 0]}, "outputs": [["a"]]}', "got one of input 7"),
        (b'{"version": 1, "marsh": ""}', "got 'marsh'"),
        (b"[", "expected '{'"),
        (b"\xff\xfe", "expected '{'"),
        (b'{"version": 1, "outputs": [["((((3"]]}', "expected ')'"),
        (b'{"version": 1, "outputs": [["3 3"]]}', "expected the end"),
        (b'{"version": 99999999999999999999}', "expected an integer"),
    ],
)
def test_damaged_host_specs_are_refused(new: bytes, words: str) -> None:
    """OP3: what was expected, where, and what came."""
    old = host_spec(raw())
    assert len(new) <= len(old)
    refused(raw().replace(old, new.ljust(len(old))), headrace.ProgramError, "headrace_host", words)


def test_sizes_that_cannot_be_computed_are_refused_at_the_call() -> None:
    """OP5: a division by zero, an overflow, a negative size; and one beyond the plan's bounds."""
    program = AOTI.load("dynamic_sizes")
    original = program.path.read_bytes()
    found = re.search(rb'\["\(3 \* (s\d)\)"\]', original)
    assert found is not None, host_spec(original)
    old, symbol = found[0], found[1]
    inputs = arguments(program.calls[0])
    for new, words in (
        (b"1//0", "a division by zero"),
        (b"-2", "a negative size"),
        (b"9**", "expected"),
        (b"99", "within the plan's bounds"),
    ):
        made = original.replace(old, (b'["' + new + b'"]').ljust(len(old)))
        for device in ("cpu", headrace.device("sim", schedule="late")):
            with pytest.raises(
                (headrace.InputError, headrace.DelegateError, headrace.ProgramError), match=words
            ):
                call(made, *inputs, device=device, data=program.data)
    # A size that the library does not make: told when its work runs.
    made = original.replace(old, b'["(2 * ' + symbol + b')"]')
    with pytest.raises(headrace.DelegateError, match=r"output 2: expected float32\[10\].*got float32\[15\]"):
        call(made, *inputs, device=headrace.device("sim"), data=program.data)


# ----------------------------------------------------------------- memory


def test_a_cuda_library_says_that_its_kernels_need_a_gpu(tmp_path: Path) -> None:
    """DE1, DM2: named before anything of it runs: where its kernels do not run, and host memory where it needs
    device memory."""
    program = AOTI.load("embeddings")
    planned = forge.for_cuda(program.path.read_bytes())
    error = refused(
        planned,
        headrace.DelegateUnavailable,
        "kernels run nowhere else, got cpu",
        device="cpu",
        data=program.data,
    )
    assert error.delegate == "CudaBackend"
    refused(
        planned,
        headrace.DelegateUnavailable,
        "kernels run nowhere else, got sim:0",
        device=headrace.device("sim"),
        data=program.data,
    )
    hosted = forge.for_cuda(raw())
    refused(
        hosted,
        headrace.DelegateUnavailable,
        "expected device memory",
        "got host memory for its argument 0",
        device="cpu",
    )


@pytest.mark.parametrize(
    ("value", "words"), [(b"x", "expected a number in decimal, got 'x'"), (b"-", "got '-'"), (b"2", "of 2")]
)
def test_a_number_of_inputs_that_is_not_the_librarys_is_refused(value: bytes, words: str) -> None:
    """OP3: the compile spec that says how many of an island's arguments are inputs."""
    program = bytearray(raw())
    at = program.index(b"headrace.inputs") - 8  # the key's length and the value's padding are between
    assert program[at : at + 1] == b"1"
    program[at : at + 1] = value
    refused(
        bytes(program),
        headrace.ProgramError,
        "compile spec 'headrace.inputs'",
        words,
        "export it again",
        device="cpu",
    )
