"""Wheels with exactly one fault each, and their good twins: the same wheel with the fault mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.audit.wheel_forge import Entry, Forge, Wheel, cubin, fatbin, patched, uses

RUNTIME12 = "nvidia-cuda-runtime-cu12>=12.6"
HOP12 = "$ORIGIN/../nvidia/cuda_runtime/lib"
HOP13 = "$ORIGIN/../nvidia/cu13/lib"


@dataclass(frozen=True)
class Case:
    """One fault of one rule. ``make(forge, True)`` is the faulty wheel, ``make(forge, False)`` its twin."""

    rule: str
    name: str
    make: Callable[[Forge, bool], Wheel]

    @property
    def id(self) -> str:
        return f"{self.rule}-{self.name}"


CASES: list[Case] = []


def case(rule: str, name: str = "plain") -> Callable[[Callable[[Forge, bool], Wheel]], Callable[..., Wheel]]:
    def add(make: Callable[[Forge, bool], Wheel]) -> Callable[[Forge, bool], Wheel]:
        CASES.append(Case(rule, name, make))
        return make

    return add


def plain(forge: Forge, **options: object) -> bytes:
    """A library without CUDA that is in order."""
    return forge.shared("int entry(void) { return 1; }", **options).read_bytes()  # type: ignore[arg-type]


def cuda12(forge: Forge, runpath: str = HOP12, code: bytes | None = None) -> bytes:
    """A library that uses the CUDA 12 run time from NVIDIA's package."""
    runtime = forge.stub("libcudart.so.12", "cudaMalloc")
    return forge.shared(uses("cudaMalloc"), links=[runtime], runpath=runpath, code=code).read_bytes()


def cuda13(forge: Forge) -> bytes:
    runtime = forge.stub("libcudart.so.13", "cudaMalloc")
    return forge.shared(uses("cudaMalloc"), links=[runtime], runpath=HOP13).read_bytes()


def quoting(forge: Forge, text: str) -> bytes:
    """A library with ``text`` in its data."""
    return plain_source(forge, f'const char *entry(void) {{ return "{text}"; }}')


def plain_source(forge: Forge, source: str) -> bytes:
    return forge.shared(source).read_bytes()


# The file itself.


@case("elf-unreadable", "garbage")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel(
        {"pkg/_c.so": plain(forge), "pkg/bad.so": b"\x7fELF" + b"garbage" * 9 if faulty else b"text"}
    )


@case("elf-unreadable", "cut")
def _(forge: Forge, faulty: bool) -> Wheel:
    whole = plain(forge)
    return Wheel({"pkg/_c.so": whole, "pkg/b.so": plain_source(forge, "int b;")[: 700 if faulty else None]})


@case("metadata-unreadable")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge)}, requires=["numpy >>> 1" if faulty else "numpy>1"])


@case("member-unsafe", "climbs")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge)}, raw_members={"../evil.txt" if faulty else "evil.txt": b"x"})


@case("member-unsafe", "absolute")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge)}, raw_members={"/etc/evil" if faulty else "etc/evil": b"x"})


@case("member-unsafe", "bomb")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge), "pkg/zeros.bin": b"\x00" * ((65 if faulty else 1) << 20)})


@case("build-path", "home")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": quoting(forge, "/home/me/pkg/build" if faulty else "share/pkg/build")})


@case("build-path", "source")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": quoting(forge, "/home/me/src/a.cu" if faulty else "/usr/include/c++/12/a.h")})


@case("stack-executable")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge, flags=["-Wl,-z,execstack"] if faulty else [])})


# Platform.


@case("tag-any")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge)}, platform="any" if faulty else "manylinux_2_17_x86_64")


@case("tag-architecture")
def _(forge: Forge, faulty: bool) -> Wheel:
    library = forge.shared("int entry(void) { return 1; }")
    return Wheel({"pkg/_c.so": patched(library, 18, b"\xb7\x00" if faulty else b"\x3e\x00")})


def _glibc(forge: Forge) -> bytes:
    source = "#include <string.h>\nvoid entry(char *a, char *b, long n) { memcpy(a, b, n); }"
    return forge.shared(source, bare=False).read_bytes()


