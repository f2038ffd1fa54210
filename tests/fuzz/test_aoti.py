"""Some thousand damaged libraries, payloads and specs of AOTInductor islands; ``make fuzz`` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import aoti


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("fuzz")
    return aoti.build(folder), aoti.seeds(folder)


@pytest.mark.parametrize(("kind", "count"), [("image", 600), ("payload", 20000), ("spec", 20000)])
def test_damaged_bytes_are_read_or_refused(
    kind: str, count: int, built: tuple[Path, dict[str, Path]]
) -> None:
    """DE1, OP3: nothing reads or writes outside, whatever the bytes; some pass and some do not."""
    program, files = built
    accepted, refused = aoti.fuzz(program, kind, files[kind], 1, count)
    assert accepted + refused == count
    assert accepted > count // 100 and refused > count // 100, (accepted, refused)
