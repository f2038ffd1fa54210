"""Models made of a list of steps, exported on request: the half of the random-model test that has torch.

::

    python -m tests.programs.random_models PACKAGE…

Reads one JSON object a line, and answers each with one: ``{"delegates": […]}`` or ``{"error": "…"}``. A request is
``{"path", "rows", "seed", "steps", "outputs", "claims"}``. Every value is float32[rows, WIDTH]; value 0 is the input, and
step ``i`` makes value ``i + 1``: ``[operation, *values]``. ``claims`` is a list of delegates, the first before the next:
``{"kind", "share", "min_size", "merge"}``, where ``share`` says of which quarters of all operators it claims.
"""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from typing import Any

__all__ = ["BINARY", "UNARY", "WEIGHTS", "WIDTH"]

WIDTH = 4
WEIGHTS = 3
UNARY = ("relu", "tanh", "sigmoid", "neg", "cos", "softmax", "cumsum", "mean", "turn", *(f"linear{i}" for i in range(WEIGHTS)))  # fmt: skip
BINARY = ("add", "sub", "mul", "maximum", "halves", "product")


def build(request: dict[str, Any]) -> Any:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(request["seed"])
            self.weights = torch.nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.4 for _ in range(WEIGHTS)])

        def step(self, name: str, *args: Any) -> Any:
            if name.startswith("linear"):
                return torch.nn.functional.linear(args[0], self.weights[int(name[-1])])
            if name == "softmax":
                return torch.softmax(args[0], -1)
            if name == "cumsum":
                return torch.cumsum(args[0], 1)
            if name == "mean":
                return args[0].mean(dim=1, keepdim=True) - args[0]
            if name == "turn":
                return args[0].t().reshape(args[0].shape)
            if name == "halves":
                return torch.cat([args[0], args[1]], dim=1)[:, 2 : 2 + WIDTH]
            if name == "product":
                return args[0] @ (args[1].t() @ args[1]) * 0.1
            return getattr(torch, name)(*args)

        def forward(self, x: Any) -> Any:
            values = [x]
            for name, *which in request["steps"]:
                # Bounded, so that errors do not grow with the depth.
                values.append(torch.tanh(self.step(name, *(values[i] for i in which))))
            return tuple(values[i] for i in request["outputs"])

    return Model().eval()


def delegates(request: dict[str, Any]) -> list[Any]:
    from headrace.export import Node, Python, Xnnpack

    from .split import computes

    found = []
    for number, claim in enumerate(request["claims"]):

        def share(node: Node, quarters: int = claim["share"]) -> bool:
            return bool(quarters >> zlib.crc32(f"{request['seed']} {node.name}".encode()) % 4 & 1)

        def both(node: Node, share: Any = share) -> bool:
            return computes(node) and bool(share(node))

        options = {"min_size": claim["min_size"], "merge": claim["merge"]}
        if claim["kind"] == "xnnpack":
            found.append(Xnnpack(predicate=share, **options))
        else:
            found.append(Python("StepsA" if number % 2 else "StepsB", predicate=both, **options))
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    import headrace.export

    from .export import record

    model = build(request)
    generator = torch.Generator().manual_seed(request["seed"] + 1)
    calls = [(torch.randn(request["rows"], WIDTH, generator=generator),) for _ in range(2)]
    path = request["path"]
    exported = headrace.export.export(
        model, calls[0], path=path, delegates=delegates(request), verify=False, cache=False
    )
    record([("forward", model, calls)], exported.path.with_suffix(".npz"))
    return {"delegates": sorted({island.delegate for island in exported.split.islands})}


def remember_operators() -> None:
    """PyTorch looks at all of its operators for every decomposition, a third of the time of a small export. They stay
    the same here."""
    import torch._export.utils as utils
    from torch.export import decomp_utils, exported_program

    found = utils._collect_all_valid_cia_ops()
    for module in (utils, decomp_utils, exported_program):
        if hasattr(module, "_collect_all_valid_cia_ops"):
            module._collect_all_valid_cia_ops = lambda: set(found)


def main(folders: list[str]) -> None:
    from .exporting import without_run_time

    without_run_time(folders)
    warnings.simplefilter("ignore")
    import torch

    remember_operators()

    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print("answer " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