@case("glibc-newer-than-tag")
def _(forge: Forge, faulty: bool) -> Wheel:
    # memcpy has the version GLIBC_2.14 on x86_64.
    return Wheel({"pkg/_c.so": _glibc(forge)}, platform=f"manylinux_2_{12 if faulty else 17}_x86_64")


@case("glibc-newer-than-tag", "oldest-of-several")
def _(forge: Forge, faulty: bool) -> Wheel:
    older = "manylinux2010_x86_64" if faulty else "manylinux2014_x86_64"
    return Wheel({"pkg/_c.so": _glibc(forge)}, platform=f"{older}.manylinux_2_28_x86_64")


@case("libstdcxx-newer-than-tag")
def _(forge: Forge, faulty: bool) -> Wheel:
    # _M_wait of condition_variable came with GLIBCXX_3.4.30; the name is bound by a version script's twin.
    stub = forge.shared(
        "int newer(void) { return 0; }",
        soname="libstdc++.so.6",
        flags=[f"-Wl,--version-script={_versions(forge)}"],
    )
    library = forge.shared(uses("newer"), links=[stub])
    return Wheel({"pkg/_c.so": library}, platform=f"manylinux_2_{31 if faulty else 35}_x86_64")


def _versions(forge: Forge) -> str:
    script = forge.folder / "versions"
    script.write_text("GLIBCXX_3.4.30 { newer; };\n")
    return str(script)


@case("libstdcxx-bundled")
def _(forge: Forge, faulty: bool) -> Wheel:
    name = "libstdc++-0a1b2c3d.so.6" if faulty else "libother-0a1b2c3d.so.6"
    return Wheel({"pkg/_c.so": plain(forge), f"pkg.libs/{name}": forge.stub(name, "bundled")})


@case("libstdcxx-exported")
def _(forge: Forge, faulty: bool) -> Wheel:
    hidden = "" if faulty else '__attribute__((visibility("hidden")))'
    return Wheel({"pkg/_c.so": plain_source(forge, f"{hidden} int __cxa_throw(void) {{ return 0; }}")})


# How libraries find each other.


@case("needed-unresolved")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libother.so.1", "other")
    library = forge.shared(uses("other"), links=[other], runpath="$ORIGIN")
    return Wheel({"pkg/_c.so": library} | ({} if faulty else {"pkg/libother.so.1": other}))


@case("needed-unresolved", "development-name-of-the-driver")
def _(forge: Forge, faulty: bool) -> Wheel:
    # libcuda.so comes with a toolkit; a driver installs libcuda.so.1, which the twin opens at run time.
    if not faulty:
        return Wheel({"pkg/_c.so": quoting(forge, "libcuda.so.1")})
    return Wheel({"pkg/_c.so": forge.shared(uses("cuInit"), links=[forge.stub("libcuda.so", "cuInit")])})


@case("needed-unresolved", "in-the-closure")
def _(forge: Forge, faulty: bool) -> Wheel:
    # The extension is fine; what it needs is not.
    far = forge.stub("libfar.so.1", "far_away")
    near_links = [far] if faulty else []
    near = forge.shared(uses(*(["far_away"] if faulty else [])), soname="libnear.so.1", links=near_links)
    source = "extern int entry(void); int other(void) { return entry(); }"
    library = forge.shared(source, links=[near], runpath="$ORIGIN")
    return Wheel({"pkg/_c.so": library, "pkg/libnear.so.1": near})


@case("needed-no-hop")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libother.so.1", "other")
    library = forge.shared(uses("other"), links=[other], runpath="$ORIGIN" if faulty else "$ORIGIN/lib")
    return Wheel({"pkg/_c.so": library, "pkg/lib/libother.so.1": other})


@case("needed-no-hop", "runpath-is-not-inherited")
def _(forge: Forge, faulty: bool) -> Wheel:
    # DT_RPATH of the extension serves what it loads; DT_RUNPATH serves the extension alone.
    far = forge.stub("libfar.so.1", "far_away")
    near = forge.shared(uses("far_away"), soname="libnear.so.1", links=[far])
    source = "extern int entry(void); int other(void) { return entry(); }"
    flags = [] if faulty else ["-Wl,--disable-new-dtags"]
    library = forge.shared(source, links=[near], runpath="$ORIGIN/lib", flags=flags)
    return Wheel({"pkg/_c.so": library, "pkg/lib/libnear.so.1": near, "pkg/lib/libfar.so.1": far})


