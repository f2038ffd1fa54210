"""What METADATA declares about CUDA components and other packages: the requirements, asked by library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.audit.policy import Component, Policy
from headrace.audit.rows import classify
from headrace.audit.wheel import Distribution

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["CudaTag", "Declared", "Standing", "cuda_tag"]

_MAJORS: Final = (11, 12, 13, 14)
_SUFFIX: Final = re.compile(r"-(?:cu|cuda)-?([0-9]{2})[0-9]?x?(?=-|$)")
_LOCAL: Final = re.compile(r"cu([0-9]{2})([0-9])")
_OTHER_LOCAL: Final = re.compile(r"(cpu|rocm|xpu|hip)(?:[0-9.]|$)")


@dataclass(frozen=True)
class Standing:
    """How a component is declared. ``how`` is ``required``, ``optional`` (under an extra), ``other`` (a
    requirement brings it), ``wrong`` (another major) or ``absent``; ``by`` the requirement that says so."""

    how: str
    by: str = ""
    open_range: bool = False


@dataclass(frozen=True)
class CudaTag:
    """What the name, the version or the policy's row says about CUDA: ``major``, or None for a build
    without CUDA; ``said`` is the word that says it, ``strict`` whether a row said it and not a name."""

    major: int | None
    said: str
    strict: bool


@dataclass(frozen=True)
class _Declaration:
    name: str
    text: str
    optional: bool
    majors: frozenset[int]
    extras: frozenset[str]


class Declared:
    """The requirements of one distribution, on Linux."""

    def __init__(self, facts: Distribution, policy: Policy) -> None:
        from packaging.utils import canonicalize_name

        self.policy = policy
        self.name = str(canonicalize_name(facts.name)) if facts.name else ""
        self._declarations = tuple(_declarations(facts))

    def component(self, component: Component, majors: frozenset[int]) -> Standing:
        """How ``component`` in one of ``majors`` is declared. No known major means any."""
        wanted = majors or frozenset(component.distributions)
        names = {name: major for major, name in component.distributions.items()}
        best = Standing("absent")
        rank = ("absent", "wrong", "other", "optional", "required").index
        for one in self._declarations:
            standing = self._standing(one, component, wanted, names)
            if rank(standing.how) > rank(best.how):
                best = standing
        return best

    def _standing(
        self, one: _Declaration, component: Component, wanted: frozenset[int], names: dict[str, int]
    ) -> Standing:
        covers_toolkit = one.name == "cuda-toolkit" and bool(one.extras & {component.name, "all"})
        if one.name in names or covers_toolkit:
            # A name without a suffix says no major; its specifier does.
            plain = covers_toolkit or not _SUFFIX.search(one.name)
            offered = one.majors if plain else frozenset({names[one.name]})
            if plain and not covers_toolkit:
                offered &= frozenset(major for name, major in names.items() if not _SUFFIX.search(name)) | {
                    14
                }
            if not offered & wanted:
                return Standing("wrong", one.text)
            how = "optional" if one.optional else "required"
            return Standing(how, one.text, open_range=plain and bool(offered - wanted))
        if self._brings(one, component, wanted):
            return Standing("other", one.text)
        return Standing("absent")

    def _brings(self, one: _Declaration, component: Component, wanted: frozenset[int]) -> bool:
        if one.name in self.policy.brings_all:
            return True
        for other in self.policy.components:
            if component.name in other.needs and one.name in other.distributions.values():
                return True
        suffix = _SUFFIX.search(one.name)
        known = any(one.name in other.distributions.values() for other in self.policy.components)
        return suffix is not None and int(suffix.group(1)) in wanted and not known

    def place(self, place: str) -> bool | None:
        """Whether the folder ``place`` belongs to a declared package: None if nobody knows whose it is."""
        owned = False
        for component in self.policy.components:
            majors = frozenset(major for major, one in component.places.items() if one == place)
            if majors:
                owned = True
                # Another major of it counts: search paths that serve the layouts of several majors are sound,
                # and a library of the wrong major has a rule of its own.
                if self.component(component, majors).how != "absent":
                    return True
        for provider in self.policy.providers:
            if provider.place == place:
                owned = True
                if self.any(provider.distributions):
                    return True
        if self._named_after(place):
            return True
        return False if owned else None

    def any(self, names: tuple[str, ...]) -> bool:
        """Whether one of the distributions ``names`` is declared, or is this one."""
        return self.name in names or any(one.name in names for one in self._declarations)

    def library(self, soname: str) -> str:
        """The requirement that by its name ships ``soname``: librmm-cu12 for librmm.so. Else ``''``."""
        stem = re.sub(r"\.so.*$", "", soname)
        wanted = {_bare(stem), _bare(stem.removeprefix("lib"))}
        return next((one.text for one in self._declarations if _bare(one.name) in wanted), "")

    def _named_after(self, place: str) -> bool:
        parts = [part for part in place.split("/") if part != ".."]
        wanted = {_bare("-".join(parts[:count])) for count in range(1, min(len(parts), 3) + 1)}
        return any(_bare(one.name) in wanted for one in self._declarations)


def _bare(name: str) -> str:
    """A package's name without case, separators and CUDA suffix."""
    lower = re.sub(r"[-_.]+", "-", name).lower()
    return _SUFFIX.sub("", lower).removesuffix("-libs")


