"""caller_stream.h compiles anywhere: with no CUDA toolkit, beside one in either order, as C and as C++ (CS4)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.native import compiler

C = """
headrace_selection use(cudaStream_t stream) {
  headrace_selection next = {stream, -1, 1};
  headrace_mirror mirror;
  if (headrace_stream_abi() != HEADRACE_STREAM_ABI) return headrace_get_selection();
  headrace_mirror_begin(&mirror, next);
  headrace_mirror_end(&mirror);
  return headrace_exchange_selection(next);
}
"""
CPP = """
#include <type_traits>
std::optional<cudaStream_t> use(cudaStream_t stream) {
  headrace::CallerStreamGuard outer(stream);
  headrace::CallerStreamGuard inner(nullptr, 3);
  return headrace::caller_stream();
}
using Guard = headrace::CallerStreamGuard;
static_assert(!std::is_copy_constructible_v<Guard> && !std::is_move_constructible_v<Guard>);
static_assert(!std::is_copy_assignable_v<Guard> && !std::is_move_assignable_v<Guard>);
static_assert(!std::is_default_constructible_v<Guard>);
static_assert(!std::is_convertible_v<cudaStream_t, Guard>);  // explicit: no guard by accident
static_assert(std::is_nothrow_constructible_v<Guard, cudaStream_t>);
static_assert(std::is_nothrow_destructible_v<Guard>);
static_assert(sizeof(headrace_selection) == 16);
"""
OURS = "#include <headrace/caller_stream.h>\n"
CUDA = "#include <cuda_runtime.h>\n"
# One and the same type, not merely two that stand side by side.
BOTH = """
void both() {
  headrace::CallerStreamGuard legacy(cudaStreamLegacy);
  headrace::CallerStreamGuard per_thread(cudaStreamPerThread);
}
"""


@pytest.fixture(scope="session")
def cuda_include() -> Path:
    """The folder of <cuda_runtime.h> from pip's own packages."""
    folders = set()
    for package, name in {
        "nvidia-cuda-runtime": "cuda_runtime.h",
        "nvidia-cuda-crt": "crt/host_config.h",
    }.items():
        distribution = importlib.metadata.distribution(package)
        (header,) = [f for f in distribution.files or () if f.as_posix().endswith(f"/include/{name}")]
        folders.add(Path(str(distribution.locate_file(header))).resolve().parents[name.count("/")])
    (folder,) = folders
    return folder


def compile_only(folder: Path, text: str, standard: str, *options: object) -> str:
    """The compiler's complaints about ``text``: empty if there are none."""
    language = "c++" if "++" in standard else "c"
    source = folder / f"source.{'cpp' if language == 'c++' else 'c'}"
    source.write_text(text)
    common = (*compiler.STRICT, f"-std={standard}", "-I", compiler.INCLUDE, "-fsyntax-only")
    done = compiler.run(*common, *options, source, language=language)
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr


@pytest.mark.parametrize("standard", ["c11", "c17", "c++17", "c++20"])
def test_header_compiles_alone(tmp_path: Path, standard: str) -> None:
    used = CPP if "++" in standard else C
    assert compile_only(tmp_path, OURS + used, standard) == ""
    assert compile_only(tmp_path, OURS + OURS + used, standard) == ""


@pytest.mark.parametrize("order", [OURS + CUDA, CUDA + OURS], ids=["before", "after"])
@pytest.mark.parametrize("standard", ["c11", "c++17", "c++20"])
def test_header_compiles_beside_cuda_runtime(
    tmp_path: Path, cuda_include: Path, standard: str, order: str
) -> None:
    used = CPP + BOTH if "++" in standard else C
    assert compile_only(tmp_path, order + used, standard, "-isystem", cuda_include) == ""


def test_header_reaches_for_no_cuda_header(tmp_path: Path) -> None:
    """Where the machine has a toolkit, compiling alone would not show it."""
    source = tmp_path / "source.cpp"
    source.write_text(OURS)
    listed = compiler.run("-std=c++17", "-I", compiler.INCLUDE, "-M", source)
    assert listed.returncode == 0, listed.stderr
    names = {Path(word).name for word in listed.stdout.replace("\\\n", " ").split()}
    assert {"caller_stream.h", "optional"} <= names
    assert not names & {"cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "driver_types.h", "vector_types.h"}


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("Guard other(guard);", "deleted function"),
        ("Guard other(std::move(guard));", "deleted function"),
        ("Guard other(stream); other = guard;", "deleted function"),
        ("Guard other(stream); other = std::move(guard);", "deleted function"),
        ("Guard other = stream;", "conversion"),
        ("auto* other = new Guard(stream);", "deleted function"),
        ("Guard{stream};", "nodiscard"),
        ("headrace::caller_stream();", "nodiscard"),
    ],
)
def test_misuse_does_not_compile(tmp_path: Path, statement: str, complaint: str) -> None:
    text = (
        OURS
        + "#include <utility>\nusing headrace::CallerStreamGuard; using Guard = CallerStreamGuard;\n"
        + "void use(cudaStream_t stream) {{ Guard guard(stream); {} }}\n"
    )
    assert compile_only(tmp_path, text.format(""), "c++20") == ""
    assert complaint in compile_only(tmp_path, text.format(statement), "c++20")