@case("needed-path")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.shared("int other(void) { return 0; }", soname="" if faulty else "libother.so.1")
    library = forge.shared(uses("other"), links=[other], runpath="" if faulty else "$ORIGIN")
    return Wheel({"pkg/_c.so": library} | ({} if faulty else {"pkg/libother.so.1": other}))


@case("needed-preloaded", "of-a-dependency")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libc10.so", "c10")
    runpath = "" if faulty else "$ORIGIN/../torch/lib"
    return Wheel({"pkg/_c.so": forge.shared(uses("c10"), links=[other], runpath=runpath)}, requires=["torch"])


@case("needed-preloaded", "by-python")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libother.so.1", "other")
    library = forge.shared(uses("other"), links=[other], runpath="" if faulty else "$ORIGIN/lib")
    source = b'import ctypes\nctypes.CDLL(here + "/lib/libother.so.1")\n'
    return Wheel({"pkg/_c.so": library, "pkg/lib/libother.so.1": other, "pkg/__init__.py": source})


@case("needed-unused", "of-the-wheel")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libother.so.1", "other")
    library = forge.shared(uses(*([] if faulty else ["other"])), links=[other], runpath="$ORIGIN")
    return Wheel({"pkg/_c.so": library, "pkg/libother.so.1": other})


@case("needed-unused", "component")
def _(forge: Forge, faulty: bool) -> Wheel:
    blas = forge.stub("libcublas.so.12", "cublasCreate_v2")
    called = [] if faulty else ["cublasCreate_v2"]
    library = forge.shared(uses(*called), links=[blas], runpath="$ORIGIN/../nvidia/cublas/lib")
    return Wheel({"pkg/_c.so": library}, requires=["nvidia-cublas-cu12>=12.4"])


@case("symbol-unresolved", "nowhere")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libother.so.1", "one", *([] if faulty else ["two"]))
    library = forge.shared(uses("one", "two"), links=[other], runpath="$ORIGIN")
    return Wheel({"pkg/_c.so": library, "pkg/libother.so.1": other})


@case("symbol-unresolved", "defined-by-one-not-needed")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libother.so.1", "other")
    library = forge.shared(uses("other"), links=[] if faulty else [other], runpath="$ORIGIN")
    return Wheel({"pkg/_c.so": library, "pkg/libother.so.1": other})


@case("symbol-unresolved", "cuda-without-needed")
def _(forge: Forge, faulty: bool) -> Wheel:
    runtime = forge.stub("libcudart.so.12", "cudaMalloc")
    blas = forge.stub("libcublas.so.12", "cublasCreate_v2")
    links = [blas] if faulty else [blas, runtime]
    runpath = "$ORIGIN/../nvidia/cublas/lib:" + HOP12
    library = forge.shared(uses("cudaMalloc", "cublasCreate_v2"), links=links, runpath=runpath)
    return Wheel({"pkg/_c.so": library}, requires=[RUNTIME12, "nvidia-cublas-cu12>=12.4"])


@case("symbol-twice", "in-one-load")
def _(forge: Forge, faulty: bool) -> Wheel:
    other = forge.stub("libother.so.1", "other", "state")
    hidden = "" if faulty else "static"
    source = uses("other") + f"__attribute__((used)) {hidden} int state(void) {{ return 1; }}"
    library = forge.shared(source, links=[other], runpath="$ORIGIN")
    return Wheel({"pkg/_c.so": library, "pkg/libother.so.1": other})


@case("symbol-twice", "state-of-two-extensions")
def _(forge: Forge, faulty: bool) -> Wheel:
    one = plain_source(forge, "int selected_stream = 1; int one(void) { return selected_stream; }")
    hidden = "" if faulty else "static "
    two = plain_source(forge, f"{hidden}int selected_stream = 2; int two(void) {{ return selected_stream; }}")
    return Wheel({"pkg/_one.so": one, "pkg/_two.so": two})


