"""Every public header compiles alone, and so does every example in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.native import compiler

HEADERS = sorted((compiler.INCLUDE / "headrace").glob("*.h"))
# What stands around a header's example: declarations before, the head of the function that it is the body of, and its
# end. An example in a header that is not here fails.
AROUND = {
    "caller_stream.h": ("", "void example(cudaStream_t stream) {", "}"),
    "capture.h": (
        "class MyCapture final : public headrace::IslandCapture {\n public:\n"
        "  explicit MyCapture(int) {}\n  std::string refusal() override { return {}; }\n};\n"
        "struct Payload { const void* data() const { return this; } };",
        "void example(Payload* payload, int state) {",
        "}",
    ),
    "device.h": ("", "headrace::Status example() {", "}"),
    "device_guard.h": (
        "struct Module { int forward(int x) { return x; } };",
        "headrace::Status example(Module module, int inputs, headrace::StreamHandle stream) {",
        "(void)outputs; return {}; }",
    ),
    "program.h": ("", "headrace::Status example(float* x) {", "}"),
    "status.h": (
        "namespace headrace { Result<int> number(); }",
        "headrace::Status example() {",
        "return {}; }",
    ),
}


def examples(header: Path) -> list[str]:
    """The indented stretches of the comments: four spaces and more behind the slashes."""
    lines = [re.match(r"\s*//(?: {4,}(.*))?$", line) for line in header.read_text().splitlines()]
    found: list[list[str]] = []
    for i, line in enumerate(lines):
        if line is None or line[1] is None:
            continue
        if i and lines[i - 1] is not None and lines[i - 1][1] is not None:
            found[-1].append(line[1])
        else:
            found.append([line[1]])
    return ["\n".join(block) for block in found]


@pytest.mark.parametrize("header", HEADERS, ids=lambda p: p.name)
def test_each_header_compiles_alone_and_so_do_its_examples(header: Path, tmp_path: Path) -> None:
    """CS4, PK4: with nothing before it, twice, and without any header of CUDA or of the engine on the path. An example
    is taken as it stands in the header's comments, as the body of a function."""
    include = f"#include <headrace/{header.name}>\n"
    before, begin, end = AROUND.get(header.name, ("", "", ""))
    text = include + include + before
    for i, example in enumerate(examples(header)):
        assert header.name in AROUND, f"{header.name}: expected what stands around its example, got none"
        text += f"\nnamespace example_{i} {{\n{begin}\n{example}\n{end}\n}}"
    source = tmp_path / "source.cpp"
    source.write_text(text + "\nint main() {}\n")
    # An example may name a variable to show it.
    options = (*compiler.STRICT, "-std=c++20", "-Wno-unused", "-fsyntax-only", "-I", compiler.INCLUDE)
    assert compiler.run(*options, source).stderr == "", text


def test_examples_are_found_and_headers_begin_with_their_contract() -> None:
    assert {h.name for h in HEADERS if examples(h)} == set(AROUND)
    for header in HEADERS:
        assert header.read_text().startswith("// ") and "#pragma once" in header.read_text()
