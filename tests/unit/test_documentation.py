"""What the documentation says is so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from headrace import cli
from tests.conftest import run_python, succeeded
from tests.programs import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_there_are_pages() -> None:
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {p.name for p in PAGES}


def test_the_first_program_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    first, error, selected = succeeded(run_python("\n".join(blocks))).splitlines()
    assert selected == "True"
    assert first.startswith("(3, 10) (Island(")
    assert (
        error.startswith("forward, input 0: expected float32[") and "got float64[3, 1, 8, 8] on cpu" in error
    )


def test_the_page_about_order_runs_and_shows_what_is_printed() -> None:
    """OR5: the page says plainly what no record shows."""
    page = (ROOT / "docs/ordering.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    out = succeeded(run_python("\n".join(blocks))).splitlines()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    for line, want in zip(out[:4], shown.splitlines(), strict=True):
        assert re.match(re.escape(want).replace("…", "[0-9a-f]+"), line), line
    assert out[4:] == [
        "4 accesses, 0 conflicts",
        "[ 0.  4.  8. 12.]",
        "True",
        "1 wait of one stream for another",
        "[1.0, 2.0]",
    ]
    assert "what a delegate launches without declaring it" in page


def test_the_commands_of_the_readme_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    fenced = "\n".join(re.findall(r"^```.*?^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL))
    commands = re.findall(r"^headrace ([^#\n]+)", fenced, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert cli.main(command.split()) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for file in re.findall(r"`((?:src|native|tests|cmake|examples|benchmarks|\.ci)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), file


def test_every_target_of_the_contributing_page_is_in_the_makefile() -> None:
    targets = re.findall(r"^\| `make ([\w-]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(targets) >= 6
    known = re.findall(r"^(\w[\w-]*):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(targets) == sorted(known)


def test_nothing_that_a_build_makes_is_tracked() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    made = re.compile(r"(^|/)(build|dist|_schema|\.venv[\w-]*)/|\.(so|whl|pyc)$")
    assert [f for f in done.stdout.splitlines() if made.search(f)] == []
