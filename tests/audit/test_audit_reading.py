"""PK5: facts come from untrusted bytes. Whatever they are, the answer is a verdict or an AuditError."""

from __future__ import annotations

import importlib
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.audit import audit, default_policy, elf, wheel
from headrace.audit.elf import Import, Quest
from headrace.audit.report import Report
from headrace.errors import AuditError
from tests.audit.wheel_faults import HOP12, RUNTIME12, cuda12
from tests.audit.wheel_forge import Entry, Forge, Wheel, fatbin, uses

Audited = Callable[[Wheel], Report]


def facts(library: Path, kernels: frozenset[str] = frozenset()) -> elf.Library:
    return elf.read(
        "pkg/_c.so", memoryview(library.read_bytes()), Quest(default_policy().build_path, kernels)
    )


def test_facts_are_those_that_the_linker_wrote(forge: Forge) -> None:
    """PK5: sonames, NEEDED, RUNPATH, imports and exports, strong, weak and variables."""
    other = forge.stub("libother.so.1", "other")
    source = uses("other") + (
        "int state = 1; __thread int local_state; __attribute__((weak)) int soft(void) { return 0; }\n"
        "extern int maybe(void) __attribute__((weak)); int (*p)(void) = maybe;\n"
        '__attribute__((visibility("hidden"))) int hidden(void) { return 0; }\n'
    )
    library = facts(forge.shared(source, soname="libmine.so.2", links=[other], runpath="$ORIGIN/a:$ORIGIN/b"))
    assert (library.soname, library.needed) == ("libmine.so.2", ("libother.so.1",))
    assert library.search_path == ("$ORIGIN/a", "$ORIGIN/b")
    assert set(library.imports) == {Import("other", "", "", False), Import("maybe", "", "", True)}
    assert library.exports == {"entry", "state", "local_state", "p"}
    assert library.weak_exports == {"soft"}
    assert library.data_exports == {"state", "local_state", "p"}
    assert (library.machine, library.bits, library.kind, library.dynamic) == ("x86_64", 64, "shared", True)


def test_facts_agree_with_readelf_on_a_large_library(forge: Forge) -> None:
    """PK5: versions and counts of a real library, read by another program."""
    shown = subprocess.run(
        [*["cc", "-print-file-name=libstdc++.so.6"]], capture_output=True, text=True, check=True
    )
    path = shown.stdout.strip()
    table = subprocess.run(
        ["readelf", "-W", "--dyn-syms", path], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in table.splitlines() if line.strip()[:1].isdigit()]
    library = facts(Path(path))
    undefined = {row[7].split("@")[0] for row in rows if row[6] == "UND" and len(row) > 7}
    assert {one.name for one in library.imports} == undefined
    strong = {
        row[7].split("@")[0]
        for row in rows
        if row[4] == "GLOBAL" and row[6] not in ("UND", "ABS") and row[5] in ("DEFAULT", "PROTECTED")
    }
    assert library.exports == strong
    assert len(strong) > 1000
    tied = {
        (row[7].split("@")[0], row[7].split("@")[1]) for row in rows if row[6] == "UND" and "@" in row[-2]
    }
    assert tied <= {(one.name, one.version) for one in library.imports}
    assert ("libc.so.6", "GLIBC_2.2.5") in library.version_needs


def test_either_hash_table_and_no_section_table_give_the_same_symbols(forge: Forge) -> None:
    """PK5: the loader needs neither; a packer may strip either."""
    source = (
        "int a(void) { return 0; } int b(void) { return 0; } extern int c(void); int d(void) { return c(); }"
    )
    gnu = forge.shared(source)
    sysv = forge.shared(source, flags=["-Wl,--hash-style=sysv"])
    stripped = bytearray(gnu.read_bytes())
    stripped[40:48] = bytes(8)  # e_shoff
    stripped[58:64] = bytes(6)  # e_shentsize, e_shnum, e_shstrndx
    bare = elf.read("x.so", memoryview(bytes(stripped)), Quest())
    for library in (facts(sysv), bare):
        assert library.exports == {"a", "b", "d"}
        assert {one.name for one in library.imports} == {"c"}


