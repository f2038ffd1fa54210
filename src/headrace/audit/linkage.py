"""Rules about how libraries find each other: NEEDED, search paths, symbols, sonames."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from headrace.audit.elf import Library
from headrace.audit.loading import Hop, Link, Load, hop
from headrace.audit.policy import Policy
from headrace.audit.report import Finding
from headrace.audit.rules import Check, Inspection

__all__ = ["CHECKS"]

#: Symbols that a linker puts into every library.
_LINKER_SYMBOLS: Final = frozenset({"_init", "_fini", "_edata", "_end", "__bss_start", "__data_start"})
_SECTION_BOUNDS: Final = ("__start_", "__stop_")
_SHOWN: Final = 3


def _links(inspection: Inspection) -> Iterator[tuple[Load, Link]]:
    for load in inspection.loading.loads:
        for link in load.links:
            yield load, link


def _from_system(inspection: Inspection, needed: str) -> bool:
    """Whether the platform or the driver brings the library, so that no hop is wanted."""
    policy = inspection.policy
    musl = any(tag.startswith("musllinux") for tag in inspection.facts.tags)
    platform = policy.musl_libraries if musl else policy.platform_libraries
    return needed in platform or policy.driver(needed) is not None


def _hop_reaches(inspection: Inspection, link: Link) -> bool:
    """Whether a hop leads to where a declared dependency has the library."""
    policy, site = inspection.policy, inspection.facts.site
    component, provider = policy.component(link.needed), policy.provider(link.needed)
    places: set[str] = set()
    if component is not None:
        majors = component.majors(link.needed) or component.places
        places = {component.places[major] for major in majors if major in component.places}
    elif provider is not None:
        places = {provider.place}
    for one in link.hops:
        if one.place is None:
            continue
        if one.place in places or (site is not None and (site / one.place / link.needed).is_file()):
            return True
        # Nobody knows which files an unknown package ships, so a hop into a declared one is believed.
        if not places and one.place not in inspection.facts.folders and inspection.declared.place(one.place):
            return True
    return False


def _outside(inspection: Inspection, rule: str) -> Iterator[tuple[Link, bool]]:
    """NEEDED names that must come from another package, and whether a hop leads to them."""
    for _, link in inspection.each(rule, _links(inspection)):
        held = link.target is not None or link.elsewhere is not None
        if not held and "/" not in link.needed and not _from_system(inspection, link.needed):
            yield link, _hop_reaches(inspection, link)


def _shipper(inspection: Inspection, needed: str) -> str:
    """The declared package that ships the library, for one that is no CUDA component."""
    provider = inspection.policy.provider(needed)
    if provider is not None and inspection.declared.any(provider.distributions):
        return provider.distributions[0]
    return inspection.declared.library(needed)


def needed_unresolved(inspection: Inspection) -> Iterator[Finding]:
    for link, reached in _outside(inspection, "needed-unresolved"):
        # A component's package is the business of the component rules.
        if reached or inspection.policy.component(link.needed) or _shipper(inspection, link.needed):
            continue
        detail = f"needs {link.needed}, which is not in the wheel, of the platform, or of a declared package"
        yield Finding("needed-unresolved", link.library.path, link.needed, detail)


def needed_preloaded(inspection: Inspection) -> Iterator[Finding]:
    for link, reached in _outside(inspection, "needed-preloaded"):
        shipper = _shipper(inspection, link.needed)
        # Where nothing declares a component, the component rules say so; its hops come after.
        if not reached and (shipper or _component_declared(inspection, link.needed)):
            owner = f" of {shipper}" if shipper else ""
            detail = f"needs {link.needed}{owner}; no hop leads to it: something must load it first"
            yield Finding("needed-preloaded", link.library.path, link.needed, detail)
    for link in _without_hop(inspection):
        if _opened_first(inspection, link):
            detail = f"needs {link.needed}, in this wheel; no hop leads to it: something must load it first"
            yield Finding("needed-preloaded", link.library.path, link.needed, detail)


def _component_declared(inspection: Inspection, needed: str) -> bool:
    component = inspection.policy.component(needed)
    if component is None:
        return False
    standing = inspection.declared.component(component, component.majors(needed) or frozenset())
    return standing.how in ("required", "optional", "other")


def needed_no_hop(inspection: Inspection) -> Iterator[Finding]:
    for link in inspection.each("needed-no-hop", _without_hop(inspection)):
        if not _opened_first(inspection, link):
            there = link.elsewhere.path if link.elsewhere else ""
            detail = f"needs {link.needed}, which is at {there}, where no hop leads"
            yield Finding("needed-no-hop", link.library.path, link.needed, detail)


def _without_hop(inspection: Inspection) -> Iterator[Link]:
    for _, link in _links(inspection):
        if link.elsewhere is not None and "/" not in link.needed:
            yield link


def _opened_first(inspection: Inspection, link: Link) -> bool:
    """Whether Python code names the library's file, or a requirement brings another copy of it."""
    there = link.elsewhere
    names = {link.needed} | ({posixpath.basename(there.path), there.soname} if there else set())
    return bool(names & inspection.facts.python_names) or _component_declared(inspection, link.needed)


