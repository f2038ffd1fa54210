"""The audit itself: facts in, verdict out. What each rule means stands in policy.toml; how it is checked, in
the modules named after what they look at (linkage, platform, cuda)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from headrace.audit.declared import Declared
from headrace.audit.loading import Loading
from headrace.audit.policy import Policy
from headrace.audit.report import Finding, Report
from headrace.audit.wheel import Distribution

__all__ = ["Check", "Inspection", "judge"]

T = TypeVar("T")


@dataclass
class Inspection:
    """One audit under way: the facts, what they are compared with, and how much each rule has looked at."""

    facts: Distribution
    policy: Policy
    looked_at: Counter[str] = field(default_factory=Counter)

    @cached_property
    def loading(self) -> Loading:
        return Loading(self.facts)

    @cached_property
    def declared(self) -> Declared:
        return Declared(self.facts, self.policy)

    def each(self, rule: str, objects: Iterable[T]) -> Iterator[T]:
        """``objects``, each counted as looked at by ``rule``."""
        for one in objects:
            self.looked_at[rule] += 1
            yield one


#: A check yields the findings of one rule; it passes what it looks at through ``Inspection.each``.
Check = Callable[[Inspection], Iterator[Finding]]


def judge(facts: Distribution, policy: Policy, checks: Mapping[str, Check]) -> Report:
    """Hold ``facts`` against every rule. Each finding is told once, however many loads show it."""
    inspection = Inspection(facts, policy)
    problems, advice, allowed = [], [], []
    unused = dict.fromkeys(policy.allowances)
    for rule, check in checks.items():
        inspection.looked_at[rule] += 0
        for finding in sorted(set(check(inspection))):
            allowance = next(
                (one for one in policy.allowances if one.covers(rule, finding.path, finding.subject)), None
            )
            if allowance is not None:
                unused.pop(allowance, None)
                allowed.append((finding, allowance))
            elif policy.rules[rule].level == "problem":
                problems.append(finding)
            else:
                advice.append(finding)
    return Report(
        source=facts.source,
        name=facts.name,
        version=facts.version,
        problems=tuple(problems),
        advice=tuple(advice),
        allowed=tuple(allowed),
        unused_allowances=tuple(unused),
        looked_at=dict(inspection.looked_at),
        rules=policy.rules,
        libraries=facts.libraries,
    )
