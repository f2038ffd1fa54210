"""What a program needs is asked for while it is loaded, and what is not there is named."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import headrace
from tests import programs
from tests.conftest import array_of, assert_close, run_python, succeeded


def test_a_missing_delegate_is_named_at_load() -> None:
    """DE5: nothing silently runs elsewhere; the message names what is there instead."""
    path = programs.load("not_there").path
    with pytest.raises(headrace.DelegateUnavailable) as caught:
        headrace.load(path)
    assert caught.value.delegate == "NotThere"
    assert f"{path}, method 'forward': expected the delegate 'NotThere', got these: " in str(caught.value)
    assert "XnnpackBackend" in str(caught.value)


def test_missing_kernels_are_named_at_load_all_of_them() -> None:
    """DE5"""
    program = programs.load("kernel_missing")
    with pytest.raises(headrace.DelegateUnavailable) as caught:
        headrace.load(program.path)
    assert caught.value.method == "forward"
    assert len(program.kernels_missing) == 2
    assert str(caught.value).startswith(f"{program.path}, method 'forward': expected kernels for '")
    assert "', got none; load the library that holds them" in str(caught.value)
    for kernel in program.kernels_missing:
        assert f"'{kernel}'" in str(caught.value)


def test_delegate_and_kernels_of_the_engine_work_in_one_program() -> None:
    """DE4: XNNPACK islands with CPU kernels between and around them."""
    program = programs.load("transformer_xnnpack")
    with headrace.load(program.path) as loaded:
        method = loaded["forward"]
        assert {island.delegate for island in method.islands} == {"XnnpackBackend"}
        instructions = program.view["program"]["execution_plan"][0]["chains"][0]["instructions"]
        kinds = [i["instr_args"]["type"] for i in instructions]
        assert {"DelegateCall", "KernelCall"} <= set(kinds)
        calls = [i for i, kind in enumerate(kinds) if kind == "DelegateCall"]
        assert [island.instruction for island in method.islands] == calls
        for call in program.calls:
            (got,) = method(*map(array_of, call.inputs))
            assert_close(got, call.outputs[0], program.rtol, program.atol)


@pytest.mark.parametrize("name", ["external_weights", "external_two_files", "external_partly"])
def test_missing_data_files_are_named_by_their_keys(name: str) -> None:
    program = programs.load(name)
    tensors = [
        value["val"]["extra_tensor_info"]["fully_qualified_name"]
        for value in program.view["program"]["execution_plan"][0]["values"]
        if (value["val"].get("extra_tensor_info") or {}).get("location") == "EXTERNAL"
    ]
    assert tensors
    with pytest.raises(headrace.ProgramError) as caught:
        headrace.load(program.path)
    assert f"{program.path}: expected data files with the keys " in str(caught.value)
    for key in tensors:
        assert f"'{key}'" in str(caught.value)


def test_one_of_two_data_files_is_not_enough() -> None:
    program = programs.load("external_two_files")
    for file in program.data:
        with pytest.raises(headrace.ProgramError, match="got 1 files without them") as caught:
            headrace.load(program.path, data=file)
        missing = "weight" if "biases" in file.name else "bias"
        assert f"'a.{missing}'" in str(caught.value) and f"'b.{missing}'" in str(caught.value)
    for order in (program.data, program.data[::-1]):
        with headrace.load(program.path, data=order) as loaded:
            call = program.calls[0]
            assert_close(loaded["forward"](call.inputs[0].data)[0], call.outputs[0], 1e-5, 1e-6)


def test_data_that_a_delegate_lacks_is_named_by_its_key() -> None:
    """DE5: the delegate asks by a name that the program's tables do not have."""
    program = programs.load("external_xnnpack")
    for data in ((), programs.load("external_weights").data):
        with pytest.raises(
            headrace.ProgramError, match=r"the data files lack the keys '[0-9a-f]{64}'"
        ) as caught:
            headrace.load(program.path, data=data)
        assert "forward" in str(caught.value)
        assert "'XnnpackBackend'" in str(caught.value)
        assert "damaged" not in str(caught.value)


def test_data_files_of_another_program_are_refused() -> None:
    """Same keys, other shapes: named with what was expected and what came."""
    program = programs.load("external_weights")
    data = bytearray(program.data[0].read_bytes())
    # In the file's table the sizes of 'a.weight' are the int32s 128 and 64.
    sizes = (2).to_bytes(4, "little") + (128).to_bytes(4, "little") + (64).to_bytes(4, "little")
    assert data.count(sizes) == 1
    at = data.index(sizes)
    data[at + 4 : at + 12] = (64).to_bytes(4, "little") + (128).to_bytes(4, "little")
    with pytest.raises(headrace.ProgramError) as caught:
        headrace.load(program.path, data=bytes(data))
    message = (
        "got data files of another program: 'a.weight': expected float32[128, 64], got float32[64, 128]; "
        "pass the .ptd files that were exported with it as data="
    )
    assert message in str(caught.value)