def _declarations(facts: Distribution) -> Iterator[_Declaration]:
    from packaging.utils import canonicalize_name

    for requirement in facts.requirements:
        reach = _reach(requirement)
        if reach:
            yield _Declaration(
                name=str(canonicalize_name(requirement.name)),
                text=str(requirement),
                optional=reach == "optional",
                majors=_majors(requirement),
                extras=frozenset(requirement.extras),
            )


def _reach(requirement: Requirement) -> str:
    """``always``, ``optional`` where an extra must be asked for, or ``''`` where it never counts on Linux."""
    if requirement.marker is None:
        return "always"
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    for minor in range(9, 16):
        python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
        for machine in ("x86_64", "aarch64"):
            if requirement.marker.evaluate({**linux, **python, "platform_machine": machine, "extra": ""}):
                return "always"
    return "optional" if "extra" in str(requirement.marker) else ""


def _majors(requirement: Requirement) -> frozenset[int]:
    """The CUDA majors that the specifier admits: tried on each major's usual versions, and on those that
    the specifier itself names, since a pin admits nothing else."""
    named = [re.sub(r"(\.\*|[^0-9.].*)$", "", one.version) for one in requirement.specifier]
    found = set()
    for major in _MAJORS:
        tries = [f"{major}.{minor}.{patch}" for minor in range(10) for patch in (0, 100)]
        tries += [text for text in named if text.split(".")[0] == str(major)]
        if any(requirement.specifier.contains(text, prereleases=True) for text in tries if text):
            found.add(major)
    return frozenset(found)


def cuda_tag(facts: Distribution, row: str | None) -> CudaTag | None:
    """What the wheel says of itself: the row if the policy gives one, else the version's local part, else
    the name. None when nothing is said, as in most wheels on an index."""
    if row is not None:
        train = classify(row).cuda
        return CudaTag(train[0] if train else None, row or "an empty row", strict=True)
    local = facts.version.partition("+")[2]
    for part in re.split(r"[.\-_]", local):
        match = _LOCAL.fullmatch(part)
        if match:
            return CudaTag(int(match.group(1)), local, strict=True)
    if _OTHER_LOCAL.match(local):
        return CudaTag(None, local, strict=True)
    suffix = _SUFFIX.search(re.sub(r"[-_.]+", "-", facts.name).lower())
    if suffix and 10 <= int(suffix.group(1)) <= 20:
        return CudaTag(int(suffix.group(1)), suffix.group().strip("-"), strict=False)
    return None
