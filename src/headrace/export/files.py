"""Where results go, asked before the work, which takes seconds to minutes. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from ..errors import OptionError

__all__ = ["writable"]


def writable(option: str, path: Any, suffix: str | None = None) -> Path:
    """``path``, where a file can be written: in a folder that is there and takes files. One that is there already is
    replaced later, and left alone here. Raises OptionError, naming ``option``."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise OptionError(
            f"{option}: expected the name of a file to write, got {path!r}; add the file's name"
        )
    where = f"{option}, {os.fspath(path)}"
    try:
        made = Path(path)
        if made.is_dir():
            raise OptionError(f"{where}: expected a file, got a folder; name a file in it")
        if suffix is not None and made.suffix != suffix:
            raise OptionError(
                f"{where}: expected a name that ends in {suffix}, got {made.name!r}; give it that ending"
            )
        if made.exists() and not made.is_file():
            raise OptionError(f"{where}: expected a file, got a device, a pipe or a socket; name another")
        if not made.parent.is_dir():
            got = "a file" if made.parent.exists() else "none"
            raise OptionError(f"{where}: expected the folder {made.parent}, got {got}; make it first")
        # Permissions do not say it all: a file system may be read-only, a name too long.
        handle, pending = tempfile.mkstemp(prefix=f".{made.name}.", dir=made.parent)
        os.close(handle)
        os.unlink(pending)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OptionError):
            raise
        said = error.strerror if isinstance(error, OSError) else error
        raise OptionError(
            f"{where}: expected a file that can be written, got: {said}; name another, or change its folder's permissions"
        ) from None
    return made
