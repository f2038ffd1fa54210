"""Fixtures for the tests on a GPU. Whether there is one is asked in tests/conftest.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import headrace
from tests.contract.conftest import Golden, golden

from . import kernels


@pytest.fixture
def gpu() -> Any:
    return headrace.device("cuda:0")


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """CuPy's delegates behind the programs' names, and nothing left in flight or selected."""
    kernels.install()
    yield
    gpu = headrace.device("cuda:0")
    gpu.synchronize()
    gc.collect()  # lanes and streams that a test's cycles still hold
    gpu.trim()
    assert headrace.current_stream() is None


@pytest.fixture
def chain() -> Golden:
    """100 islands over two delegates, in the caller's memory."""
    return golden("chain100")


@pytest.fixture
def two() -> Golden:
    return golden("two_islands")


STREAMS = ("legacy", "per-thread", "blocking", "non-blocking", "urgent", "lane", "cupy", "torch", "cuda.core")


@pytest.fixture(params=STREAMS)
def stream(request: pytest.FixtureRequest, gpu: Any) -> Iterator[Any]:
    """A stream of every kind, as `stream=` takes it; `handle` is beside it where the kind has none of its own."""
    kind = request.param
    if kind == "torch":
        yield kernels.torch.cuda.Stream()
    elif kind == "cuda.core":
        device = kernels.core.Device(0)
        device.set_current()
        yield device.create_stream()
    elif kind == "cupy":
        yield kernels.cupy.cuda.Stream(non_blocking=True)
    elif kind == "lane":
        yield gpu.partition(sms=8).stream()
    else:
        yield {
            "legacy": gpu.legacy_stream,
            "per-thread": gpu.per_thread_stream,
            "blocking": lambda: gpu.stream(blocking=True),
            "non-blocking": gpu.stream,
            "urgent": lambda: gpu.stream(-5),
        }[kind]()
