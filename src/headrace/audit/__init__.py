"""The audit of CUDA wheels: what is wrong with how a wheel links, declares and is tagged, and why.

    report = headrace.audit("dist/pkg-1.0-cp312-cp312-manylinux_2_28_x86_64.whl")
    for finding in report.problems: ...

Nothing of the audited wheel is executed: ELF tables, archive members and metadata are read. Reading needs
``pip install headrace[audit]``; importing this module needs nothing. docs/audit.md lists the rules.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import AuditError

if TYPE_CHECKING:
    from headrace.audit.policy import Policy
    from headrace.audit.report import Finding, Report

__all__ = ["Finding", "Report", "audit", "default_policy", "load_policy"]


def __getattr__(name: str) -> object:
    if name in ("Finding", "Report"):
        from headrace.audit import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def audit(path: str | os.PathLike[str], *, policy: Policy | str | os.PathLike[str] | None = None) -> Report:
    """Audit a wheel, a folder, a ``.dist-info`` folder or an installed distribution by its name.

    ``policy`` is a policy file, or what ``load_policy`` made of one; None means the built-in rules alone.
    Raises AuditError when the input cannot be read or holds nothing to inspect, when the policy file is at
    fault, and when what the audit needs is not installed.
    """
    _require_readers()
    if not isinstance(path, str | os.PathLike):
        raise AuditError(
            f"audit: expected a path or the name of a distribution, got {type(path).__name__}; pass one of these"
        )
    from headrace.audit import cuda, linkage, platform, wheel
    from headrace.audit.policy import Policy
    from headrace.audit.rules import judge

    if policy is None:
        policy = default_policy()
    elif not isinstance(policy, Policy):
        policy = load_policy(policy)
    checks = {**platform.CHECKS, **linkage.CHECKS, **cuda.CHECKS}
    try:
        return judge(wheel.read(os.fspath(path), policy), policy, checks)
    except OSError as cause:
        raise AuditError(
            f"{os.fspath(path)}: expected files that can be read, got: {cause}; mend that first"
        ) from cause


def default_policy() -> Policy:
    """The built-in rules and tables."""
    _require_readers()
    from headrace.audit.policy import Policy

    return Policy.default()


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """The built-in rules with what the policy file ``path`` adds. Raises AuditError."""
    _require_readers()
    from headrace.audit.policy import Policy

    return Policy.load(Path(path))


def _require_readers() -> None:
    try:
        import elftools  # noqa: F401
        import packaging  # noqa: F401

        import headrace.audit.policy  # noqa: F401  (tomli before Python 3.11)
    except ModuleNotFoundError as cause:
        raise AuditError(
            f"audit: expected the module {cause.name}, got none; run `pip install pyelftools packaging` (what the extra `audit` names)"
        ) from cause
