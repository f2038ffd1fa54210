"""What the dynamic loader would do with the libraries of one distribution, without loading them.

The order follows ld.so: breadth first from the file that is opened; a NEEDED name that something loaded
already goes by (as soname, or as the name it was asked for) is not searched again; a library's own DT_RUNPATH
hides every DT_RPATH, and where it has none, the DT_RPATH of itself and of its loaders count (ld.so(8)).
"""

from __future__ import annotations

import posixpath
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from headrace.audit.elf import Library
from headrace.audit.wheel import Distribution

__all__ = ["Hop", "Link", "Load", "Loading", "hop"]

_ORIGIN: Final = ("$ORIGIN", "${ORIGIN}")


@dataclass(frozen=True)
class Hop:
    """One entry of a search path. ``place`` is the folder below site-packages that it leads to, or None where
    the entry does not start with $ORIGIN; it starts with ``..`` where the entry climbs out."""

    entry: str
    place: str | None

    @property
    def escapes(self) -> bool:
        return self.place is not None and (self.place == ".." or self.place.startswith("../"))


@dataclass(frozen=True)
class Link:
    """One NEEDED name in one load. ``target`` is the library of the distribution that the loader takes;
    ``elsewhere`` one of that name which no hop reaches; both None when the distribution has none. ``early``:
    it was loaded before, so nothing was searched."""

    library: Library
    needed: str
    hops: tuple[Hop, ...]
    target: Library | None
    elsewhere: Library | None
    early: bool


@dataclass(frozen=True)
class Load:
    """What opening ``root`` loads: the distribution's libraries in order, and each link followed."""

    root: Library
    libraries: tuple[Library, ...]
    links: tuple[Link, ...]

    @property
    def outside(self) -> frozenset[str]:
        """The NEEDED names that the distribution does not hold."""
        return frozenset(link.needed for link in self.links if link.target is None and link.elsewhere is None)

    @cached_property
    def defined(self) -> frozenset[str]:
        """Every symbol that a loaded library of the distribution exports."""
        return frozenset().union(*(one.exports | one.weak_exports for one in self.libraries))


def hop(library: Library, entry: str) -> Hop:
    """Where the search path entry of a library leads."""
    for token in _ORIGIN:
        if entry == token or entry.startswith(token + "/"):
            folder = posixpath.normpath(
                posixpath.join(posixpath.dirname(library.path), "." + entry[len(token) :])
            )
            return Hop(entry, "" if folder == "." else folder)
    return Hop(entry, None)


class Loading:
    """Every load that can start in a distribution: one for each library that no other one reaches."""

    def __init__(self, facts: Distribution) -> None:
        self.libraries = tuple(one for one in facts.libraries if one.dynamic and one.kind != "relocatable")
        self._by_place: Mapping[str, Library] = {one.path: one for one in self.libraries}
        self._aliases = dict(facts.aliases)
        self._by_name: dict[str, Library] = {}
        for library in self.libraries:
            for name in (library.soname, posixpath.basename(library.path)):
                if name:
                    self._by_name.setdefault(name, library)
        for alias, target in self._aliases.items():
            if target in self._by_place:
                self._by_name.setdefault(posixpath.basename(alias), self._by_place[target])
        self.loads = self._all_loads()

    def named(self, needed: str) -> Library | None:
        """A library of the distribution with this soname or file name, wherever it lies."""
        return self._by_name.get(needed)

    def _all_loads(self) -> tuple[Load, ...]:
        reached: set[str] = set()
        for library in self.libraries:
            for needed in library.needed:
                target = self._by_name.get(needed)
                if target is not None and target is not library:
                    reached.add(target.path)
        loads = [self._load(one) for one in self.libraries if one.path not in reached]
        covered = {one.path for load in loads for one in load.libraries}
        # Libraries that need each other in a circle are reached by none of the loads above.
        for library in self.libraries:
            if library.path not in covered:
                loads.append(self._load(library))
                covered.update(one.path for one in loads[-1].libraries)
        return tuple(loads)

    def _load(self, root: Library) -> Load:
        loaders: dict[str, Library | None] = {root.path: None}
        names: dict[str, Library] = {posixpath.basename(root.path): root, root.soname: root}
        outside: set[str] = set()
        order = [root]
        links: list[Link] = []
        queue = deque([root])
        while queue:
            library = queue.popleft()
            hops = self._hops(library, loaders)
            for needed in library.needed:
                known = names.get(needed)
                target = known or self._search(needed, hops)
                elsewhere = None if target else self._by_name.get(needed)
                links.append(Link(library, needed, hops, target, elsewhere, known is not None))
                found = target or elsewhere
                if found is None:
                    outside.add(needed)
                elif found.path not in loaders:
                    # One that no hop reaches is followed as well: what it needs is judged all the same.
                    loaders[found.path] = library
                    order.append(found)
                    queue.append(found)
                if found is not None:
                    names[needed] = found
                    names.setdefault(found.soname or needed, found)
        return Load(root, tuple(order), tuple(links))

    def _hops(self, library: Library, loaders: Mapping[str, Library | None]) -> tuple[Hop, ...]:
        if library.runpath:
            return tuple(hop(library, entry) for entry in library.runpath)
        hops: list[Hop] = []
        loader: Library | None = library
        while loader is not None:
            if not loader.runpath:
                hops += [hop(loader, entry) for entry in loader.rpath]
            loader = loaders[loader.path]
        return tuple(hops)

    def _search(self, needed: str, hops: tuple[Hop, ...]) -> Library | None:
        for one in hops:
            if one.place is not None:
                place = posixpath.join(one.place, needed)
                found = self._by_place.get(self._aliases.get(place, place))
                if found is not None:
                    return found
        return None