@case("symbol-twice-apart", "tables-of-a-class")
def _(forge: Forge, faulty: bool) -> Wheel:
    source = 'struct __attribute__((visibility("%s"))) A { virtual void f(); }; void A::f() {}'
    source += " void *%s() { return new A; } void *operator new(unsigned long) noexcept;"
    one, two = (
        forge.shared(
            source % (visibility, name) + f" static char {name}_memory[64];"
            f" void *operator new(unsigned long) noexcept {{ return {name}_memory; }}",
            compiler="c++",
            flags=["-fno-rtti", "-fno-exceptions", "-Wno-new-returns-null"],
        )
        for name, visibility in (("one", "default"), ("two", "default" if faulty else "hidden"))
    )
    return Wheel({"pkg/_one.so": one, "pkg/_two.so": two})


@case("symbol-twice-apart")
def _(forge: Forge, faulty: bool) -> Wheel:
    hidden = "" if faulty else "static "
    two = plain_source(forge, f"{hidden}int get(void) {{ return 2; }} int two(void) {{ return get(); }}")
    return Wheel({"pkg/_one.so": plain_source(forge, "int get(void) { return 1; }"), "pkg/_two.so": two})


@case("soname-twice")
def _(forge: Forge, faulty: bool) -> Wheel:
    one = forge.stub("libsame.so.1", "one")
    two = forge.stub("libsame.so.1" if faulty else "libother.so.1", "two")
    return Wheel({"pkg/a/libsame.so.1": one, f"pkg/b/{two.name}": two})


@case("library-copied")
def _(forge: Forge, faulty: bool) -> Wheel:
    one = forge.stub("libsame.so.1", "one")
    return Wheel({"pkg/libsame.so.1": one} | ({"pkg/libsame.so": one} if faulty else {}))


@case("runpath-not-origin", "absolute")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge, runpath="/usr/local/cuda/lib64" if faulty else "$ORIGIN")})


@case("runpath-not-origin", "current-folder")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge, runpath="$ORIGIN:" if faulty else "$ORIGIN")})


@case("runpath-not-origin", "looks-like-it")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge, runpath="$ORIGINAL/lib" if faulty else "${ORIGIN}")})


@case("runpath-escapes")
def _(forge: Forge, faulty: bool) -> Wheel:
    place = "pkg/_c.so" if faulty else "pkg/deep/_c.so"
    return Wheel({place: plain(forge, runpath="$ORIGIN/../../pkg"), "pkg/x": b""})


@case("runpath-escapes", "unless-the-wheel-puts-files-there")
def _(forge: Forge, faulty: bool) -> Wheel:
    member = "pkg/lib/x" if faulty else "pkg-1.0.data/data/lib/x"
    return Wheel({"pkg/_c.so": plain(forge, runpath="$ORIGIN/../../../../lib"), member: b""})


@case("runpath-dead")
def _(forge: Forge, faulty: bool) -> Wheel:
    library = plain(forge, runpath="$ORIGIN/../friend/lib")
    return Wheel({"pkg/_c.so": library}, requires=[] if faulty else ["friend"])


@case("runpath-dead", "wrong-depth")
def _(forge: Forge, faulty: bool) -> Wheel:
    runpath = "$ORIGIN/" + ("" if faulty else "../") + "../nvidia/cuda_runtime/lib"
    return Wheel({"pkg/sub/_c.so": plain(forge, runpath=runpath)}, requires=[RUNTIME12])


@case("runpath-dead", "site-packages-itself")
def _(forge: Forge, faulty: bool) -> Wheel:
    # A folder that is always there, but no package's; unless the wheel has a library in it.
    files = {"pkg/_c.so": plain(forge, runpath="$ORIGIN/..")}
    return Wheel(files if faulty else {**files, "_top.so": plain_source(forge, "int top;")})


@case("runpath-undeclared")
def _(forge: Forge, faulty: bool) -> Wheel:
    library = plain(forge, runpath="$ORIGIN/../torch/lib")
    return Wheel({"pkg/_c.so": library}, requires=[] if faulty else ["torch"])