def needed_path(inspection: Inspection) -> Iterator[Finding]:
    for _, link in inspection.each("needed-path", _links(inspection)):
        if "/" in link.needed:
            detail = f"needs the path {link.needed}; expected a name"
            yield Finding("needed-path", link.library.path, link.needed, detail)


def needed_unused(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.loading.libraries:
        imported = {one.name for one in library.imports}
        versioned = {name for name, _ in library.version_needs}
        for needed in inspection.each("needed-unused", library.needed):
            if needed in versioned or _from_system(inspection, needed):
                continue
            used = _used(inspection, needed, imported)
            if used is False:
                detail = f"needs {needed}, yet imports none of its symbols"
                yield Finding("needed-unused", library.path, needed, detail)


def _used(inspection: Inspection, needed: str, imported: set[str]) -> bool | None:
    """Whether ``imported`` holds a symbol of the library; None where that cannot be known."""
    if inspection.policy.companions.match(needed):
        return None
    held = inspection.loading.named(needed)
    if held is not None:
        exports = held.exports | held.weak_exports
        # One that exports nothing but needs others gathers them; one with constructors of its own (the
        # first is the compiler's) may be loaded for what they register.
        return bool(exports & imported or not exports - _LINKER_SYMBOLS or held.static_constructors > 1)
    component = inspection.policy.component(needed)
    if component is not None:
        return any(component.symbols.search(name) for name in imported)
    return None


def symbol_unresolved(inspection: Inspection) -> Iterator[Finding]:
    policy = inspection.policy
    musl = any(tag.startswith("musllinux") for tag in inspection.facts.tags)
    makers: dict[str, list[Library]] = defaultdict(list)
    for library in inspection.loading.libraries:
        for name in () if library.program else library.exports | library.weak_exports:
            makers[name].append(library)
    for load in inspection.loading.loads:
        loaded = set(load.libraries)
        for library in load.libraries:
            missing: dict[str, list[str]] = defaultdict(list)
            closed = not musl and _closed(inspection, load, library)
            for one in inspection.each("symbol-unresolved", library.imports):
                if one.weak or one.library or one.name in load.defined:
                    continue
                if policy.interpreter_symbols.match(one.name) or _component_loaded(policy, load, one.name):
                    continue
                others = [maker for maker in makers.get(one.name, []) if maker not in loaded]
                # Parts of the C++ run time are in many libraries; which one was meant cannot be known.
                if others and not one.version and not policy.cxx_runtime_names.match(one.name):
                    missing[others[0].path].append(one.name)
                elif closed:
                    missing[""].append(one.name)
            for maker, names in missing.items():
                where = f"which {maker} defines, but that is not loaded with it"
                if not maker:
                    where = "which nothing that it needs is known to define"
                detail = f"imports {_some(names)}, {where}"
                yield Finding("symbol-unresolved", library.path, min(names), detail)


def _closed(inspection: Inspection, load: Load, library: Library) -> bool:
    """Whether every definition that ``library`` could bind to is known: what is loaded is of this
    distribution, a CUDA component, or a system library that ``library`` itself was linked against, in which
    case the linker has tied its symbols to it by version."""
    for needed in load.outside:
        if inspection.policy.component(needed) or inspection.policy.driver(needed):
            continue
        if needed not in inspection.policy.versioned or needed not in library.needed:
            return False
    return bool(library.needed)


def _component_loaded(policy: Policy, load: Load, symbol: str) -> bool:
    for needed in load.outside:
        owner = policy.component(needed) or policy.driver(needed)
        if owner is not None and owner.symbols.search(symbol):
            return True
    return False


def symbol_twice(inspection: Inspection) -> Iterator[Finding]:
    yield from _shared(inspection, "symbol-twice", together=True)


def symbol_twice_apart(inspection: Inspection) -> Iterator[Finding]:
    yield from _shared(inspection, "symbol-twice-apart", together=False)


def _shared(inspection: Inspection, rule: str, together: bool) -> Iterator[Finding]:
    """Symbols of several libraries: with ``together`` those that one load brings twice and variables, which
    are state wherever they are; else functions of libraries that are opened one by one."""
    makers: dict[str, list[Library]] = defaultdict(list)
    seen: dict[str, Library] = {}
    for library in inspection.loading.libraries:
        # Copies of a file are library-copied's finding, not one for each symbol.
        if library.program or seen.setdefault(library.sha256, library) is not library:
            continue
        for name in inspection.each(rule, library.exports - _LINKER_SYMBOLS):
            if not name.startswith(_SECTION_BOUNDS) and not inspection.policy.cxx_runtime_names.match(name):
                makers[name].append(library)
    groups: dict[tuple[bool, tuple[Library, ...]], list[str]] = defaultdict(list)
    for name, libraries in makers.items():
        if len(libraries) > 1 and not _alternatives(libraries):
            # A class's own tables are objects, but no state.
            state = not name.startswith("_ZT") and any(name in one.data_exports for one in libraries)
            groups[state, tuple(libraries)].append(name)
    loads = [frozenset(load.libraries) for load in inspection.loading.loads]
    for (state, group), names in groups.items():
        meet = state or any(len(load.intersection(group)) > 1 for load in loads)
        if meet is together:
            others = ", ".join(one.path for one in group[1:])
            detail = f"defines {_some(names)}, as {'does' if len(group) == 2 else 'do'} {others}"
            yield Finding(rule, group[0].path, min(names), detail)


def _alternatives(libraries: Iterable[Library]) -> bool:
    """Whether the libraries are builds of one source for several versions of something (CUDA, Python), of
    which a process loads one: their file names differ in digits alone."""
    names = {re.sub(r"[0-9]+", "#", posixpath.basename(library.path)) for library in libraries}
    return len(names) == 1


def _by_soname(inspection: Inspection) -> Iterator[list[Library]]:
    groups: dict[str, list[Library]] = defaultdict(list)
    for library in inspection.loading.libraries:
        if library.soname:
            groups[library.soname].append(library)
    yield from groups.values()


def soname_twice(inspection: Inspection) -> Iterator[Finding]:
    for group in inspection.each("soname-twice", _by_soname(inspection)):
        different = list({library.sha256: library for library in group}.values())
        if len(different) > 1:
            others = ", ".join(library.path for library in different[1:])
            detail = f"has the soname {different[0].soname}, as {others} with other content"
            yield Finding("soname-twice", different[0].path, different[0].soname, detail)


def library_copied(inspection: Inspection) -> Iterator[Finding]:
    groups: dict[str, list[Library]] = defaultdict(list)
    for library in inspection.each("library-copied", inspection.loading.libraries):
        groups[library.sha256].append(library)
    for group in groups.values():
        if len(group) > 1:
            others = ", ".join(library.path for library in group[1:])
            detail = f"{group[0].nbytes} bytes, the same as {others}"
            yield Finding("library-copied", group[0].path, posixpath.basename(group[0].path), detail)


def _hops(inspection: Inspection, rule: str) -> Iterator[tuple[Library, Hop]]:
    for library in inspection.loading.libraries:
        for entry in inspection.each(rule, library.search_path):
            yield library, hop(library, entry)


def runpath_not_origin(inspection: Inspection) -> Iterator[Finding]:
    for library, one in _hops(inspection, "runpath-not-origin"):
        if one.place is None:
            came = repr(one.entry) if one.entry else "an empty entry, which is the current folder"
            detail = f"expected a hop that starts with $ORIGIN, got {came}"
            yield Finding("runpath-not-origin", library.path, one.entry, detail)


def runpath_escapes(inspection: Inspection) -> Iterator[Finding]:
    for library, one in _hops(inspection, "runpath-escapes"):
        # A wheel may put files beside site-packages itself (NAME.data/data).
        if one.escapes and one.place not in inspection.facts.folders:
            detail = f"{one.entry} leads to {one.place}, outside site-packages"
            yield Finding("runpath-escapes", library.path, one.entry, detail)


def _known_place(inspection: Inspection, one: Hop) -> bool | None:
    """True: in this wheel or a declared package's. False: another known package's. None: nobody's."""
    place, facts = one.place, inspection.facts
    if place is None or one.escapes or place in facts.folders:
        return True
    if not place:
        return any("/" not in library.path for library in facts.libraries) or None
    owned = inspection.declared.place(place)
    if owned is None and facts.site is not None and (facts.site / place).is_dir():
        return True
    return owned


def runpath_dead(inspection: Inspection) -> Iterator[Finding]:
    for library, one in _hops(inspection, "runpath-dead"):
        if _known_place(inspection, one) is None:
            detail = (
                f"{one.entry} leads to {one.place or 'site-packages itself'}, where nothing of this wheel is"
            )
            yield Finding("runpath-dead", library.path, one.entry, detail)


def runpath_undeclared(inspection: Inspection) -> Iterator[Finding]:
    for library, one in _hops(inspection, "runpath-undeclared"):
        if _known_place(inspection, one) is False:
            detail = f"{one.entry} leads to {one.place}, whose package is not required"
            yield Finding("runpath-undeclared", library.path, one.entry, detail)


def _some(names: Iterable[str]) -> str:
    """A few names and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


CHECKS: Final[Mapping[str, Check]] = {
    "needed-unresolved": needed_unresolved,
    "needed-no-hop": needed_no_hop,
    "needed-path": needed_path,
    "needed-preloaded": needed_preloaded,
    "needed-unused": needed_unused,
    "symbol-unresolved": symbol_unresolved,
    "symbol-twice": symbol_twice,
    "symbol-twice-apart": symbol_twice_apart,
    "soname-twice": soname_twice,
    "library-copied": library_copied,
    "runpath-not-origin": runpath_not_origin,
    "runpath-escapes": runpath_escapes,
    "runpath-dead": runpath_dead,
    "runpath-undeclared": runpath_undeclared,
}
