"""PK5: each fault of the corpus is found by its rule and by no other, and each good twin passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from headrace.audit import cuda, default_policy, linkage, platform
from headrace.audit.report import Finding, Report
from headrace.audit.rules import Inspection
from tests.audit.wheel_faults import CASES, Case
from tests.audit.wheel_forge import Forge, Wheel

Audited = Callable[[Wheel], Report]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
CHECKS = (platform.CHECKS, linkage.CHECKS, cuda.CHECKS)


def told(report: Report) -> set[str]:
    return {finding.rule for finding in (*report.problems, *report.advice)}


@EVERY_CASE
def test_fault_is_found_by_its_rule_and_by_no_other(case: Case, forge: Forge, audited: Audited) -> None:
    """PK5."""
    report = audited(case.make(forge, True))
    assert told(report) == {case.rule}, report.text()
    assert report.ok == (default_policy().rules[case.rule].level == "advice")
    assert report.looked_at[case.rule] > 0


@EVERY_CASE
def test_good_twin_passes(case: Case, forge: Forge, audited: Audited) -> None:
    """PK5: with the fault mended nothing is told, not even as advice."""
    report = audited(case.make(forge, False))
    assert told(report) == set(), report.text()


@EVERY_CASE
def test_breaking_the_rule_is_noticed(
    case: Case, forge: Forge, audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that stops finding leaves its fault untold: the first test above depends on that very rule."""

    def broken(inspection: Inspection) -> Iterator[Finding]:
        yield from ()

    (table,) = [checks for checks in CHECKS if case.rule in checks]
    monkeypatch.setitem(table, case.rule, broken)  # type: ignore[arg-type]
    assert told(audited(case.make(forge, True))) == set()


def test_every_rule_has_a_check_and_a_fault_in_the_corpus() -> None:
    """PK5: a rule without a fault that it finds would be a promise without proof."""
    rules = set(default_policy().rules)
    assert rules == {name for checks in CHECKS for name in checks}
    assert rules == {case.rule for case in CASES}
    assert len(CASES) >= 25