def test_a_program_is_no_data_file_and_a_key_comes_from_one_file() -> None:
    program = programs.load("external_weights")
    with pytest.raises(headrace.ProgramError, match=r"expected an ExecuTorch data file .* got 'ET12'"):
        headrace.load(program.path, data=program.path)
    with pytest.raises(
        headrace.ProgramError, match=r"expected keys that no other data file has, got 'a.weight'"
    ):
        headrace.load(program.path, data=[*program.data, *program.data])
    with pytest.raises(headrace.ProgramError, match=r"nowhere\.ptd: expected a file that can be read"):
        headrace.load(program.path, data="/nowhere.ptd")


BAD_SOURCES: dict[str, tuple[Any, str]] = {
    "None": (None, "expected a path or bytes, got NoneType"),
    "number": (3, "expected a path or bytes, got int"),
    "array": (np.zeros(8, np.uint8), "expected a path or bytes, got ndarray"),
    "folder": ("/", "/: expected a regular file, got another kind"),
    "device": ("/dev/null", "/dev/null: expected a regular file, got another kind"),
    "null character": ("/a\0b", "expected a path, got one with a null character"),
    "empty": (b"", "expected an ExecuTorch program ('ET12' at byte 4), got 0 bytes"),
    "noise": (b"\xff" * 100, "expected an ExecuTorch program ('ET12' at byte 4)"),
    "gaps": (memoryview(bytes(100))[::2], "expected contiguous memory, got a buffer with gaps"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_what_is_no_program_is_refused_by_name(case: str) -> None:
    """OP3, OP4: ProgramError, whatever came."""
    source, message = BAD_SOURCES[case]
    with pytest.raises(headrace.ProgramError) as caught:
        headrace.load(source)
    assert message in str(caught.value)
    if case != "None":
        with pytest.raises(headrace.ProgramError):
            headrace.load(programs.load("external_weights").path, data=[source])


def test_a_program_cut_short_anywhere_is_refused() -> None:
    data = programs.load("mlp_xnnpack").path.read_bytes()
    for size in range(0, len(data), 97):
        with pytest.raises(headrace.HeadraceError):
            headrace.load(data[:size])


def test_a_method_name_that_is_no_text_is_refused() -> None:
    data = programs.load("add").path.read_bytes()
    assert data.count(b"forward") == 1
    for bad in (b"for\xff\xfe\x80d", b"for\xed\xa0\x80d", b"fo\xc0\x80ard", b"forwar\xc3"):
        with pytest.raises(
            headrace.ProgramError, match=r"method name: expected UTF-8 without control characters, got 'fo"
        ):
            headrace.load(data.replace(b"forward", bad))
    name = "vörwrt"
    with headrace.load(data.replace(b"forward", name.encode())) as loaded:
        assert loaded.methods == (name,)
        assert loaded[name](np.ones(1, np.float32), np.ones(1, np.float32))[0] == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instances": 0}, "instances: expected a count between 1 and 1024, got 0"),
        ({"instances": 10**30}, "instances: expected a count between 1 and 1024, got 1000"),
        ({"instances": True}, "instances: expected an int, got bool"),
        ({"instances": 2.0}, "instances: expected an int, got float"),
        ({"allow_native_code": 0}, "allow_native_code: expected a bool, got int"),
        ({"options": [1]}, "options: expected a mapping, got list"),
        ({"options": {3: {}}}, "options: expected the names of delegates, got 3"),
        ({"options": {"XnnpackBackend": [1]}}, "options of 'XnnpackBackend': expected a mapping, got list"),
        ({"options": {"XnnpackBackend": {3: 1}}}, "options of 'XnnpackBackend': expected names, got 3"),
        (
            {"options": {"XnnpackBackend": {"k": 1.5}}},
            "options of 'XnnpackBackend': expected a bool, int or str for 'k', got float",
        ),
        (
            {"options": {"XnnpackBackend": {"k": 2**31}}},
            "options of 'XnnpackBackend': expected an int of 32 bits for 'k', got 2147483648",
        ),
        (
            {"options": {"XnnpackBackend": {"k" * 64: 1}}},
            "options of 'XnnpackBackend': expected a key of 1 to 63",
        ),
        ({"options": {"XnnpackBackend": {"": 1}}}, "options of 'XnnpackBackend': expected a key of 1 to 63"),
        (
            {"options": {"XnnpackBackend": {"k": "v" * 256}}},
            "expected a key of 1 to 63 bytes and a text of at most",
        ),
        ({"options": {"Other": {"k": 1}}}, "expected names of delegates that the program uses, got 'Other'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    """OP3"""
    with pytest.raises(headrace.OptionError) as caught:
        headrace.load(programs.load("mlp_xnnpack").path, **arguments)
    assert message in str(caught.value)


def test_native_code_can_be_refused_and_xnnpack_is_none() -> None:
    """A payload that runs as code is refused before anything of it is used."""
    with headrace.load(programs.load("mlp_xnnpack").path, allow_native_code=False) as loaded:
        assert loaded.methods == ("forward",)
    with pytest.raises(
        headrace.DelegateUnavailable, match=r"expected no native code .* got a payload for 'NotThere'"
    ):
        headrace.load(programs.load("not_there").path, allow_native_code=False)


def test_a_program_is_a_mapping_of_methods() -> None:
    with headrace.load(programs.load("two_methods").path) as loaded:
        assert loaded.methods == tuple(loaded)
        assert set(loaded) == {"scale", "compare"}
        assert len(loaded) == 2 and "scale" in loaded and "forward" not in loaded
        with pytest.raises(KeyError, match=r"expected one of the methods .*, got 'forward'"):
            loaded["forward"]
        assert "scale" in repr(loaded) and "1 inputs" in repr(loaded["scale"])


def test_what_a_method_takes_and_gives_can_be_asked() -> None:
    with headrace.load(programs.load("dynamic_batch").path) as loaded:
        (x,), (y,) = loaded["forward"].inputs, loaded["forward"].outputs
        assert (x.kind, x.dtype, x.shape, x.bounds, x.device) == (
            "tensor",
            "float32",
            (8, 64),
            ((0, 8), (0, 64)),
            "cpu",
        )
        assert (y.dtype, y.shape) == ("float32", (8, 64))
    with headrace.load(programs.load("unplanned_io").path) as loaded:
        assert [v.planned for v in (*loaded["forward"].inputs, *loaded["forward"].outputs)] == [False, False]
        assert loaded["forward"].inputs[0].bounds == ((4, 4), (64, 64))
    with headrace.load(programs.load("literal_outputs").path) as loaded:
        assert [v.kind for v in loaded["forward"].outputs] == ["tensor", "int", "bool", "float", "none"]


# ----------------------------------------------------------------- threads


def test_the_number_of_threads_is_set_while_nothing_is_loaded() -> None:
    """Delegates hold on to the pool that they were loaded with, so it does not change under them."""
    out = succeeded(
        run_python(
            """
            import headrace
            from tests import programs
            from tests.conftest import assert_close
            program = programs.load("cnn_xnnpack")
            assert headrace.num_threads() >= 1
            for count in (1, 3, 2):
                headrace.set_num_threads(count)
                assert headrace.num_threads() == count
                with headrace.load(program.path) as loaded:
                    for call in program.calls:
                        got = loaded["forward"](call.inputs[0].data)[0]
                        assert_close(got, call.outputs[0], program.rtol, program.atol)
                    try:
                        headrace.set_num_threads(4)
                    except headrace.OptionError as e:
                        assert "num_threads: expected no loaded program, got 1; set it before" in str(e)
                    else:
                        raise SystemExit("changed under a program")
                    assert headrace.num_threads() == count
            for bad, message in ((0, "between 1 and 1024, got 0"), (1025, "between 1 and 1024, got 1025"),
                                 (10**20, "between 1 and 1024"), ("3", "expected an int, got str"),
                                 (True, "expected an int, got bool"), (2.0, "expected an int, got float")):
                try:
                    headrace.set_num_threads(bad)
                except headrace.OptionError as e:
                    assert message in str(e), e
                else:
                    raise SystemExit(f"accepted {bad!r}")
            assert headrace.num_threads() == 2
            print("kept")
            """
        )
    )
    assert out == "kept\n"


def test_a_relative_path_and_a_path_object_name_the_same_file() -> None:
    path = programs.load("add").path
    for source in (path, str(path), os.path.relpath(path), os.fsencode(path).decode()):
        with headrace.load(source) as loaded:
            assert loaded.methods == ("forward",)
