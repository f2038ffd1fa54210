"""The functions by which an AOTInductor library is called, compiled once and linked into every library.

Inductor (PyTorch 2.13) writes their source, the same for every model, in front of each model's own, and compiling it is about half of
what the C++ compiler does for an island. Here a model's source has the headers alone. Imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import cpp_builder
from torch._inductor.codegen import cpp_wrapper_cpu

__all__ = ["Interface", "left_out"]

SOURCE = Path(cpp_wrapper_cpu.__file__).parent / "aoti_runtime" / "interface.cpp"


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Models' sources are written without the interface's functions, whose object has to be linked in."""
    stock = cpp_wrapper_cpu.CppWrapperCpu._write_aoti_interface_header

    def headers(self: Any) -> None:
        lines = SOURCE.read_text().splitlines()
        self.header.splice("\n".join(line for line in lines if line.startswith("#include")) + "\n")

    cpp_wrapper_cpu.CppWrapperCpu._write_aoti_interface_header = headers
    try:
        yield
    finally:
        cpp_wrapper_cpu.CppWrapperCpu._write_aoti_interface_header = stock


class Interface:
    """The object of one compilation. ``folder`` keeps it for the next; ``run`` starts a compiler in a folder."""

    def __init__(self, folder: Path, run: Callable[[list[str], str], None]) -> None:
        self.folder = folder
        self.run = run
        self.object: Path | None = None

    def like(self, words: list[str], source: str, cwd: str) -> None:
        """Compile it as ``words`` compile the model's ``source``: with the same headers and options."""
        target = words[words.index("-o") + 1]
        rest = [word for word in words if word not in (source, target)]
        said = [*rest, torch.__version__, cpp_builder.get_compiler_version_info(words[0]), SOURCE.read_text()]
        name = hashlib.sha256("\0".join(said).encode()).hexdigest()[:32] + ".interface.o"
        self.object = self.folder / name
        if self.object.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, pending = tempfile.mkstemp(suffix=".o", dir=self.folder)
        os.close(handle)
        replaced = {source: str(SOURCE), target: pending}
        try:
            self.run([replaced.get(word, word) for word in words], cwd)
            os.replace(pending, self.object)
        except BaseException:
            os.unlink(pending)
            raise

    def linked(self, words: list[str]) -> list[str]:
        """The command ``words``, which links a library, with it."""
        if self.object is None:
            raise RuntimeError("a library is linked before its source was compiled")
        return [*words[:1], str(self.object), *words[1:]]
