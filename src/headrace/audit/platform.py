"""Rules about the file itself, the platform it is tagged for, and the C++ run time."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Final

from headrace.audit.elf import Library
from headrace.audit.report import Finding
from headrace.audit.rules import Check, Inspection

__all__ = ["CHECKS"]

_MANYLINUX: Final = re.compile(r"manylinux_([0-9]+)_([0-9]+)_(\w+)")
_LEGACY: Final = {
    "manylinux1_": "manylinux_2_5_",
    "manylinux2010_": "manylinux_2_12_",
    "manylinux2014_": "manylinux_2_17_",
}
_VERSION: Final = re.compile(r"([A-Z]+)_([0-9]+(?:\.[0-9]+)*)")


def _faults(rule: str) -> Check:
    def check(inspection: Inspection) -> Iterator[Finding]:
        inspection.looked_at[rule] += len(inspection.facts.places)
        for fault in inspection.facts.faults:
            if fault.rule == rule:
                yield Finding(rule, fault.path, posixpath.basename(fault.path), fault.detail)

    return check


def promised_glibc(tags: tuple[str, ...]) -> tuple[int, ...] | None:
    """The oldest glibc that one of the platform tags promises to run on; None where no tag promises any."""
    found = []
    for tag in tags:
        for legacy, modern in _LEGACY.items():
            tag = tag.replace(legacy, modern, 1)
        match = _MANYLINUX.fullmatch(tag)
        if match:
            found.append((int(match.group(1)), int(match.group(2))))
    return min(found, default=None)


def _newest(library: Library) -> dict[str, tuple[int, ...]]:
    newest: dict[str, tuple[int, ...]] = {}
    for _, text in library.version_needs:
        match = _VERSION.fullmatch(text)
        if match:
            version = tuple(int(part) for part in match.group(2).split("."))
            newest[match.group(1)] = max(newest.get(match.group(1), ()), version)
    return newest


def _newer_than_tag(inspection: Inspection, rule: str, families: tuple[str, ...]) -> Iterator[Finding]:
    glibc = promised_glibc(inspection.facts.tags)
    if glibc is None:
        return
    rows = [row for row in inspection.policy.versions if row <= glibc]
    limits = {**(inspection.policy.versions[max(rows)] if rows else {}), "GLIBC": glibc}
    for library in inspection.each(rule, inspection.facts.libraries):
        newest = _newest(library)
        for family in families:
            if family in limits and newest.get(family, ()) > limits[family]:
                needs, may = (".".join(map(str, one)) for one in (newest[family], limits[family]))
                tag = ".".join(map(str, glibc))
                detail = f"needs {family}_{needs}; the tag promises glibc {tag}, which has {family}_{may}"
                yield Finding(rule, library.path, f"{family}_{needs}", detail)


def glibc_newer_than_tag(inspection: Inspection) -> Iterator[Finding]:
    yield from _newer_than_tag(inspection, "glibc-newer-than-tag", ("GLIBC",))


def libstdcxx_newer_than_tag(inspection: Inspection) -> Iterator[Finding]:
    # A wheel that brings its own run time has another finding, and is not bound to the platform's.
    if not any(True for _ in _runtimes(inspection)):
        yield from _newer_than_tag(inspection, "libstdcxx-newer-than-tag", ("GLIBCXX", "CXXABI", "GCC"))


def _runtimes(inspection: Inspection) -> Iterator[Library]:
    for library in inspection.facts.libraries:
        if inspection.policy.cxx_runtime.match(posixpath.basename(library.path)):
            yield library


def libstdcxx_bundled(inspection: Inspection) -> Iterator[Finding]:
    inspection.looked_at["libstdcxx-bundled"] += len(inspection.facts.libraries)
    for library in _runtimes(inspection):
        name = posixpath.basename(library.path)
        yield Finding("libstdcxx-bundled", library.path, name, f"{name} is the platform's to bring")


def libstdcxx_exported(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.each("libstdcxx-exported", inspection.facts.libraries):
        own = [name for name in inspection.policy.cxx_runtime_symbols if name in library.exports]
        if own and not inspection.policy.cxx_runtime.match(posixpath.basename(library.path)):
            detail = f"exports {', '.join(own)} of a C++ run time linked into it"
            yield Finding("libstdcxx-exported", library.path, own[0], detail)


def tag_any(inspection: Inspection) -> Iterator[Finding]:
    if inspection.facts.tags != ("any",):
        return
    for library in inspection.each("tag-any", inspection.facts.libraries):
        detail = f"is for {library.machine}, in a wheel tagged for any platform"
        yield Finding("tag-any", library.path, library.machine, detail)


def tag_architecture(inspection: Inspection) -> Iterator[Finding]:
    machines = {tag.split("_", 1)[-1] for tag in inspection.facts.tags if "linux" in tag}
    machines = {re.sub(r"^[0-9]+_[0-9]+_", "", machine) for machine in machines}
    for library in inspection.each("tag-architecture", inspection.facts.libraries) if machines else ():
        if library.machine not in machines:
            detail = f"is for {library.machine}, in a wheel tagged for {', '.join(sorted(machines))}"
            yield Finding("tag-architecture", library.path, library.machine, detail)


def stack_executable(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.each("stack-executable", inspection.facts.libraries):
        if library.executable_stack:
            yield Finding("stack-executable", library.path, "PT_GNU_STACK", "PT_GNU_STACK has the flag X")


def build_path(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.each("build-path", inspection.facts.libraries):
        if library.build_paths:
            more = len(library.build_paths) - 1
            detail = f"holds {library.build_paths[0]}" + (f" and {more} more such paths" if more else "")
            yield Finding("build-path", library.path, library.build_paths[0], detail)


CHECKS: Final[Mapping[str, Check]] = {
    "elf-unreadable": _faults("elf-unreadable"),
    "metadata-unreadable": _faults("metadata-unreadable"),
    "member-unsafe": _faults("member-unsafe"),
    "tag-any": tag_any,
    "tag-architecture": tag_architecture,
    "glibc-newer-than-tag": glibc_newer_than_tag,
    "libstdcxx-newer-than-tag": libstdcxx_newer_than_tag,
    "libstdcxx-bundled": libstdcxx_bundled,
    "libstdcxx-exported": libstdcxx_exported,
    "stack-executable": stack_executable,
    "build-path": build_path,
}
