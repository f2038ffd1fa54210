"""Rules about CUDA: components and what METADATA says of them, tags, GPU code, what a policy requires."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Iterator, Mapping
from typing import Final

from headrace.audit.declared import CudaTag, Standing, cuda_tag
from headrace.audit.elf import Library
from headrace.audit.policy import Component, Requirement
from headrace.audit.report import Finding
from headrace.audit.rules import Check, Inspection
from headrace.pte.fatbin import GpuCode

__all__ = ["CHECKS"]


def _components(inspection: Inspection, library: Library) -> Iterator[tuple[str, Component, frozenset[int]]]:
    """The CUDA components that a library needs, with the majors that ship each soname."""
    for needed in library.needed:
        component = inspection.policy.component(needed)
        if component is not None:
            yield needed, component, component.majors(needed) or frozenset()


def _standings(
    inspection: Inspection, rule: str
) -> Iterator[tuple[Library, str, Component, frozenset[int], Standing]]:
    """Each component that is loaded and not in the wheel, and how it is declared."""
    tag = cuda_tag(inspection.facts, inspection.policy.row)
    for library in inspection.loading.libraries:
        for needed, component, majors in inspection.each(rule, _components(inspection, library)):
            own = inspection.declared.name in component.distributions.values()
            if not own and inspection.loading.named(needed) is None:
                # A soname that several majors share is narrowed by what the wheel says of itself.
                narrowed = majors & {tag.major} if tag is not None else majors
                majors = narrowed or majors
                yield library, needed, component, majors, inspection.declared.component(component, majors)


def _wanted(component: Component, majors: frozenset[int]) -> str:
    names = [component.distributions[major] for major in sorted(majors) if major in component.distributions]
    return " or ".join(names or sorted(component.distributions.values()))


def component_undeclared(inspection: Inspection) -> Iterator[Finding]:
    for library, needed, component, majors, standing in _standings(inspection, "component-undeclared"):
        if standing.how == "absent":
            detail = f"needs {needed}; expected a requirement of {_wanted(component, majors)}, got none"
            yield Finding("component-undeclared", library.path, needed, detail)


def component_wrong_major(inspection: Inspection) -> Iterator[Finding]:
    for library, needed, component, majors, standing in _standings(inspection, "component-wrong-major"):
        if standing.how == "wrong":
            detail = f"needs {needed}; expected {_wanted(component, majors)}, got {standing.by}"
            yield Finding("component-wrong-major", library.path, needed, detail)


def component_optional(inspection: Inspection) -> Iterator[Finding]:
    for library, needed, _, _, standing in _standings(inspection, "component-optional"):
        if standing.how == "optional":
            detail = f"needs {needed}, which only `{standing.by}` requires"
            yield Finding("component-optional", library.path, needed, detail)


def component_through_other(inspection: Inspection) -> Iterator[Finding]:
    for library, needed, _, _, standing in _standings(inspection, "component-through-other"):
        if standing.how == "other":
            detail = f"needs {needed}, which comes only through `{standing.by}`"
            yield Finding("component-through-other", library.path, needed, detail)


def component_open_range(inspection: Inspection) -> Iterator[Finding]:
    for library, needed, _, _, standing in _standings(inspection, "component-open-range"):
        if standing.open_range:
            detail = f"needs {needed}; `{standing.by}` admits other majors"
            yield Finding("component-open-range", library.path, needed, detail)


def component_mixed_majors(inspection: Inspection) -> Iterator[Finding]:
    for load in inspection.each("component-mixed-majors", inspection.loading.loads):
        # A soname that several majors share says nothing; the others must leave one major in common.
        told: dict[str, frozenset[int]] = {}
        for library in load.libraries:
            told.update({needed: majors for needed, _, majors in _components(inspection, library) if majors})
        if told and not frozenset.intersection(*told.values()):
            names = ", ".join(sorted(told))
            yield Finding("component-mixed-majors", load.root.path, sorted(told)[0], f"loads {names}")


def _own(inspection: Inspection, component: Component) -> bool:
    """Whether this distribution is the one whose business it is to bring the component."""
    name = inspection.declared.name
    return name.startswith("nvidia-") or name in component.distributions.values()


def cuda_bundled(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.each("cuda-bundled", inspection.facts.libraries):
        name = posixpath.basename(library.path)
        component = next((one for one in inspection.policy.components if one.bundled.fullmatch(name)), None)
        if component is not None and not _own(inspection, component):
            detail = (
                f"{name} is part of {_wanted(component, component.majors(library.soname) or frozenset())}"
            )
            yield Finding("cuda-bundled", library.path, name, detail)


def driver_bundled(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.each("driver-bundled", inspection.facts.libraries):
        for name in (library.soname, posixpath.basename(library.path)):
            if inspection.policy.driver(name) is not None:
                yield Finding("driver-bundled", library.path, name, f"{name} is the driver's to bring")
                break


def driver_needed(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.loading.libraries:
        for needed in inspection.each("driver-needed", library.needed):
            if inspection.policy.driver(needed) is not None:
                detail = f"needs {needed}; without a driver it cannot be loaded"
                yield Finding("driver-needed", library.path, needed, detail)


def dlopen_undeclared(inspection: Inspection) -> Iterator[Finding]:
    for library in inspection.facts.libraries:
        for name in inspection.each("dlopen-undeclared", sorted(library.library_names)):
            component = inspection.policy.component(name)
            if component is None or name in library.needed or inspection.loading.named(name) is not None:
                continue
            standing = inspection.declared.component(component, component.majors(name) or frozenset())
            if standing.how in ("absent", "wrong") and not _own(inspection, component):
                detail = f"names {name}, of which no requirement is declared"
                yield Finding("dlopen-undeclared", library.path, name, detail)


def _content(inspection: Inspection) -> dict[str, frozenset[int]]:
    """CUDA content: a CUDA library that is NEEDED, or GPU code. Each with the majors it can belong to."""
    content: dict[str, frozenset[int]] = {}
    facts = inspection.facts
    for library in facts.libraries:
        if library.gpu_code:
            content[f"GPU code in {library.path}"] = frozenset()
        for needed, _, majors in _components(inspection, library):
            content[f"{library.path} needs {needed}"] = majors
        for needed in library.needed:
            if inspection.policy.driver(needed) is not None:
                content[f"{library.path} needs {needed}"] = frozenset()
    for place, code in facts.gpu_files:
        content[f"{place} holds {code.kind}"] = frozenset()
    return content


def _tag(inspection: Inspection, rule: str) -> CudaTag | None:
    tag = cuda_tag(inspection.facts, inspection.policy.row)
    inspection.looked_at[rule] += tag is not None
    return tag


def _label(inspection: Inspection) -> str:
    return f"{inspection.facts.name} {inspection.facts.version}".strip()


def cuda_tag_without_content(inspection: Inspection) -> Iterator[Finding]:
    rule = "cuda-tag-without-content"
    tag = _tag(inspection, rule)
    if tag is None or tag.major is None or _content(inspection):
        return
    libraries, policy = inspection.facts.libraries, inspection.policy
    if any(_own(inspection, one) for one in policy.components):
        return
    # A name, unlike a row, is kept by a package that opens CUDA without linking to it.
    if tag.strict or not any(one.opens_cuda for one in libraries):
        detail = f"says {tag.said}, but no library needs CUDA or holds GPU code"
        yield Finding(rule, _label(inspection), tag.said, detail)


def cuda_tag_wrong_major(inspection: Inspection) -> Iterator[Finding]:
    tag = _tag(inspection, "cuda-tag-wrong-major")
    if tag is None or tag.major is None:
        return
    for what, majors in _content(inspection).items():
        if majors and tag.major not in majors:
            path, _, needed = what.partition(" needs ")
            found = " or ".join(str(major) for major in sorted(majors))
            detail = f"needs {needed} of CUDA {found}, in a wheel that says {tag.said}"
            yield Finding("cuda-tag-wrong-major", path, needed, detail)


def cpu_tag_with_cuda(inspection: Inspection) -> Iterator[Finding]:
    tag = _tag(inspection, "cpu-tag-with-cuda")
    if tag is not None and tag.major is None:
        content = sorted(_content(inspection))
        if content:
            more = f" and {len(content) - 1} more" if len(content) > 1 else ""
            detail = f"says {tag.said}, but {content[0]}{more}"
            yield Finding("cpu-tag-with-cuda", _label(inspection), tag.said, detail)


def cuda_header(inspection: Inspection) -> Iterator[Finding]:
    if _content(inspection) or any(one.opens_cuda for one in inspection.facts.libraries):
        return
    if any(_own(inspection, component) for component in inspection.policy.components):
        return
    for place in inspection.each("cuda-header", sorted(inspection.facts.places)):
        if any(pattern.search(place) for pattern in inspection.policy.cuda_headers):
            detail = "a CUDA header, in a wheel without CUDA content"
            yield Finding("cuda-header", place, posixpath.basename(place), detail)


def _code(inspection: Inspection) -> Iterator[tuple[str, tuple[GpuCode, ...]]]:
    for library in inspection.facts.libraries:
        if library.gpu_code:
            yield library.path, library.gpu_code


def gpu_arch_missing(inspection: Inspection) -> Iterator[Finding]:
    wanted = inspection.policy.architectures
    held = list(_code(inspection)) if wanted else []
    if wanted and not held:
        # A list of architectures declares GPU code; that there is none at all is the plainest case.
        inspection.looked_at["gpu-arch-missing"] += 1
        detail = f"expected code for {', '.join(wanted)}, got no GPU code"
        yield Finding("gpu-arch-missing", _label(inspection), wanted[0], detail)
    for path, code in inspection.each("gpu-arch-missing", held):
        present = {one.arch for one in code}
        for arch in wanted:
            if arch not in present:
                detail = f"expected code for {arch}, got {', '.join(sorted(present))}"
                yield Finding("gpu-arch-missing", path, arch, detail)


def gpu_arch_undeclared(inspection: Inspection) -> Iterator[Finding]:
    wanted = inspection.policy.architectures
    for path, code in inspection.each("gpu-arch-undeclared", _code(inspection) if wanted else ()):
        for arch in sorted({one.arch for one in code} - set(wanted)):
            detail = f"holds code for {arch}; declared are {', '.join(wanted)}"
            yield Finding("gpu-arch-undeclared", path, arch, detail)


def gpu_code_unreadable(inspection: Inspection) -> Iterator[Finding]:
    rule = "gpu-code-unreadable"
    for library in inspection.facts.libraries:
        inspection.looked_at[rule] += bool(library.gpu_code or library.gpu_faults)
        for fault in library.gpu_faults:
            yield Finding(rule, library.path, fault.partition(":")[0], fault)
    for one in inspection.facts.faults:
        if one.rule == rule:
            yield Finding(rule, one.path, posixpath.basename(one.path), one.detail)


def _required(inspection: Inspection) -> Iterator[tuple[Requirement, list[Library]]]:
    for requirement in inspection.policy.requirements:
        pattern = requirement.library
        yield requirement, [o for o in inspection.facts.libraries if fnmatch.fnmatchcase(o.path, pattern)]


def library_missing(inspection: Inspection) -> Iterator[Finding]:
    for requirement, libraries in inspection.each("library-missing", _required(inspection)):
        if not libraries:
            detail = f"expected a library {requirement.library}, got none"
            yield Finding("library-missing", requirement.library, requirement.library, detail)


def symbol_missing(inspection: Inspection) -> Iterator[Finding]:
    for requirement, libraries in _required(inspection):
        for library in libraries:
            exports = library.exports | library.weak_exports
            for symbol in inspection.each("symbol-missing", requirement.symbols):
                if symbol not in exports:
                    yield Finding("symbol-missing", library.path, symbol, f"does not export {symbol}")


def kernel_missing(inspection: Inspection) -> Iterator[Finding]:
    for requirement, libraries in _required(inspection):
        for library in libraries:
            for kernel in inspection.each("kernel-missing", requirement.kernels):
                if kernel not in library.kernels:
                    entries = sum(one.count for one in library.gpu_code)
                    detail = f"expected the kernel {kernel}, got {entries} entries of GPU code without it"
                    yield Finding("kernel-missing", library.path, kernel, detail)


CHECKS: Final[Mapping[str, Check]] = {
    "component-undeclared": component_undeclared,
    "component-wrong-major": component_wrong_major,
    "component-mixed-majors": component_mixed_majors,
    "component-optional": component_optional,
    "component-through-other": component_through_other,
    "component-open-range": component_open_range,
    "cuda-bundled": cuda_bundled,
    "driver-bundled": driver_bundled,
    "driver-needed": driver_needed,
    "dlopen-undeclared": dlopen_undeclared,
    "cuda-tag-without-content": cuda_tag_without_content,
    "cuda-tag-wrong-major": cuda_tag_wrong_major,
    "cpu-tag-with-cuda": cpu_tag_with_cuda,
    "cuda-header": cuda_header,
    "gpu-arch-missing": gpu_arch_missing,
    "gpu-arch-undeclared": gpu_arch_undeclared,
    "gpu-code-unreadable": gpu_code_unreadable,
    "library-missing": library_missing,
    "symbol-missing": symbol_missing,
    "kernel-missing": kernel_missing,
}
