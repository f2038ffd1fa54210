"""libheadrace_stream.so and ExecuTorch's caller-stream library by ctypes, for processes that hold nothing else.

Nothing here imports headrace: it brings a copy of the library of its own.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

NAME_NBYTES = 4096


class Selection(ctypes.Structure):
    """headrace_selection of caller_stream.h."""

    _fields_ = (("stream", ctypes.c_void_p), ("device", ctypes.c_int32), ("selected", ctypes.c_int32))


class Mirror(ctypes.Structure):
    """headrace_mirror of caller_stream.h."""

    _fields_ = (("count", ctypes.c_int32), ("guards", ctypes.c_void_p * 8 * 4))


class Answer(ctypes.Structure):
    """std::optional<cudaStream_t>."""

    _fields_ = (("stream", ctypes.c_void_p), ("selected", ctypes.c_bool))


class Selected(NamedTuple):
    stream: int
    device: int


class Stream:
    """One copy of libheadrace_stream.so, by its path."""

    def __init__(self, path: str, mode: int = ctypes.RTLD_LOCAL) -> None:
        self.library = ctypes.CDLL(path, mode=mode)
        self.library.headrace_get_selection.restype = Selection
        self.library.headrace_exchange_selection.restype = Selection
        self.library.headrace_exchange_selection.argtypes = [Selection]
        self.library.headrace_mirror_begin.argtypes = [ctypes.POINTER(Mirror), Selection]
        self.library.headrace_mirror_end.argtypes = [ctypes.POINTER(Mirror)]
        self.library.headrace_mirror_end.restype = None
        buffer = [ctypes.c_char_p, ctypes.c_size_t]
        self.library.headrace_find_duplicate.argtypes = buffer * 2
        self.library.headrace_find_unmirrored.argtypes = buffer

    @staticmethod
    def _selected(found: Selection) -> Selected | None:
        if not found.selected:
            assert (found.stream, found.device, found.selected) == (None, -1, 0)
            return None
        assert found.selected == 1
        return Selected(found.stream or 0, found.device)

    def get(self) -> Selected | None:
        return self._selected(self.library.headrace_get_selection())

    def exchange(self, stream: int, device: int = -1, selected: int = 1) -> Selected | None:
        return self._selected(self.library.headrace_exchange_selection(Selection(stream, device, selected)))

    def duplicates(self, nbytes: int = NAME_NBYTES) -> tuple[int, str, str]:
        """How many other copies; the file of this one and of the first other, empty if nothing was written."""
        ours, other = ctypes.create_string_buffer(NAME_NBYTES), ctypes.create_string_buffer(NAME_NBYTES)
        count = self.library.headrace_find_duplicate(ours, nbytes, other, nbytes)
        return count, ours.value.decode(), other.value.decode()

    def unmirrored(self) -> str | None:
        name = ctypes.create_string_buffer(NAME_NBYTES)
        return name.value.decode() if self.library.headrace_find_unmirrored(name, NAME_NBYTES) else None

    def begin(self, stream: int, selected: int = 1) -> tuple[int, Mirror]:
        mirror = Mirror()
        return self.library.headrace_mirror_begin(
            ctypes.byref(mirror), Selection(stream, 0, selected)
        ), mirror

    def end(self, mirror: Mirror) -> None:
        self.library.headrace_mirror_end(ctypes.byref(mirror))


class Upstream:
    """A library that exports ExecuTorch's caller stream, by its path."""

    def __init__(self, path: str, mode: int = ctypes.RTLD_LOCAL) -> None:
        self.library = ctypes.CDLL(path, mode=mode)
        symbol = "_ZN10executorch9extension4cuda"
        self.read = self.library[f"{symbol}15getCallerStreamEv"]
        self.read.restype = Answer
        self.construct = self.library[f"{symbol}17CallerStreamGuardC1EP11CUstream_st"]
        self.construct.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def get(self) -> int | None:
        found = self.read()
        return (found.stream or 0) if found.selected else None

    def select(self, stream: int) -> None:
        """As by a guard that never ends."""
        self.guard = ctypes.create_string_buffer(256)
        self.construct(self.guard, stream)

    def close(self) -> None:
        """Gives up this reference, as its owner would."""
        dlclose = ctypes.CDLL(None).dlclose
        dlclose.argtypes = [ctypes.c_void_p]
        assert dlclose(self.library._handle) == 0


def is_mapped(path: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.rstrip("\n").endswith(path) for line in maps)
