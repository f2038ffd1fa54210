"""``doctor``, ``inspect`` and ``sdk``: what is there; runs nothing."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from .. import aoti, doctor, pte, sdk
from ..delegate import nvinfer
from ..pte import fatbin, tensorrt
from .printing import OK, print_json

__all__ = ["print_diagnosis", "print_file", "print_sdk"]


def print_diagnosis(args: argparse.Namespace) -> int:
    found = doctor.diagnose()
    if args.json:
        print_json("doctor", found.as_dict())
        return OK
    rows = {
        "headrace": found.headrace,
        "python": f"{found.python}, NumPy {found.numpy}",
        "machine": found.machine,
        "engine": f"ExecuTorch {found.engine}, {found.engine_source} ({found.engine_folder})",
        "delegates": ", ".join(found.delegates) or "none",
        "kernels": str(found.kernels),
        "threads": str(found.threads),
    }
    if found.cuda.driver:
        rows["driver"] = f"CUDA {found.cuda.driver}"
        rows["partitions"] = found.cuda.partitions or (
            "green contexts" + (f"; no workqueues of their own: {w}" if (w := found.cuda.workqueues) else "")
        )
    for gpu in found.cuda.gpus:
        rows[gpu.device] = (
            f"{gpu.name}, compute capability {gpu.capability}, {gpu.sm_count} SMs, "
            f"{gpu.memory_nbytes / 2**30:.0f} GiB"
            + (f"; cannot be used: {gpu.problem}" if gpu.problem else "")
            + ("; a MIG instance" if gpu.mig else "")
            + (
                "; this process is an MPS client there: where CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set, work of a lane may "
                "take all the SMs that MPS gives the process"
                if gpu.mps and not gpu.partitions
                else "; this process is an MPS client there"
                if gpu.mps
                else ""
            )
            + (f"; no partitions: {gpu.partitions}" if gpu.partitions else "")
        )
    if found.cuda.missing:
        rows["no GPU"] = found.cuda.missing
    there = [f"{i.module} {i.version}" for i in found.tensorrt if i.version]
    broken = [i.problem for i in found.tensorrt if i.module and i.problem]
    rows["TensorRT"] = "; ".join((", ".join(there) or "no run time that loads", *broken))
    for key, value in rows.items():
        print(f"{key:10} {value}")
    return OK


def print_file(args: argparse.Namespace) -> int:
    if Path(args.file).suffix == ".ptd":
        return _inspect_data(args)
    file = pte.read(args.file)
    islands = aoti.read(args.file) if aoti.DELEGATE in file.delegates else ()
    engines = tensorrt.islands(args.file) if tensorrt.DELEGATE in file.delegates else ()
    if args.json:
        libraries = [{**asdict(i), "gpu_code": _gpu_code(args.file, i)} for i in islands]
        print_json(
            "inspect",
            {
                "file": args.file,
                "program": asdict(file),
                "aoti": libraries,
                "tensorrt": [_engine(e) for e in engines],
            },
        )
        return OK
    for method in file.methods:
        print(f"method {method.name}")
        for role, values in (("input", method.inputs), ("output", method.outputs)):
            for i, value in enumerate(values):
                print(f"  {role} {i}: {value}" + (f" '{value.name}'" if value.name else ""))
        for buffer in method.buffers:
            print(f"  planned buffer {buffer.memory_id}: {buffer.nbytes} bytes on {buffer.device}")
        print(f"  {len(method.instructions)} instructions, {len(method.islands)} islands")
        for step in method.instructions:
            target = step.target or ""
            island = next((i for i in method.islands if i.instruction == step.index), None)
            size = f", payload {island.payload_nbytes} bytes" if island else ""
            print(f"    {step.index:3} {step.kind:8} {target}{size}")
        for one in islands:
            if one.method == method.name:
                _print_aoti(args.file, one)
        for engine in engines:
            if engine.method == method.name:
                _print_engine(engine)
    if file.named_data:
        print(f"named data: {len(file.named_data)} entries")
    if keys := sorted({t.key for t in file.external}):
        print(f"needs data files with: {', '.join(keys)}")
    return OK


def _gpu_code(path: str, island: aoti.Island) -> list[str]:
    """The architectures of the GPU code in an island's library."""
    image = aoti.library(path, island.library_key) if island.target == "cuda" else None
    if image is None:
        return []
    found = [code.arch for part in fatbin.embedded(memoryview(image)) for code in fatbin.read(part).code]
    return sorted(set(found))


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"[0-9]{1,9}", version)]