def test_kernels_behind_compression_count_by_registration_only_where_there_is_code(forge: Forge) -> None:
    """PK5: zstd code cannot be looked into before Python 3.14; the host's registration then stands for it."""
    wanted = frozenset({"_Z1kPf"})
    source = 'const char *entry(void) { return "_Z1kPf"; }'
    code = (Path(__file__).parent / "fatbins" / "zstd.fatbin").read_bytes()
    assert facts(forge.shared(source, code=code), wanted).kernels == wanted
    assert facts(forge.shared(source), wanted).kernels == frozenset()


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_elf_file_is_read_or_refused(forge: Forge, data: st.DataObject) -> None:
    """PK5: any byte may be anything, any length anything."""
    whole = forge.shared(uses("far"), soname="libx.so.1", runpath="$ORIGIN", code=fatbin(Entry("sass", 90)))
    damaged = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.one_of(st.integers(0, 1200), st.integers(0, len(damaged) - 1)))
        piece = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8)))
        )
        damaged[at : at + len(piece)] = piece
    end = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    with suppress(AuditError):
        elf.read(
            "x.so", memoryview(bytes(damaged[:end])), Quest(default_policy().build_path, frozenset({"k"}))
        )


@pytest.mark.parametrize(
    ("offset", "width", "value"),
    [
        (56, "<H", 0xFFFF),
        (60, "<H", 0xFFFF),
        (32, "<Q", 1 << 62),
        (40, "<Q", 1 << 62),
        (54, "<H", 0),
        (58, "<H", 1),
    ],
)
def test_a_header_that_claims_too_much_ends_soon(forge: Forge, offset: int, width: str, value: int) -> None:
    """PK5: counts and offsets of the ELF header."""
    data = bytearray(forge.shared("int entry;").read_bytes())
    struct.pack_into(width, data, offset, value)
    with suppress(AuditError):
        elf.read("x.so", memoryview(bytes(data)), Quest())


def test_a_symbol_table_that_claims_millions_is_refused(forge: Forge) -> None:
    """PK5: the count comes from a hash table's last chain, which a crafted file can place anywhere."""
    library = forge.shared("int entry;", flags=["-Wl,--hash-style=sysv"])
    data = bytearray(library.read_bytes())
    section = subprocess.run(
        ["readelf", "-SW", str(library)], capture_output=True, text=True, check=True
    ).stdout
    row = next(line for line in section.splitlines() if " .hash " in line)
    at = int(row.split("]")[1].split()[3], 16)
    struct.pack_into("<I", data, at + 4, 0x7FFFFFFF)
    with pytest.raises(AuditError, match="plausible symbol table"):
        elf.read("x.so", memoryview(bytes(data)), Quest())


