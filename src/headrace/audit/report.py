"""What an audit found, and the three ways to say it: text, JSON, annotations for a code host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from headrace.audit.elf import Library
from headrace.audit.policy import Allowance, Rule

__all__ = ["JSON_VERSION", "Finding", "Report"]

#: Raised when a name in the JSON goes away or changes its meaning.
JSON_VERSION: Final = 1
#: The text shows this many findings of one rule.
_SHOWN: Final = 12


@dataclass(frozen=True, order=True)
class Finding:
    """One rule that one place breaks. ``path`` is a file below site-packages, or the metadata's name;
    ``subject`` is what is wrong there (a library, a hop, a symbol); ``detail`` says what was expected and
    what came."""

    rule: str
    path: str
    subject: str
    detail: str


@dataclass(frozen=True)
class Report:
    """The verdict. ``problems`` fail the audit, ``advice`` does not, ``allowed`` were accepted by the policy
    with a reason. ``looked_at`` says how many objects each rule was held against: a rule that met none has
    shown nothing, and is named in every output."""

    source: str
    name: str
    version: str
    problems: tuple[Finding, ...]
    advice: tuple[Finding, ...]
    allowed: tuple[tuple[Finding, Allowance], ...]
    unused_allowances: tuple[Allowance, ...]
    looked_at: Mapping[str, int]
    rules: Mapping[str, Rule]
    libraries: tuple[Library, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        """For people: each finding with its reason and fix once, then what was looked at."""
        lines = [f"{self.source}: {self.name} {self.version}".rstrip()]
        for level, findings in (("problem", self.problems), ("advice", self.advice)):
            for rule in dict.fromkeys(finding.rule for finding in findings):
                told = self.rules[rule]
                lines += ["", f"{level}: {told.title} [{rule}]"]
                told_of = [finding for finding in findings if finding.rule == rule]
                lines += [f"  {finding.path}: {finding.detail}" for finding in told_of[:_SHOWN]]
                if len(told_of) > _SHOWN:
                    lines.append(f"  and {len(told_of) - _SHOWN} more, which --json lists")
                lines += [f"  why: {told.reason}", f"  fix: {told.fix}"]
        for finding, allowance in self.allowed:
            lines += ["", f"allowed: {finding.path}: {finding.detail} [{finding.rule}]"]
            lines += [f"  because: {allowance.reason}"]
        for allowance in self.unused_allowances:
            lines += ["", f"unused allowance: {allowance.rule} at {allowance.path}, {allowance.subject}"]
        code = sorted({one.arch for library in self.libraries for one in library.gpu_code})
        idle = sorted(rule for rule, count in self.looked_at.items() if not count)
        lines += ["", f"looked at {len(self.libraries)} ELF files; GPU code: {', '.join(code) or 'none'}"]
        if idle:
            lines.append(f"rules that had nothing to look at: {', '.join(idle)}")
        lines.append(
            f"problems: {len(self.problems)}, advice: {len(self.advice)}, allowed: {len(self.allowed)}"
        )
        return "".join(_printable(line) + "\n" for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints, as plain values."""

        def told(finding: Finding) -> dict[str, str]:
            rule = self.rules[finding.rule]
            return {**asdict(finding), "reason": rule.reason, "fix": rule.fix}

        return {
            "version": JSON_VERSION,
            "source": self.source,
            "distribution": {"name": self.name, "version": self.version},
            "ok": self.ok,
            "problems": [told(finding) for finding in self.problems],
            "advice": [told(finding) for finding in self.advice],
            "allowed": [{**told(f), "allowed_because": allowance.reason} for f, allowance in self.allowed],
            "unused_allowances": [asdict(allowance) for allowance in self.unused_allowances],
            "looked_at": dict(sorted(self.looked_at.items())),
            "libraries": [
                {
                    "path": library.path,
                    "nbytes": library.nbytes,
                    "sha256": library.sha256,
                    "machine": library.machine,
                    "soname": library.soname,
                    "needed": list(library.needed),
                    "search_path": list(library.search_path),
                    "gpu_code": [asdict(code) for code in library.gpu_code],
                }
                for library in self.libraries
            ],
        }

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def annotations(self) -> str:
        """Workflow commands: code hosts that know them show each line in a pull request. What comes from the
        wheel is escaped, so that a crafted name cannot add a command."""
        lines = []
        for level, findings in (("error", self.problems), ("notice", self.advice)):
            for finding in findings:
                rule = self.rules[finding.rule]
                title = _property(f"{rule.title} [{finding.rule}]")
                message = _message(f"{finding.path}: {finding.detail}\nwhy: {rule.reason}\nfix: {rule.fix}")
                lines.append(f"::{level} title={title}::{message}")
        return "".join(line + "\n" for line in lines)


def _printable(text: str) -> str:
    """Names in a wheel may hold line ends and terminal commands; they are shown escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
