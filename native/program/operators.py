"""Write ``operators.def``: the argument kinds of every kernel that the engine registers.

Run by hand, after a change of the engine's version, in an environment with torch and executorch::

    python native/program/operators.py KERNELS > native/program/operators.def

KERNELS is a file with one kernel name a line, as ``headrace.engine.core.kernels()`` lists them (the
process that has torch's schemas need not be the one that has headrace).

One line a kernel: ``OPERATOR("aten::add.out", "T T s w")``. The kinds, one a letter:

====  =======================================================================
T     tensor                            B  list of bools
w     tensor that the kernel writes     D  list of floats
W     list of tensors that it writes
i     int                               I  list of ints
f     float                             L  list of tensors
b     bool                              O  list of tensors or nothing
s     number: int, float or bool        S  string
d     a dtype, as its number            m  a memory format, as its number
====  =======================================================================

``?`` behind a letter admits None. Behind ``=`` stands what the emitter appends: ``w`` the tensor that was
written, ``W`` the list of them, ``i``, ``f``, ``b`` a number that the kernel sets, ``s`` a number whose kind
follows from the arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Kernels that no schema describes: they exist in the engine alone (kernels/prim_ops in ExecuTorch 1.5.1).
# The emitter writes the first two without a returned value (exir/emit/_emitter.py).
UNDESCRIBED = {
    "executorch_prim::et_copy_index.tensor": "w T i",
    "executorch_prim::et_view.default": "T I w",
    "executorch_prim::floordiv.int": "i i =i",
    "executorch_prim::mod.int": "i i =i",
}
# Kernels whose schema says "number" for a kind that is known.
RESULTS = {
    "executorch_prim::truediv.Scalar": "f",
    "executorch_prim::sym_float.Scalar": "f",
    "executorch_prim::sym_int.Scalar": "i",
    "executorch_prim::ceil.Scalar": "i",
    "executorch_prim::round.Scalar": "i",
    "executorch_prim::trunc.Scalar": "i",
}
KINDS = {
    "Tensor": "T",
    "int": "i",
    "float": "f",
    "bool": "b",
    "number": "s",
    "str": "S",
    "ScalarType": "d",
    "MemoryFormat": "m",
    "List[int]": "I",
    "List[float]": "D",
    "List[bool]": "B",
    "List[Tensor]": "L",
    "List[Optional[Tensor]]": "O",
}


def kind_of(argument: Any) -> str:
    """The letter of one schema argument."""
    if argument.alias_info is not None and argument.alias_info.is_write:
        return {"Tensor": "w", "List[Tensor]": "W"}[str(argument.real_type)]
    name = str(argument.real_type)
    if name.startswith("Optional[") and name.endswith("]"):
        return KINDS[name.removeprefix("Optional[")[:-1]] + "?"
    return KINDS[name]


def signature(name: str, schema: Any) -> str:
    """The kinds of a kernel's boxed arguments: the schema's, in order, then what it returns."""
    letters = [kind_of(argument) for argument in schema.arguments]
    returned = [str(r.real_type) for r in schema.returns]
    if "W" in letters:
        assert not returned, schema
        result = "W"
    elif "w" in letters:
        assert set(returned) == {"Tensor"}, schema
        result = "w" if len(returned) == 1 else "W"
    else:
        (kind,) = returned
        result = RESULTS.get(name, KINDS[kind])
        assert result in ("i", "f", "b", "s"), schema
    return " ".join([*letters, f"={result}"])


def table(kernels: list[str]) -> str:
    """The text of ``operators.def`` for these kernels."""
    import executorch.exir  # noqa: F401  registers the schemas of ExecuTorch's own operators
    import torch

    schemas = {
        s.name + ("." + s.overload_name if s.overload_name else ""): s
        for s in torch._C._jit_get_all_schemas()
    }
    lines = [
        "// The kinds of argument of every kernel in the engine. Written by operators.py, which explains the",
        "// letters; do not edit.",
    ]
    for name in sorted(set(kernels)):
        text = UNDESCRIBED.get(name) or signature(name, schemas[name])
        lines.append(f'OPERATOR("{name}", "{text}")')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text().split()), end="")