# Archives, folders, installed distributions.


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04" + b"\x00" * 40])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    """PK5."""
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    path.write_bytes(content)
    with pytest.raises(AuditError, match="an archive that cannot be read"):
        audit(path)


def test_a_name_that_is_nothing_is_refused() -> None:
    """PK5."""
    for name in ("no-such-distribution", "no/such/wheel.whl", "", "\x00"):
        with pytest.raises(AuditError):
            audit(name)


def test_an_audit_that_inspected_nothing_fails(forge: Forge, tmp_path: Path, audited: Audited) -> None:
    """PK5: a wheel without libraries, one whose only library is unreadable, an empty folder."""
    with pytest.raises(AuditError, match="nothing was audited"):
        audited(Wheel({"pkg/__init__.py": b""}, version="1.0+cu130"))
    with pytest.raises(AuditError, match=r"_c\.so.*nothing was audited"):
        audited(Wheel({"pkg/_c.so": b"\x7fELF"}))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(AuditError, match="nothing was audited"):
        audit(empty)


def test_members_that_lie_about_their_place_overlap_or_are_encrypted_are_refused(
    forge: Forge, tmp_path: Path
) -> None:
    """PK5: sizes that add up to more than the archive has, and flags that zipfile cannot serve."""
    path = forge.wheel(Wheel({"pkg/_c.so": forge.shared("int entry;")}), tmp_path)
    whole = path.read_bytes()
    central = whole.index(b"PK\x01\x02")
    more = bytearray(whole)
    struct.pack_into("<I", more, central + 20, 0x7FFFFFFF)
    encrypted = bytearray(whole)
    struct.pack_into("<H", encrypted, central + 8, 1)
    for content in (bytes(more), bytes(encrypted)):
        path.write_bytes(content)
        with pytest.raises(AuditError):
            audit(path)


@settings(max_examples=40, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3000), piece=st.binary(min_size=1, max_size=12), cut=st.integers(0, 400))
def test_a_damaged_archive_is_read_or_refused(
    forge: Forge, tmp_path: Path, at: int, piece: bytes, cut: int
) -> None:
    """PK5."""
    path = forge.wheel(Wheel({"pkg/_c.so": forge.shared("int entry;")}), tmp_path)
    data = bytearray(path.read_bytes())
    at %= len(data)
    data[at : at + len(piece)] = piece
    path.write_bytes(data[: len(data) - cut] if cut % 4 == 0 else data)
    with suppress(AuditError):
        audit(path).text()


def test_names_of_members_cannot_write_to_the_terminal_or_add_annotations(
    audited: Audited, forge: Forge
) -> None:
    """PK5: a wheel's own strings are shown escaped."""
    name = "../a\x1b[31m\n::error::forged"
    report = audited(Wheel({"pkg/_c.so": forge.shared("int entry;")}, raw_members={name: b""}))
    assert "\x1b" not in report.text()
    assert "\n::error::forged" not in report.text() + report.annotations()
    assert len(report.annotations().splitlines()) == len(report.problems) + len(report.advice)


def test_a_folder_is_audited_like_the_wheel_it_was(forge: Forge, tmp_path: Path) -> None:
    """PK5: an unpacked wheel, with links where a wheel has none."""
    archive = forge.wheel(Wheel({"pkg/_c.so": cuda12(forge)}, requires=[]), tmp_path)
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    packed, unpacked = audit(archive), audit(folder)
    assert [f.rule for f in unpacked.problems] == [f.rule for f in packed.problems] != []
    assert unpacked.problems == packed.problems
    other = forge.stub("libother.so.1", "other")
    (folder / "pkg/_d.so").write_bytes(
        forge.shared(uses("other"), links=[other], runpath="$ORIGIN").read_bytes()
    )
    (folder / "pkg/libother.so.1.0").write_bytes(other.read_bytes())
    (folder / "pkg/libother.so.1").symlink_to("libother.so.1.0")
    assert audit(folder).problems == packed.problems
    (folder / "pkg/loop").symlink_to(folder)
    assert audit(folder).problems == packed.problems


