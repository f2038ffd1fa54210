"""Audits public CUDA wheels and says what was found: the table in docs/audit.md.

Run by hand (or by a make target), not by the tests: it downloads about a gigabyte from PyPI::

    python tests/audit/public_wheels.py DIR            # download what DIR lacks, audit, print the table
    python tests/audit/public_wheels.py DIR --check    # fail unless docs/audit.md has that very table
    python tests/audit/public_wheels.py DIR --cost     # seconds and peak memory of each audit instead

Each wheel is named by file and SHA-256, so that the table speaks of these files and no others. Nothing in
them is executed or installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from headrace.audit import audit
from headrace.audit.report import Finding

DOCUMENT = Path(__file__).parents[2] / "docs" / "audit.md"
BEGIN, END = "<!-- public wheels: begin -->\n", "<!-- public wheels: end -->\n"

#: File, SHA-256.
WHEELS = (
    (
        "nvidia_nvtx_cu12-12.9.79-py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl",
        "fec150986817f2b4e7eed72ed059f2dcb9ba3856b9a96134e448eac946a6952f",
    ),
    (
        "pennylane_lightning_gpu-0.45.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "8fa158507144efa9f4e7c202e583a677c034eea303b8710d3152aef2e400b680",
    ),
    (
        "rmm_cu12-26.10.0-cp311-abi3-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
        "59e7cdf116d5a92aa986abc73cd876eb1dd6c43f2df216773dcacca05cd04b85",
    ),
    (
        "torchaudio-2.11.1-py3-none-manylinux_2_28_x86_64.whl",
        "0173b5b51e1368aa88de3cbe4e98508b5e9df4d8d59356c4e1fbc830c96191ef",
    ),
    (
        "openmm_cuda_12-8.6.1-py3-none-manylinux_2_34_x86_64.whl",
        "7338c20f052bff983da8715a740b8191502283cbc7020382c1c60b4c572b7da8",
    ),
    (
        "nvidia_cuda_runtime-13.5.37-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d",
    ),
    (
        "libkvikio_cu12-26.10.0-py3-none-manylinux_2_28_x86_64.whl",
        "71a09abc50ac31f2a5184f061aa9a3937bc6a532f847469d9d6d45c027e88783",
    ),
    (
        "xformers-0.0.35-py39-none-manylinux_2_28_x86_64.whl",
        "ccc73c7db9890224ab05f5fb60e2034f9e6c8672a10be0cf00e95cbbae3eda7c",
    ),
    (
        "torchao-0.18.0-cp310-abi3-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
        "6540b148e40ba81cbd4de86392225a076a1591146e9cebb099b3b234ba9feebe",
    ),
    (
        "torch_tensorrt-2.14.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "12756addfacb326d0ff99aa9f35c1534954d73afaea8492472d95b389101d707",
    ),
    (
        "librmm_cu12-26.10.0-py3-none-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
        "c4269c256b35364007c8c53c15060fd04c9762c488c943ea8ab7ede37234beaa",
    ),
    (
        "torchvision-0.29.1-cp311-cp311-manylinux_2_28_x86_64.whl",
        "2cb678029a5dd45afbbfa662fce49736827d52be33242b5a8a731e0db02ccdf5",
    ),
    (
        "jax_cuda12_plugin-0.10.2-cp311-cp311-manylinux_2_27_x86_64.whl",
        "76bbfece2f6effb4e8908eb8a5fbf1abbc1125de667683ec2ffba51c63dc57af",
    ),
    (
        "cuda_bindings-13.5.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
        "08b7e8d674c3266facb00453a7e34ea7d3ea965c2f594bb728f269f45f39fbe2",
    ),
    (
        "torchcodec-0.17.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        "fc7021f10d38debd4fd47b4620da50d8cead981752bb359f7e3a615bbca2b7d3",
    ),
    (
        "eigh_cuda128-0.4.1-cp311-cp311-manylinux_2_34_x86_64.whl",
        "ee1d35d078b094c7ea690a991e3ef4bcf14179aea3771ef6bb3bff2e27cbba71",
    ),
    (
        "qiskit_aer_gpu-0.18.2-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        "c07cc487f95f6d8f130a6e9a5b1dc75635f072a6f84d18a3dc66b187f0813bc8",
    ),
    (
        "cumm_cu126-0.8.2-cp311-cp311-manylinux_2_28_x86_64.whl",
        "e1d8f5bb92ddde9b914376c58916434a6f8c615ca6783c9e0d447f6e64386192",
    ),
    (
        "ctranslate2-4.8.5-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        "79a30a2c974530dbb5083f4922d28ffad87e08542f423aa91c53fbf4543cc35f",
    ),
    (
        "bitsandbytes-0.50.2-py3-none-manylinux_2_24_x86_64.whl",
        "55348a9a4a21bfd99cf8c7b32fe67b4030ae5c2a05738e03c1747f65fa6ec283",
    ),
    (
        "faiss_gpu_cu12-1.14.1.post1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "87e630faed349ba71e6c10e8340e93edf406bf22b42e08f097d7d3d64e16d0cb",
    ),
    (
        "blochsim_cuda12-0.0.14-cp310-abi3-manylinux1_x86_64.manylinux_2_28_x86_64.manylinux_2_5_x86_64.whl",
        "0446fcba59eec7478e7faba25a93abed6bd9fe7e4de3dc1a6381cb0472c7c593",
    ),
    (
        "bartorch_cuda12-0.0.17-py3-none-manylinux_2_28_x86_64.whl",
        "95dcc1b39d6482bbd2954fefad438bd61ea88830eb8d0dfe5f76d7e17edc1d4f",
    ),
    (
        "dew_flash_attn_cu12-0.3.6-py3-none-manylinux_2_28_x86_64.whl",
        "81d449d1994392c82107be17bfff4984a79d8ddce7b383df37b8010f840239a8",
    ),
    (
        "cyllama_cuda12-0.2.18-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_35_x86_64.whl",
        "b55cf7a0f327eb93a30b7e5ceade53361b76cba292271f70caf5801e97bad2d6",
    ),
    (
        "gpu4pyscf_cuda12x-1.9.0-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "8b79e3a68be8b7fedf371f8d6d402ab3577012b4f611c4c4a58599b2409f5f26",
    ),
    (
        "cupy_cuda12x-14.2.0-cp311-cp311-manylinux2014_x86_64.whl",
        "5fe2366cc5c61a7ee4a527ce1e8951cb89092d0fb0b5830623cf114d1942c585",
    ),
)


def fetched(folder: Path, name: str, sha256: str) -> Path:
    """The wheel in ``folder``, downloaded if it is not there; its digest is checked either way."""
    path = folder / name
    if not path.exists():
        distribution, version, python, abi, platforms = name.removesuffix(".whl").split("-")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), "--implementation", "cp" if python.startswith("cp") else "py"]
        command += ["--python-version", "3.11", "--abi", abi, *(["--abi", "none"] if abi == "abi3" else [])]
        command += [option for tag in platforms.split(".") for option in ("--platform", tag)]
        subprocess.run([*command, f"{distribution}=={version}"], check=True)
    with path.open("rb") as stream:
        found = hashlib.sha256()
        while piece := stream.read(1 << 20):
            found.update(piece)
    if found.hexdigest() != sha256:
        raise SystemExit(f"{name}: expected SHA-256 {sha256}, got {found.hexdigest()}")
    return path


def counted(findings: tuple[Finding, ...]) -> str:
    counts = Counter(finding.rule for finding in findings)
    return ", ".join(f"{rule} {count}" for rule, count in sorted(counts.items())) or "none"


def table(folder: Path) -> str:
    """One row a wheel: its libraries, its GPU code, and how many findings of which rule."""
    lines = [
        "| wheel | MB | libraries | GPU code | problems | advice |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, sha256 in WHEELS:
        path = fetched(folder, name, sha256)
        report = audit(path)
        code = sorted({one.arch for library in report.libraries for one in library.gpu_code}, key=_by_number)
        cells = [
            f"{report.name} {report.version}",
            f"{path.stat().st_size / 1e6:.1f}",
            str(len(report.libraries)),
            " ".join(code) or "none",
            counted(report.problems),
            counted(report.advice),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _by_number(arch: str) -> tuple[str, int, str]:
    kind, _, number = arch.partition("_")
    return kind, int(number.rstrip("af")), number


def cost(folder: Path) -> None:
    """Each audit in a process of its own: seconds of wall and processor time, and peak resident memory."""
    script = "import sys; from headrace.audit import audit; audit(sys.argv[1])"
    for name, sha256 in WHEELS:
        path = fetched(folder, name, sha256)
        begin = time.perf_counter()
        child = os.posix_spawn(sys.executable, [sys.executable, "-c", script, str(path)], os.environ)
        _, status, used = os.wait4(child, 0)
        if status:
            raise SystemExit(f"{name}: the audit failed")
        seconds = time.perf_counter() - begin
        size, processor = path.stat().st_size / 1e6, used.ru_utime + used.ru_stime
        peak = used.ru_maxrss / 1e3
        print(f"{size:6.1f} MB: {seconds:5.1f} s, {processor:5.1f} s of processor, {peak:4.0f} MB  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the wheels are, or are downloaded to")
    parser.add_argument("--check", action="store_true", help="compare with docs/audit.md")
    parser.add_argument("--cost", action="store_true", help="measure seconds and memory")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.cost:
        cost(options.folder)
        return 0
    made = table(options.folder)
    print(made, end="")
    if options.check and f"{BEGIN}\n{made}\n{END}" not in DOCUMENT.read_text(encoding="utf-8"):
        print("docs/audit.md has another table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
