"""What a program's AOTInductor islands (``CudaBackend``) are and ask for, told without running any of them.

::

    for island in headrace.aoti.read("m.pte"):
        print(island.target, island.library_nbytes, island.missing)
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from . import pte
from .engine import core, library_folders
from .errors import ProgramError
from .pte.table import Source, opened

__all__ = ["Constant", "Island", "library", "read"]

DELEGATE = "CudaBackend"


@dataclass(frozen=True)
class Constant:
    """One constant that the library wants: ``fqn`` is the model's name for it, ``key`` that of its ``nbytes`` bytes in
    the named data; ``device`` is "cpu" or "cuda"."""

    fqn: str
    key: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    device: str


@dataclass(frozen=True)
class Island:
    """One AOTInductor island.

    ``target``           "host" or "cuda", by the program's compile specs
    ``march``            the instruction set of a host library ("x86-64-v3"); None where it is not said
    ``library_key``      the library's name in the named data; ``library_nbytes`` its size, None where it is in none of
                         the files
    ``architectures``    of the GPU code in it: "sm_90a" for machine code, "compute_90" for PTX; "" in a library for the host
    ``constants``        in the order of the payload; of older payloads none, whose ``blob_key`` names all in one piece
    ``shims``            the functions that headrace answers for the library, as the library calls them
    ``needed``           the system's libraries that it names
    ``versions``         (library, version) of what it asks of them
    ``missing``          what this process or system lacks of all that, a line for each; empty: it loads here
    """

    method: str
    instruction: int
    target: str
    march: str | None
    library_key: str
    library_nbytes: int | None
    architectures: str
    blob_key: str
    constants: tuple[Constant, ...]
    shims: tuple[str, ...]
    needed: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def read(source: Source) -> tuple[Island, ...]:
    """The AOTInductor islands of the program at the path ``source``, or in the bytes ``source``, in order.

    Raises ProgramError if the program cannot be read, or a payload or library in it is not understood.
    """
    file = pte.read(source)
    core.set_library_folders(library_folders())
    found = []
    for method in file.methods:
        for island in method.islands:
            if island.delegate != DELEGATE:
                continue
            try:
                found.append(_island(source, file, method.name, island))
            except ProgramError as error:
                where = f"{file.source}, method {method.name!r}, instruction {island.instruction}"
                raise ProgramError(f"{where}, delegate '{DELEGATE}': {error}") from None
    return tuple(found)


def library(source: Source, key: str) -> bytes | None:
    """The bytes of the library that the program names ``key``; None where it is not in this file."""
    file = pte.read(source)
    entry = next((e for e in file.named_data if e.key == key), None)
    if entry is None:
        return None
    with opened(source) as stream:
        return stream.read(file.segments[entry.segment].offset, entry.nbytes)


def _island(source: Source, file: pte.ProgramFile, method: str, island: pte.Island) -> Island:
    with opened(source) as stream:
        payload = core.read_aoti_payload(stream.read(island.payload_offset, island.payload_nbytes), method)
    image = library(source, payload["library_key"])
    facts = core.library_facts(image) if image is not None else None
    host = island.spec("headrace_host")
    cuda = host is None and island.spec("target_device") != b"cpu"
    missing: list[str] = []
    if facts is not None:
        missing = [f"the function {name}" for name in facts["missing_shims"]] + facts["missing_needs"]
    return Island(
        method,
        island.instruction,
        "cuda" if cuda else "host",
        None if host is None else _march(host),
        payload["library_key"],
        None if image is None else len(image),
        facts["architectures"] if facts else "",
        payload["blob_key"],
        tuple(Constant(**constant) for constant in payload["constants"]),
        tuple(facts["shims"]) if facts else (),
        tuple(facts["needed"]) if facts else (),
        tuple(facts["versions"]) if facts else (),
        tuple(missing),
    )


def _march(spec: bytes) -> str | None:
    try:
        march = json.loads(spec).get("march")
    except (ValueError, AttributeError, RecursionError):
        raise ProgramError("compile spec 'headrace_host': expected a JSON object; export it again") from None
    return march if isinstance(march, str) and march else None
