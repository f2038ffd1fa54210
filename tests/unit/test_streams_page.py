"""``docs/streams.md`` and ``examples/scale.py``: what they show runs, and is so."""

from __future__ import annotations

import inspect
import re

from examples import scale
from tests.conftest import run_python, succeeded
from tests.programs import ROOT


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/streams.md").read_text(), re.DOTALL)


def test_every_block_of_the_page_runs_in_order() -> None:
    """OR3, SY1, DE3: one process, top to bottom."""
    found = blocks()
    assert len(found) >= 8
    succeeded(run_python("\n".join(found)))


def test_the_page_shows_the_delegate_of_the_example() -> None:
    """DE3: about 20 lines, the same in both places but for annotations."""

    def plain(code: str) -> list[str]:
        code = re.sub(r"\) -> None:", "):", code)
        code = re.sub(r": (bytes|Any|headrace\.delegate\.Context|tuple\[Any, \.\.\.\])", "", code)
        return [line for line in code.splitlines() if line.strip()]

    source = plain(inspect.getsource(scale.Scale))
    assert len(source) <= 20
    assert source in [plain(block) for block in blocks()]


def test_the_example_runs() -> None:
    """DE3, BY2: under all three schedules."""
    out = succeeded(run_python("from examples import scale; scale.main()"))
    assert out.splitlines() == [
        f"{schedule:6} [0.0, 1.0, 2.0, 3.0] -> [0.0, 6.0, 12.0, 18.0]" for schedule in ("eager", "late", "7")
    ]
