"""What the folders below share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native import compiler

HERE = Path(__file__).parent
SHARED = ("-fPIC", "-shared")


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A library that stands for ExecuTorch's: the right one, or a variant by the macro that makes it."""
    folder = tmp_path_factory.mktemp("upstream")

    @functools.cache
    def upstream(variant: str = "RIGHT") -> Path:
        library = folder / variant / "libextension_cuda.so"
        library.parent.mkdir()
        options = (
            "-std=c++20",
            *compiler.STRICT,
            *SHARED,
            f"-D{variant}",
            "-Wl,-soname,libextension_cuda.so",
        )
        compiler.build(*options, HERE / "stream/upstream.cpp", "-o", library)
        return library

    return upstream
