"""What every command prints alike: JSON with a version, shapes as text; and the exit statuses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ..program import ValueInfo

__all__ = ["DIFFERS", "FAILED", "INTERRUPTED", "OK", "USAGE", "print_json", "shape_text"]

JSON_VERSION = 1
OK, DIFFERS, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130


def print_json(command: str, body: dict[str, Any]) -> None:
    print(json.dumps(_finite({**body, "version": JSON_VERSION, "command": command}), default=_plain))


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


def shape_text(info: ValueInfo) -> str:
    if info.kind != "tensor":
        return info.kind
    dims = ", ".join(str(high) if low == high else f"≤{high}" for low, high in info.bounds)
    return f"{info.dtype}[{dims}] on {info.device}"
