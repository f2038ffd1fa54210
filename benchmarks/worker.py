"""One fresh process of one runtime; prints what it measured. Started by ``python -m benchmarks``.

::

    python benchmarks/worker.py startup ours|stock PROGRAM.pte GOLDEN.npz
    python benchmarks/worker.py calls   ours|stock PROGRAM.pte GOLDEN.npz [PROGRAM.pte GOLDEN.npz …]

A script and not a module, so that nothing but the runtime under test is imported. Every program's first
answer is compared with its golden: a fast wrong answer is no measurement.
"""

import json
import os
import sys
import time

SAMPLE_S = 0.02


def resident_nbytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def golden(path):
    """Inputs and outputs of the first recorded call."""
    import numpy as np

    with np.load(path) as archive:

        def side(name):
            count = len([key for key in archive.files if key.startswith(f"0/{name}/")])
            return [archive[f"0/{name}/{k}"] for k in range(count)]

        return side("in"), side("out")


def check(results, wanted):
    import numpy as np

    if len(results) != len(wanted):
        raise SystemExit(f"expected {len(wanted)} outputs, got {len(results)}")
    for result, right in zip(results, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(result), right, rtol=1e-4, atol=1e-5)


def ours(path, inputs):
    """A function without arguments that runs the program once."""
    import headrace

    forward = headrace.load(path)["forward"]
    return lambda: forward(*inputs)


def stock(path, inputs):
    import torch
    from executorch.runtime import Runtime

    forward = Runtime.get().load_program(path).load_method("forward")
    tensors = [torch.from_numpy(array) for array in inputs]
    return lambda: forward.execute(tensors)


def versions(runtime):
    import importlib.metadata

    names = {"ours": ("headrace", "numpy"), "stock": ("executorch", "torch", "numpy")}[runtime]
    return {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in names}}


def startup(runtime, path, golden_path):
    began = time.perf_counter()
    import numpy  # noqa: F401  both runtimes need it, and its cost is neither's

    after_numpy = time.perf_counter()
    if runtime == "ours":
        import headrace  # noqa: F401
    else:
        import executorch.runtime  # noqa: F401
    imported = time.perf_counter()
    imported_nbytes = resident_nbytes()
    inputs, wanted = golden(golden_path)
    read = time.perf_counter()
    run = {"ours": ours, "stock": stock}[runtime](path, inputs)
    loaded = time.perf_counter()
    results = run()
    # The parent knows when it started us, by the same clock.
    answered_at = time.clock_gettime(time.CLOCK_MONOTONIC)
    answered_nbytes = resident_nbytes()
    check(results, wanted)
    with open("/proc/self/maps") as maps:
        libtorch = any("libtorch" in line for line in maps)
    return {
        "answered_at": answered_at,
        "numpy_s": after_numpy - began,
        "import_s": imported - after_numpy,
        "load_s": loaded - read,
        "imported_nbytes": imported_nbytes,
        "answered_nbytes": answered_nbytes,
        "libtorch_mapped": libtorch,
        "versions": versions(runtime),
    }


def calls(runtime, *paths):
    """Answer each program's name on standard input with the microseconds of a call, averaged over one sample."""
    runs = {}
    for path, golden_path in zip(paths[::2], paths[1::2], strict=True):
        inputs, wanted = golden(golden_path)
        run = {"ours": ours, "stock": stock}[runtime](path, inputs)
        check(run(), wanted)
        # As many calls to a sample as fill it, found while warming up.
        count, took = 1, 0.0
        while took < SAMPLE_S:
            count *= 2
            began = time.perf_counter()
            for _ in range(count):
                run()
            took = time.perf_counter() - began
        runs[os.path.basename(path).removesuffix(".pte")] = run, count, wanted
    print(json.dumps({"versions": versions(runtime)}), flush=True)
    for line in sys.stdin:
        run, count, wanted = runs[line.strip()]
        began = time.perf_counter()
        for _ in range(count):
            run()
        took = time.perf_counter() - began
        check(run(), wanted)
        print(took / count * 1e6, flush=True)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "startup":
        print(json.dumps(startup(*arguments)))
    else:
        calls(*arguments)