def _print_aoti(path: str, island: aoti.Island) -> None:
    size = "not in this file" if island.library_nbytes is None else f"{island.library_nbytes} bytes"
    march = f", {island.march}" if island.march else ""
    print(f"  AOTInductor library of instruction {island.instruction}: for {island.target}{march}, {size}")
    if code := _gpu_code(path, island):
        print(f"    GPU code for {', '.join(code)}")
    if island.target == "cuda":
        print("    its kernels run on a GPU alone")
    for device in sorted({c.device for c in island.constants}):
        group = [c for c in island.constants if c.device == device]
        print(f"    {len(group)} constants on {device}, {sum(c.nbytes for c in group)} bytes")
    for constant in island.constants:
        print(f"      {constant.fqn}: {constant.dtype}{list(constant.shape)} on {constant.device}")
    print(f"    needs {', '.join(island.needed) or 'no library'}")
    newest: dict[tuple[str, str], str] = {}
    for library, version in island.versions:
        family = (library, version.partition("_")[0])
        newest[family] = max(newest.get(family, version), version, key=_numbers)
    for library in dict.fromkeys(library for library, _ in newest):
        print(f"      of {library}: {', '.join(v for (name, _), v in newest.items() if name == library)}")
    print(f"    calls {len(island.shims)} functions of headrace's: {', '.join(island.shims)}")
    for line in island.missing:
        print(f"    missing here: {line}")


def _engine(engine: tensorrt.Engine) -> dict[str, object]:
    """For JSON: what the payload says, with the engine's size in the place of its bytes."""
    blob = engine.blob
    return {
        "method": engine.method,
        "instruction": engine.instruction,
        "engine_nbytes": len(blob.engine),
        "built": asdict(blob.built) if blob.built else None,
        "hardware_compatible": blob.hardware_compatible,
        "target_platform": blob.target_platform,
        "bindings": [asdict(b) for b in blob.bindings],
        "aliased": [asdict(a) for a in blob.aliased],
        "fitting": [asdict(i) for i in nvinfer.fitting(blob)[0]],
    }


def _print_engine(engine: tensorrt.Engine) -> None:
    blob = engine.blob
    print(
        f"  TensorRT engine of instruction {engine.instruction}: built for {nvinfer.built_for(blob)}, {len(blob.engine)} bytes"
    )
    for role, bindings in (("input", blob.inputs), ("output", blob.outputs)):
        for binding in bindings:
            shape = (
                f"{binding.dtype}[{', '.join(map(str, binding.shape))}]"
                if binding.dtype
                else "as the engine says"
            )
            over = next(
                (a.input for a in blob.aliased if not binding.is_input and a.output == binding.name), None
            )
            print(f"    {role} {binding.name}: {shape}" + (f", written over {over}" if over else ""))
    here, advice = nvinfer.fitting(blob)
    for one in here:
        print(f"    may be read here by {one.module} {one.version}, on a GPU that it was built for")
    if advice:
        print(f"    missing here: {advice}")


def _inspect_data(args: argparse.Namespace) -> int:
    file = pte.read_data(args.file)
    if args.json:
        print_json("inspect", {"file": args.file, "data": asdict(file)})
        return OK
    for entry in file.entries:
        shape = f"{entry.dtype}{list(entry.shape or ())}" if entry.dtype else "bytes"
        print(f"{entry.key}: {shape}, {entry.nbytes} bytes")
    return OK


def print_sdk(args: argparse.Namespace) -> int:
    folders = {
        "cmake_dir": sdk.cmake_dir(),
        "include_dir": sdk.include_dir(),
        "library_dir": sdk.library_dir(),
    }
    asked = [name for name in folders if getattr(args, name)] or list(folders)
    if args.json:
        print_json("sdk", {name: folders[name] for name in asked})
        return OK
    for name in asked:
        # One alone is printed bare, for a command substitution.
        print(folders[name] if len(asked) == 1 else f"{name:12} {folders[name]}")
    return OK