def test_an_installed_distribution_is_audited_with_what_stands_beside_it(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PK5: by name and by .dist-info; a hop is followed to the files that are really there."""
    site = tmp_path / "site-packages"
    other = forge.stub("libother.so.1", "other")
    library = forge.shared(uses("other"), links=[other], runpath="$ORIGIN/../friend/lib")
    info = site / "pkg-1.0.dist-info"
    for path, content in {
        site / "pkg/_c.so": library.read_bytes(),
        info / "METADATA": b"Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n",
        info / "WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-manylinux_2_35_x86_64\n",
        info / "RECORD": b"pkg/_c.so,,\npkg-1.0.dist-info/METADATA,,\npkg-1.0.dist-info/WHEEL,,\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    assert {f.rule for f in audit("pkg").problems} == {"needed-unresolved", "runpath-dead"}
    (site / "friend/lib").mkdir(parents=True)
    (site / "friend/lib/libother.so.1").write_bytes(other.read_bytes())
    assert audit("pkg").ok
    assert audit(info).ok


def test_the_audit_needs_its_extra_and_says_so(forge: Forge, tmp_path: Path) -> None:
    """PK1, PK5: importing is light; calling without the readers names what to install."""
    path = forge.wheel(Wheel({"pkg/_c.so": forge.shared("int entry;")}), tmp_path)
    script = (
        "import sys; from headrace import audit\n"
        "light = not {'elftools', 'packaging', 'tomllib', 'headrace.audit.elf'} & set(sys.modules)\n"
        "sys.modules['elftools'] = None\n"
        f"try: audit({str(path)!r})\n"
        "except Exception as e: print(light, type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True AuditError ")
    assert "pip install pyelftools packaging" in done.stdout


def test_the_command_works_where_the_package_shows_the_function_of_its_name(
    forge: Forge, tmp_path: Path
) -> None:
    """PK5: `headrace.audit(path)` is the public name, and headrace.audit is the package that has it."""
    path = forge.wheel(Wheel({"pkg/_c.so": forge.shared("int entry;")}), tmp_path)
    script = (
        "import argparse, headrace; from headrace.audit import audit; headrace.audit = audit\n"
        "from headrace.audit import command\n"
        "parser = argparse.ArgumentParser(); command.add_arguments(parser)\n"
        f"assert headrace.audit({str(path)!r}).ok\n"
        f"raise SystemExit(command.run(parser.parse_args([{str(path)!r}])))\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)


@pytest.mark.parametrize("unit", [b"a", b"lib", b"/a", b"/home/a", b"a.", b"/home/"])
def test_no_text_takes_the_square_of_its_length(unit: bytes, audited: Audited, forge: Forge) -> None:
    """PK5: searching half a megabyte of what a pattern likes best ends within seconds."""
    long = unit * (500_000 // len(unit))
    text = long.decode()
    begin = time.process_time()
    library = forge.shared(f'const char *entry(void) {{ return "{text}"; }}')
    audited(Wheel({"pkg/_c.so": library, "pkg/__init__.py": long}))
    assert time.process_time() - begin < 5


def test_build_paths_end_where_their_string_ends(forge: Forge) -> None:
    """PK5: "/home/" and a slash far behind it are no path."""
    apart = forge.shared('const char a[] = "/home/"; const char b[] = "me/x";')
    assert facts(apart).build_paths == ()
    whole = forge.shared('const char a[] = "at /home/me/x"; const char b[] = "x/home/me/y";')
    assert facts(whole).build_paths == ("/home/me/x",)


def test_libraries_under_data_schemes_are_placed_where_the_installer_puts_them(
    forge: Forge, tmp_path: Path
) -> None:
    """PK5: NAME.data/data/lib is the environment's lib, three folders above site-packages."""
    other = forge.stub("libother.so.1", "other")
    library = forge.shared(uses("other"), links=[other], runpath="$ORIGIN/../../../../lib")
    members = {"pkg/_c.so": library, "pkg-1.0.data/data/lib/libother.so.1": other}
    found = wheel.read(str(forge.wheel(Wheel(members), tmp_path)), default_policy())
    assert {one.path for one in found.libraries} == {"pkg/_c.so", "../../../lib/libother.so.1"}
    assert audit(tmp_path / "pkg-1.0-py3-none-manylinux_2_35_x86_64.whl").ok


def test_gpu_code_in_files_of_its_own_is_cuda_content(audited: Audited, forge: Forge) -> None:
    """PK5: .fatbin, .cubin and .ptx beside the libraries, as packages that load them by the driver have."""
    cubin = bytearray(forge.shared("int entry;").read_bytes())
    struct.pack_into("<H", cubin, 18, 190)
    plain = forge.shared("int entry;")
    ptx = b"//\n.version 9.0\n.target sm_90a\n.address_size 64\n"
    for name, content in {
        "k.fatbin": fatbin(Entry("sass", 90)),
        "k.cubin": bytes(cubin),
        "k.ptx": ptx,
    }.items():
        report = audited(Wheel({"pkg/_c.so": plain, f"pkg/{name}": content}, version="1.0+cpu"))
        assert [f.rule for f in report.problems] == ["cpu-tag-with-cuda"], name


def test_the_closure_is_followed_through_the_wheel(audited: Audited, forge: Forge) -> None:
    """PK5: what was loaded before is found by its soname, whatever the hops say."""
    far = forge.stub("libfar.so.1", "far_away")
    near = forge.shared(uses("far_away"), soname="libnear.so.1", links=[far])
    source = "extern int entry(void), far_away(void); int other(void) { return entry() + far_away(); }"
    first = forge.shared(source, links=[far, near], runpath="$ORIGIN/lib")
    files = {"pkg/_c.so": first, "pkg/lib/libnear.so.1": near, "pkg/lib/libfar.so.1": far}
    assert audited(Wheel(files)).ok
    # The library alone, opened by something else, has no way to the other.
    alone = {"pkg/lib/libnear.so.1": near, "pkg/lib/libfar.so.1": far}
    assert [f.rule for f in audited(Wheel(alone)).problems] == ["needed-no-hop"]


def test_libraries_that_need_each_other_end(audited: Audited, forge: Forge) -> None:
    """PK5: a circle of NEEDED."""
    first = forge.shared("extern int two(void); int one(void) { return 0; }", soname="libone.so")
    second = forge.shared(
        "extern int one(void); int two(void) { return one(); }",
        soname="libtwo.so",
        links=[first],
        runpath="$ORIGIN",
    )
    first = forge.shared(
        "extern int two(void); int one(void) { return two(); }",
        soname="libone.so",
        links=[second],
        runpath="$ORIGIN",
    )
    assert audited(Wheel({"pkg/libone.so": first, "pkg/libtwo.so": second})).ok


@pytest.mark.parametrize(
    ("requirement", "rule"),
    [
        (RUNTIME12, None),
        ("nvidia_cuda_runtime.cu12", None),
        ("cuda-toolkit[cudart]==12.*", None),
        ("cuda-toolkit[all]>=12.6,<13", None),
        ("cuda-toolkit[cublas]==12.*", "component-undeclared"),
        ("nvidia-cuda-runtime>=13,<14", "component-wrong-major"),
        ("nvidia-cuda-runtime-cu12; sys_platform == 'win32'", "component-undeclared"),
        ("nvidia-cuda-runtime-cu12; platform_machine == 'x86_64'", None),
        ("torch==2.6.0", "component-through-other"),
        ("friend-cu12", "component-through-other"),
        ("friend-cu13", "component-undeclared"),
    ],
)
def test_a_component_is_declared_in_any_of_the_ways_that_pip_has(
    requirement: str, rule: str | None, audited: Audited, forge: Forge
) -> None:
    """PK5: names with and without a suffix, the toolkit's extras, markers, other packages."""
    runpath = HOP12 if rule in (None, "component-through-other", "component-wrong-major") else ""
    report = audited(Wheel({"pkg/_c.so": cuda12(forge, runpath)}, requires=[requirement]))
    assert [f.rule for f in (*report.problems, *report.advice)] == ([rule] if rule else [])


def test_nvidia_s_own_packages_may_bring_what_they_are_for(audited: Audited, forge: Forge) -> None:
    """PK5: a component's own wheel bundles it, and has headers and no CUDA NEEDED."""
    runtime = forge.stub("libcudart.so.12", "cudaMalloc")
    files = {
        "nvidia/cuda_runtime/lib/libcudart.so.12": runtime,
        "nvidia/cuda_runtime/include/cuda_runtime.h": b"",
    }
    assert audited(Wheel(files, name="nvidia-cuda-runtime-cu12")).ok
    assert {f.rule for f in audited(Wheel(files, name="somebody-cu12")).problems} >= {"cuda-bundled"}
