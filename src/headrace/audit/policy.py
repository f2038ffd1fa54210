"""What an audit compares with: the built-in rules and tables, and what a policy file adds to them.

A policy file is TOML; docs/audit.md shows one whole. It can allow a finding, with a reason, move a rule
between ``problem`` and ``advice``, declare GPU architectures and the build row, and list libraries, symbols
and kernels that must be there. It cannot take a rule away without a reason.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from headrace.audit.rows import RowError, classify
from headrace.errors import AuditError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Allowance", "Component", "Driver", "Limits", "Policy", "Provider", "Requirement", "Rule"]

_LEVELS: Final = ("problem", "advice")
_ARCHITECTURE: Final = re.compile(r"(sm|compute)_[0-9]{2,3}[af]?")


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong: why it matters (``reason``) and what to do about it (``fix``)."""

    id: str
    level: str
    title: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Allowance:
    """A finding that is accepted. ``path`` and ``subject`` are shell patterns."""

    rule: str
    reason: str
    path: str = "*"
    subject: str = "*"

    def covers(self, rule: str, path: str, subject: str) -> bool:
        return (
            rule == self.rule
            and fnmatch.fnmatchcase(path, self.path)
            and fnmatch.fnmatchcase(subject, self.subject)
        )


@dataclass(frozen=True)
class Requirement:
    """Libraries of the shell pattern ``library`` must exist, and each must have all of these."""

    library: str
    symbols: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Component:
    """A CUDA library by its file name's stem: which majors ship which soname, and in which distribution and
    folder below site-packages."""

    name: str
    stem: re.Pattern[str]
    bundled: re.Pattern[str]
    sonames: Mapping[str, frozenset[int]]
    distributions: Mapping[int, str]
    places: Mapping[int, str]
    symbols: re.Pattern[str]
    needs: tuple[str, ...] = ()

    def majors(self, soname: str) -> frozenset[int] | None:
        """The CUDA majors that ship ``soname``; None if it is no library of this component, empty if it is
        one of no known major."""
        match = self.stem.fullmatch(soname)
        if match is None:
            return None
        version = match.group(1) or ""
        return self.sonames.get(version, self.sonames.get(version.split(".")[0], frozenset()))


@dataclass(frozen=True)
class Driver:
    """A library that the driver installs."""

    soname: re.Pattern[str]
    symbols: re.Pattern[str]


@dataclass(frozen=True)
class Provider:
    """A package that ships libraries which are no CUDA components, and the folder that holds them."""

    soname: re.Pattern[str]
    distributions: tuple[str, ...]
    place: str


@dataclass(frozen=True)
class Limits:
    """What an archive may claim before it is refused as unsafe to unpack."""

    member_nbytes: int
    ratio: int
    total_nbytes: int
    members: int


