"""Compiled islands, kept by content in a folder of the user's. Imports no torch.

One file an island, named by a hash over all that goes into it; its bytes end with their own hash, so that what is
damaged is compiled again. Files are written beside their names and moved there: several processes may read and
write at once, and the last one's file is as good as the first's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "Store", "current", "folder_of", "using"]

# In the environment: 0 turns the cache off, a path moves it.
# Writing a file takes less.
LEFT_BEHIND_S = 3600
VARIABLE = "HEADRACE_EXPORT_CACHE"
MAGIC = b"HRISLAND1"
MOST_NBYTES = 2 << 30

_current: ContextVar[Store | None] = ContextVar("headrace.export.cache", default=None)


def folder_of(option: bool | str | os.PathLike[str], environment: Mapping[str, str]) -> Path | None:
    """Where islands are kept: a path is taken as it is; True asks ``HEADRACE_EXPORT_CACHE``, then ``XDG_CACHE_HOME``,
    then ``~/.cache``. None: nowhere."""
    if not isinstance(option, bool):
        return Path(option)
    said = environment.get(VARIABLE, "")
    if not option or said == "0":
        return None
    if said:
        return Path(said)
    base = environment.get("XDG_CACHE_HOME", "")
    # The specification ignores a relative path.
    home = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return home / "headrace" / "islands"


class Store:
    """A folder of compiled islands, of at most ``most_nbytes``: those that were not used longest go first."""

    def __init__(self, folder: Path, most_nbytes: int = MOST_NBYTES) -> None:
        self.folder = folder
        self.most_nbytes = most_nbytes

    def read(self, key: str) -> tuple[Any, list[bytes]] | None:
        """What ``write`` was given under ``key``; None where there is nothing, or nothing whole."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        body, digest = data[:-32], data[-32:]
        if not body.startswith(MAGIC) or hashlib.sha256(key.encode() + body).digest() != digest:
            return None
        at = len(MAGIC)
        parts = []
        while at < len(body):
            (nbytes,) = struct.unpack_from("<Q", body, at)
            parts.append(body[at + 8 : at + 8 + nbytes])
            at += 8 + nbytes
        return json.loads(parts[0]), parts[1:]

    def write(self, key: str, header: Any, blobs: Sequence[bytes]) -> None:
        """Keep ``header``, which JSON can hold, and ``blobs``. A folder that cannot be written keeps nothing."""
        parts = [json.dumps(header).encode(), *blobs]
        body = MAGIC + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, pending = tempfile.mkstemp(prefix=".pending-", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(body + hashlib.sha256(key.encode() + body).digest())
                os.replace(pending, self._path(key))
            except BaseException:
                os.unlink(pending)
                raise
            self._prune()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.island"

    def _prune(self) -> None:
        found = []
        for path in self.folder.glob(".pending-*"):
            # What an export left that was killed while it wrote.
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFT_BEHIND_S:
                    path.unlink()
        for path in self.folder.glob("*.island"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found)[:-1]:
            if total <= self.most_nbytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def current() -> Store | None:
    """The store of the export that runs, or None."""
    return _current.get()


@contextlib.contextmanager
def using(folder: Path | None) -> Iterator[None]:
    """Keep islands in ``folder`` until the end of the block; None: keep none."""
    token = _current.set(None if folder is None else Store(folder))
    try:
        yield
    finally:
        _current.reset(token)