# CUDA components.


@case("cuda-bundled", "by-its-name")
def _(forge: Forge, faulty: bool) -> Wheel:
    runtime = forge.stub("libcudart.so.12", "cudaMalloc")
    files = {"pkg/_c.so": cuda12(forge, "$ORIGIN" if faulty else HOP12)}
    return Wheel(
        files | ({"pkg/libcudart.so.12": runtime} if faulty else {}), requires=[] if faulty else [RUNTIME12]
    )


@case("cuda-bundled", "grafted")
def _(forge: Forge, faulty: bool) -> Wheel:
    name = "libcublas-0a1b2c3d.so.12.4.5" if faulty else "libmyblas-0a1b2c3d.so.12.4.5"
    blas = forge.stub(name, "cublasCreate_v2")
    library = forge.shared(uses("cublasCreate_v2"), links=[blas], runpath="$ORIGIN/../pkg.libs")
    return Wheel({"pkg/_c.so": library, f"pkg.libs/{name}": blas})


@case("cuda-bundled", "grafted-with-a-point")
def _(forge: Forge, faulty: bool) -> Wheel:
    name = f"lib{'' if faulty else 'my'}cudart.0a1b2c3d.so.12"
    runtime = forge.stub(name, "cudaMalloc")
    library = forge.shared(uses("cudaMalloc"), links=[runtime], runpath="$ORIGIN/../pkg.libs")
    return Wheel({"pkg/_c.so": library, f"pkg.libs/{name}": runtime})


@case("driver-bundled")
def _(forge: Forge, faulty: bool) -> Wheel:
    name = "libcuda.so.1" if faulty else "libmine.so.1"
    return Wheel({"pkg/_c.so": plain(forge), f"pkg/{name}": forge.stub(name, "cuInit")})


@case("driver-needed")
def _(forge: Forge, faulty: bool) -> Wheel:
    if not faulty:
        return Wheel({"pkg/_c.so": quoting(forge, "libcuda.so.1")})
    return Wheel({"pkg/_c.so": forge.shared(uses("cuInit"), links=[forge.stub("libcuda.so.1", "cuInit")])})


@case("component-undeclared")
def _(forge: Forge, faulty: bool) -> Wheel:
    # Without a hop, since a hop to a place that nobody declares is another fault.
    runpath = "$ORIGIN" if faulty else HOP12
    return Wheel({"pkg/_c.so": cuda12(forge, runpath)}, requires=[] if faulty else [RUNTIME12])


@case("component-wrong-major", "suffix")
def _(forge: Forge, faulty: bool) -> Wheel:
    requires = ["nvidia-cuda-runtime-cu11" if faulty else RUNTIME12]
    return Wheel({"pkg/_c.so": cuda12(forge)}, requires=requires)


@case("component-wrong-major", "specifier")
def _(forge: Forge, faulty: bool) -> Wheel:
    requires = [f"cuda-toolkit[cudart]=={'12' if faulty else '13'}.*"]
    return Wheel({"pkg/_c.so": cuda13(forge)}, requires=requires)


@case("component-mixed-majors")
def _(forge: Forge, faulty: bool) -> Wheel:
    major = 13 if faulty else 12
    blas = forge.stub(f"libcublas.so.{major}", "cublasCreate_v2")
    runtime = forge.stub("libcudart.so.12", "cudaMalloc")
    runpath = f"{HOP12}:{HOP13 if faulty else '$ORIGIN/../nvidia/cublas/lib'}"
    library = forge.shared(uses("cudaMalloc", "cublasCreate_v2"), links=[runtime, blas], runpath=runpath)
    requires = [RUNTIME12, "nvidia-cublas>=13,<14" if faulty else "nvidia-cublas-cu12>=12.4"]
    return Wheel({"pkg/_c.so": library}, requires=requires)


@case("component-optional")
def _(forge: Forge, faulty: bool) -> Wheel:
    marker = "; extra == 'gpu'" if faulty else "; sys_platform == 'linux'"
    return Wheel({"pkg/_c.so": cuda12(forge)}, requires=[RUNTIME12 + marker])


