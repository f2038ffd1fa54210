"""The process that verifies a program: a fresh one, which loads it with the run time alone and answers what it gives.

::

    python -m headrace.export.verify_process FOLDER

``FOLDER/ask.json`` says what to load and call, and what may be missing; ``FOLDER/inputs.npz`` with what to call it. The answers go to ``answers.npz`` and
``answer.json``. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np

import headrace

from . import stand_in

__all__ = ["main"]


def main(folder: Path) -> None:
    ask = json.loads((folder / "ask.json").read_text())
    answer: dict[str, Any] = {"runs": []}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    where = "import"
    try:
        for module in ask["imports"]:
            where = f"import of {module}"
            importlib.import_module(module)
        with np.load(folder / "inputs.npz") as inputs, _stand_in(ask["stand_in"]):
            for number, (name, schedule) in enumerate(ask["devices"]):
                where = name if schedule is None else f"{name} (schedule {schedule})"
                try:
                    device = (
                        headrace.device(name)
                        if schedule is None
                        else headrace.device(name, schedule=schedule)
                    )
                except headrace.DeviceError as error:
                    answer["runs"].append({"device": where, "unavailable": str(error), "calls": []})
                    continue
                try:
                    calls = _run(ask, device, inputs, arrays, str(number))
                except headrace.DelegateUnavailable as error:
                    if error.delegate not in ask["may_lack"]:
                        raise
                    answer["runs"].append({"device": where, "unavailable": str(error), "calls": []})
                    continue
                answer["runs"].append({"device": where, "calls": calls})
    except Exception as error:
        answer["error"] = {"where": where, "kind": type(error).__name__, "text": str(error)}
    answer["torch"] = "torch" in sys.modules
    np.savez(folder / "answers.npz", **cast(Any, arrays))
    (folder / "answer.json").write_text(json.dumps(answer))


def _stand_in(versions: dict[str, str]) -> AbstractContextManager[None]:
    """What is in the place of TensorRT, for a program that was exported for it."""
    return stand_in.provided(versions) if versions else nullcontext()


def _run(
    ask: dict[str, Any], device: Any, inputs: Any, arrays: dict[str, np.ndarray[Any, Any]], prefix: str
) -> list[Any]:
    """The outputs' kinds of each call, in order; their numbers go to ``arrays``."""
    found = []
    with (
        headrace.record() as record,
        headrace.load(ask["program"], data=ask["data"], device=device) as program,
    ):
        for number, call in enumerate(ask["calls"]):
            given = [
                _argument(one, inputs, f"{number}/{i}", device if ask["resident"] else None)
                for i, one in enumerate(call["inputs"])
            ]
            outputs = program[call["method"]](*given)
            kinds: list[dict[str, Any]] = []
            for i, output in enumerate(outputs):
                if output is None or isinstance(output, (bool, int, float, str)):
                    kinds.append({"kind": "number", "value": output})
                    continue
                if isinstance(output, headrace.Buffer):
                    dtype = output.dtype
                    array = output.float32() if dtype == "bfloat16" else output.numpy()
                else:
                    dtype, array = str(output.dtype), output
                kinds.append({"kind": "tensor", "dtype": dtype})
                arrays[f"{prefix}/{number}/{i}"] = np.array(array)
            found.append(kinds)
    # A record that holds no access of a device is refused: there was no order to check.
    if device.name.startswith("sim") and ask["ordered"]:
        record.check()
    return found


def _argument(one: dict[str, Any], inputs: Any, key: str, device: Any) -> Any:
    if one["kind"] != "tensor":
        return one["value"]
    array = inputs[key]
    value = headrace.Buffer.from_float32(array) if one["dtype"] == "bfloat16" else array
    return value if device is None else device.to_device(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