@dataclass(frozen=True)
class Policy:
    """Everything an audit compares with. Made by ``Policy.default()`` and ``Policy.load()``."""

    rules: Mapping[str, Rule]
    limits: Limits
    platform_libraries: frozenset[str]
    versioned: frozenset[str]
    musl_libraries: frozenset[str]
    cxx_runtime: re.Pattern[str]
    cxx_runtime_symbols: tuple[str, ...]
    interpreter_symbols: re.Pattern[str]
    cxx_runtime_names: re.Pattern[str]
    companions: re.Pattern[str]
    versions: Mapping[tuple[int, ...], Mapping[str, tuple[int, ...]]]
    build_path: re.Pattern[bytes]
    brings_all: tuple[str, ...]
    cuda_headers: tuple[re.Pattern[str], ...]
    drivers: tuple[Driver, ...]
    components: tuple[Component, ...]
    providers: tuple[Provider, ...]
    allowances: tuple[Allowance, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    architectures: tuple[str, ...] = ()
    row: str | None = None

    @staticmethod
    def default() -> Policy:
        """The built-in policy."""
        return _built_in()

    @staticmethod
    def load(path: Path) -> Policy:
        """The built-in policy with the changes of the policy file ``path``. Raises AuditError."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
            raise AuditError(f"policy {path}: expected a TOML file, got {cause}; correct the file") from cause
        return _changed(_built_in(), _Table(f"policy {path}", table))

    def with_architectures(self, architectures: tuple[str, ...]) -> Policy:
        """This policy with another list of declared GPU architectures. Raises AuditError."""
        for name in architectures:
            if not _ARCHITECTURE.fullmatch(name):
                raise AuditError(
                    f"architecture: expected sm_NN for SASS or compute_NN for PTX, got {name!r}; "
                    "for example sm_90a or compute_90"
                )
        return replace(self, architectures=architectures)

    def component(self, soname: str) -> Component | None:
        """The CUDA component that ``soname`` is a library of."""
        return next((c for c in self.components if c.stem.fullmatch(soname)), None)

    def driver(self, soname: str) -> Driver | None:
        return next((driver for driver in self.drivers if driver.soname.match(soname)), None)

    def provider(self, soname: str) -> Provider | None:
        return next((provider for provider in self.providers if provider.soname.match(soname)), None)

    @property
    def kernels(self) -> frozenset[str]:
        return frozenset(kernel for requirement in self.requirements for kernel in requirement.kernels)


# What to do about a policy file that says a thing in another form.
_FORM = "see docs/audit.md"


class _Table:
    """A TOML table read key by key: each value's type is checked, and a key that nobody asked for is an
    error, so that a misspelt one is not a rule that never runs."""

    def __init__(self, where: str, table: object) -> None:
        if not isinstance(table, dict):
            raise AuditError(f"{where}: expected a table, got {table!r}; {_FORM}")
        self.where = where
        self._table: dict[str, Any] = dict(table)

    def take(self, key: str, kind: type, default: Any) -> Any:
        value = self._table.pop(key, default)
        if not isinstance(value, kind) and value is not default:
            raise AuditError(f"{self.where}, {key}: expected {kind.__name__}, got {value!r}; {_FORM}")
        return value

    def text(self, key: str, default: str = "") -> str:
        return str(self.take(key, str, default))

    def need(self, key: str) -> str:
        value = self.text(key)
        if not value.strip():
            raise AuditError(f"{self.where}: expected a non-empty {key!r}, got none; add it")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.take(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise AuditError(f"{self.where}, {key}: expected a list of strings, got {values!r}; {_FORM}")
        return tuple(values)

    def table(self, key: str) -> _Table:
        return _Table(f"{self.where}, {key}", self.take(key, dict, {}))

    def tables(self, key: str) -> list[_Table]:
        return [_Table(f"{self.where}, {key} {n}", one) for n, one in enumerate(self.take(key, list, []), 1)]

    def end(self) -> None:
        if self._table:
            raise AuditError(f"{self.where}: unknown key {', '.join(sorted(self._table))}; {_FORM}")


def _changed(policy: Policy, table: _Table) -> Policy:
    allowances = []
    for entry in table.tables("allow"):
        allowance = Allowance(
            rule=_known(policy, entry.need("rule"), entry.where),
            reason=entry.need("reason"),
            path=entry.text("path", "*"),
            subject=entry.text("subject", "*"),
        )
        entry.end()
        allowances.append(allowance)
    requirements = []
    for entry in table.tables("require"):
        requirements.append(
            Requirement(entry.need("library"), entry.texts("symbols"), entry.texts("kernels"))
        )
        entry.end()
    rules = dict(policy.rules)
    for name, level in table.take("level", dict, {}).items():
        if level not in _LEVELS:
            raise AuditError(
                f"{table.where}, level {name}: expected problem or advice, got {level!r}; write one of these"
            )
        rules[name] = replace(rules[_known(policy, name, table.where)], level=level)
    row = table.take("row", str, None)
    if row is not None:
        try:
            classify(row)
        except RowError as cause:
            raise AuditError(f"{table.where}, {cause}") from cause
    extra = table.table("platform")
    platform_libraries = policy.platform_libraries | frozenset(extra.texts("libraries"))
    extra.end()
    cuda = table.table("cuda")
    headers = policy.cuda_headers + tuple(_pattern(text, cuda.where) for text in cuda.texts("headers"))
    cuda.end()
    architectures = table.texts("architectures")
    table.end()
    return replace(
        policy,
        rules=rules,
        allowances=policy.allowances + tuple(allowances),
        requirements=policy.requirements + tuple(requirements),
        platform_libraries=platform_libraries,
        cuda_headers=headers,
        row=row,
    ).with_architectures(architectures)


def _known(policy: Policy, rule: str, where: str) -> str:
    if rule not in policy.rules:
        raise AuditError(f"{where}: expected a rule's id, got {rule!r}; `headrace audit --rules` lists them")
    return rule


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as cause:
        raise AuditError(
            f"{where}: expected a regular expression, got {text!r} ({cause}); correct it"
        ) from cause


@cache
def _built_in() -> Policy:
    table = tomllib.loads(files("headrace.audit").joinpath("policy.toml").read_text(encoding="utf-8"))
    platform, cuda = table["platform"], table["cuda"]
    return Policy(
        rules={name: Rule(id=name, **fields) for name, fields in table["rule"].items()},
        limits=Limits(**table["limits"]),
        platform_libraries=frozenset(platform["libraries"]),
        versioned=frozenset(platform["versioned"]),
        musl_libraries=frozenset(platform["musl_libraries"]),
        cxx_runtime=re.compile(platform["cxx_runtime"]),
        cxx_runtime_symbols=tuple(platform["cxx_runtime_symbols"]),
        interpreter_symbols=re.compile(platform["interpreter_symbols"]),
        cxx_runtime_names=re.compile(platform["cxx_runtime_names"]),
        companions=re.compile(cuda["companions"]),
        versions={
            _version(glibc): {family: _version(text) for family, text in newest.items()}
            for glibc, newest in platform["versions"].items()
        },
        build_path=_build_path(table["build_path"]),
        brings_all=tuple(cuda["brings_all"]),
        cuda_headers=tuple(re.compile(text) for text in cuda["headers"]),
        drivers=tuple(
            Driver(re.compile(one["soname"]), re.compile(one["symbols"])) for one in table["driver"]
        ),
        components=tuple(_component(one) for one in table["component"]),
        providers=tuple(
            Provider(re.compile(one["soname"]), tuple(one["distributions"]), one["place"])
            for one in table["provider"]
        ),
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _component(one: Mapping[str, Any]) -> Component:
    stem = f"(?:{one['stem']})"
    return Component(
        name=one["name"],
        stem=re.compile(stem + r"\.so(?:\.([0-9.]+))?"),
        # Tools that bundle libraries put a hash between stem and suffix.
        bundled=re.compile(stem + r"(?:[-.][0-9a-f]{6,})?\.so(?:\.[0-9.]+)?"),
        sonames={version: frozenset(majors) for version, majors in one["sonames"].items()},
        distributions={int(major): name for major, name in one["distributions"].items()},
        places={int(major): place for major, place in one["places"].items()},
        symbols=re.compile(one["symbols"]),
        needs=tuple(one.get("needs", ())),
    )


def _build_path(table: Mapping[str, list[str]]) -> re.Pattern[bytes]:
    """A string that starts with an absolute path of the build machine. The slash comes before what is looked
    for around it, since the engine can skip to a letter."""
    exempt = "|".join(re.escape(prefix.removeprefix("/")) for prefix in table["exempt"])
    suffixes = "|".join(table["source_suffixes"])
    roots = "|".join(root.removeprefix("/") for root in table["roots"])
    source = rf"(?:[\w.+@~-]+/)+[\w.+@~-]+\.(?:{suffixes})(?![\w.])"
    below = rf"(?:{roots})[\w.+@~/-]+"
    return re.compile(rf"/(?<![\x21-\x7e]/)(?!{exempt})(?:{source}|{below})".encode())