@case("component-through-other")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": cuda12(forge)}, requires=["torch"] + ([] if faulty else [RUNTIME12]))


@case("component-open-range")
def _(forge: Forge, faulty: bool) -> Wheel:
    requires = ["nvidia-cuda-runtime>=13" if faulty else "nvidia-cuda-runtime>=13.0,<14"]
    return Wheel({"pkg/_c.so": cuda13(forge)}, requires=requires)


@case("dlopen-undeclared")
def _(forge: Forge, faulty: bool) -> Wheel:
    requires = [] if faulty else ["nvidia-cudnn-cu12>=9"]
    return Wheel({"pkg/_c.so": quoting(forge, "libcudnn.so.9")}, requires=requires)


# Tags against content.


@case("cuda-tag-without-content", "row")
def _(forge: Forge, faulty: bool) -> Wheel:
    library = plain(forge) if faulty else cuda12(forge)
    return Wheel({"pkg/_c.so": library}, version="1.0+cu126", requires=[] if faulty else [RUNTIME12])


@case("cuda-tag-without-content", "opening-the-driver-is-not-content-of-a-row")
def _(forge: Forge, faulty: bool) -> Wheel:
    version = "1.0+cu126" if faulty else "1.0"
    return Wheel({"pkg/_c.so": quoting(forge, "libcuda.so.1")}, version=version)


@case("cuda-tag-without-content", "name")
def _(forge: Forge, faulty: bool) -> Wheel:
    code = None if faulty else fatbin(Entry("sass", 90))
    return Wheel({"pkg/_c.so": plain(forge, code=code)}, name="pkg-cu12")


@case("cuda-tag-without-content", "row-of-the-policy")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge)}, policy=f"row = '{'cu130' if faulty else 'rocm13.2'}'")


@case("cuda-tag-wrong-major", "version")
def _(forge: Forge, faulty: bool) -> Wheel:
    version = "1.0+cu130" if faulty else "1.0+cu126"
    return Wheel({"pkg/_c.so": cuda12(forge)}, version=version, requires=[RUNTIME12])


@case("cuda-tag-wrong-major", "name")
def _(forge: Forge, faulty: bool) -> Wheel:
    name = "pkg-cuda13x" if faulty else "pkg-cuda12x"
    return Wheel({"pkg/_c.so": cuda12(forge)}, name=name, requires=[RUNTIME12])


@case("cpu-tag-with-cuda", "needed")
def _(forge: Forge, faulty: bool) -> Wheel:
    version = "1.0+cpu" if faulty else "1.0"
    return Wheel({"pkg/_c.so": cuda12(forge)}, version=version, requires=[RUNTIME12])


@case("cpu-tag-with-cuda", "code")
def _(forge: Forge, faulty: bool) -> Wheel:
    code = fatbin(Entry("sass", 90)) if faulty else None
    return Wheel({"pkg/_c.so": plain(forge, code=code)}, version="1.0+rocm6.2")


@case("cuda-header")
def _(forge: Forge, faulty: bool) -> Wheel:
    name = "kernels.cuh" if faulty else "kernels.h"
    return Wheel({"pkg/_c.so": plain(forge), f"pkg/include/{name}": b"#pragma once\n"})


@case("cuda-header", "of-the-policy")
def _(forge: Forge, faulty: bool) -> Wheel:
    code = None if faulty else fatbin(Entry("sass", 90))
    files = {"pkg/_c.so": plain(forge, code=code), "pkg/include/gpu_only.h": b"#pragma once\n"}
    return Wheel(files, policy="cuda.headers = ['gpu_only\\.h$']")


# GPU code, and what a policy requires.


@case("gpu-arch-missing")
def _(forge: Forge, faulty: bool) -> Wheel:
    entries = [Entry("sass", 80)] + ([] if faulty else [Entry("sass", 90, flags=0x100011)])
    policy = "architectures = ['sm_80', 'sm_90a']"
    return Wheel({"pkg/_c.so": plain(forge, code=fatbin(*entries))}, policy=policy)


@case("gpu-arch-missing", "in-one-library-of-two")
def _(forge: Forge, faulty: bool) -> Wheel:
    both = [Entry("sass", 80), Entry("sass", 90)]
    one = forge.shared("int one;", code=fatbin(*both)).read_bytes()
    two = forge.shared("int two;", code=fatbin(*both[: 1 if faulty else 2])).read_bytes()
    return Wheel({"pkg/_1.so": one, "pkg/_2.so": two}, policy="architectures = ['sm_80', 'sm_90']")


@case("gpu-arch-missing", "no-code-at-all")
def _(forge: Forge, faulty: bool) -> Wheel:
    code = None if faulty else fatbin(Entry("sass", 80))
    return Wheel({"pkg/_c.so": plain(forge, code=code)}, policy="architectures = ['sm_80']")


@case("gpu-arch-undeclared", "ptx")
def _(forge: Forge, faulty: bool) -> Wheel:
    entries = [Entry("sass", 90)] + ([Entry("ptx", 90)] if faulty else [])
    return Wheel({"pkg/_c.so": plain(forge, code=fatbin(*entries))}, policy="architectures = ['sm_90']")


@case("gpu-code-unreadable", "cut")
def _(forge: Forge, faulty: bool) -> Wheel:
    code = fatbin(Entry("sass", 90, payload=b"\x01" * 256))
    return Wheel({"pkg/_c.so": plain(forge, code=code[: -64 if faulty else None])})


@case("gpu-code-unreadable", "empty")
def _(forge: Forge, faulty: bool) -> Wheel:
    return Wheel({"pkg/_c.so": plain(forge, code=b"\x00" * 64 if faulty else fatbin(Entry("sass", 90)))})


@case("gpu-code-unreadable", "unknown-kind")
def _(forge: Forge, faulty: bool) -> Wheel:
    code = fatbin(Entry("sass", 90), Entry("sass", 80, number=77 if faulty else 2))
    return Wheel({"pkg/_c.so": plain(forge, code=code)})


@case("library-missing")
def _(forge: Forge, faulty: bool) -> Wheel:
    name = "libcpu.so" if faulty else "libcuda_part.so"
    return Wheel({f"pkg/{name}": plain(forge)}, policy="[[require]]\nlibrary = 'pkg/libcuda_*.so'")


@case("symbol-missing")
def _(forge: Forge, faulty: bool) -> Wheel:
    hidden = "static " if faulty else ""
    source = f"__attribute__((used)) {hidden}int shim(void) {{ return 0; }}"
    policy = "[[require]]\nlibrary = 'pkg/*.so'\nsymbols = ['shim']"
    return Wheel({"pkg/_c.so": plain_source(forge, source)}, policy=policy)


@case("symbol-missing", "in-one-library-of-two")
def _(forge: Forge, faulty: bool) -> Wheel:
    policy = "[[require]]\nlibrary = 'pkg/_1.so'\nsymbols = ['shim']"
    shim = plain_source(forge, "int shim(void) { return 0; }")
    files = {"pkg/_1.so": plain(forge), "pkg/_2.so": shim}
    return Wheel(files if faulty else {"pkg/_1.so": shim, "pkg/_2.so": plain(forge)}, policy=policy)


@case("kernel-missing", "sass")
def _(forge: Forge, faulty: bool) -> Wheel:
    kernels = ["_Z5otherv"] + ([] if faulty else ["_Z4wantv"])
    code = fatbin(*(Entry("sass", 90, payload=cubin(kernel)) for kernel in kernels))
    policy = "[[require]]\nlibrary = 'pkg/*.so'\nkernels = ['_Z4wantv']"
    return Wheel({"pkg/_c.so": plain(forge, code=code)}, policy=policy)


@case("kernel-missing", "a-name-is-no-code")
def _(forge: Forge, faulty: bool) -> Wheel:
    # Host code registers the kernel by name, but the GPU code was dropped.
    source = 'const char *entry(void) { return "_Z4wantv"; }'
    code = None if faulty else fatbin(Entry("ptx", 90, payload=b".visible .entry _Z4wantv(\n"))
    library = forge.shared(source, code=code)
    return Wheel({"pkg/_c.so": library}, policy="[[require]]\nlibrary = 'pkg/*.so'\nkernels = ['_Z4wantv']")
