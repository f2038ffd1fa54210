"""What the tests of splitting ask of a process that has torch: each function below is one case.

See ``cases.py``; its last argument is an interpreter that has the run time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import Cases

case = Cases()
# The interpreter that has the run time.
RUN_TIME = sys.argv[-1:]


def module(function: Callable[..., Any], **members: Any) -> Any:
    from tests.programs.split import Plain

    return Plain(function, **members).eval()


def exported(folder: Path, model: Any, inputs: Any, delegates: Any, **options: Any) -> Any:
    import headrace.export

    options = {"verify": False, "cache": False, **options}
    return headrace.export.export(model, inputs, path=folder / "m.pte", delegates=delegates, **options)


def refused(folder: Path, model: Any, inputs: Any, delegates: Any, **options: Any) -> Any:
    """The error; nothing may be written, and what was there stays."""
    from headrace.errors import HeadraceError

    (folder / "m.pte").write_bytes(b"older")
    before = sorted(folder.iterdir())
    try:
        exported(folder, model, inputs, delegates, **options)
    except HeadraceError as error:
        assert (folder / "m.pte").read_bytes() == b"older" and sorted(folder.iterdir()) == before
        return error
    raise AssertionError("was exported")


def verify(**options: Any) -> Any:
    from headrace.export import Verify

    return Verify(python=RUN_TIME[0], imports=["tests.programs.step_delegates"], **options)


def said(error: Exception, text: str) -> None:
    assert text in str(error), error


def randn(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def who(split: Any) -> dict[str, str]:
    return {n.name: n.delegate for n in split if n.operator != "getitem"}


# -------------------- constants


@case
def constants_that_are_no_parameters_are_verified(folder: Path) -> None:
    """EX4: a tensor written into the code, a buffer that no state dict has, in several methods; a program of the
    caller's is as it was."""
    import torch
    from torch import nn

    from headrace.export import Aoti, Xnnpack

    class Literal(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * torch.tensor([0.1, 0.2, 0.3])

    class Buffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", randn(3), persistent=False)

        def forward(self, x: Any) -> Any:
            return x * self.w

    x = (randn(2, 3),)
    models = {"literal": Literal().eval(), "buffer": torch.export.export(Buffer().eval(), x)}
    for number, delegate in enumerate((Xnnpack(), Aoti())):
        there = folder / str(number)
        there.mkdir()
        made = exported(there, models, dict.fromkeys(models, x), [delegate], verify=verify())
        assert {i.delegate for i in made.split.islands} == {delegate.name}
        assert {d.method for d in made.verification.deviations} == set(models)
    torch.testing.assert_close(models["buffer"].module()(*x), Buffer().eval()(*x))


@case
def integers_are_divided_as_eager_pytorch_does(folder: Path) -> None:
    """EX4: by a number and by a tensor, rounded down and to zero, where the quotient is negative and where it is large."""
    import torch

    from headrace.export import Aoti

    def run(self: Any, x: Any, y: Any) -> Any:
        trunc = torch.div(x, 2, rounding_mode="trunc")
        return (
            x // 2,
            x // -3,
            trunc,
            x % 3,
            x / 2,
            y // 2,
            x // torch.arange(1, 8),
            (y > 0) / 2,
            torch.div(y, 7),
        )

    x = torch.tensor([-3, -2, -1, 0, 1, 2, 2**31 - 1], dtype=torch.int32)
    y = torch.tensor([-(2**53) - 1, -7, 0, 5, 2**53 + 1])
    made = exported(folder, module(run), (x, y), [Aoti()], verify=verify())
    assert {i.delegate for i in made.split.islands} == {"Aoti"} and len(made.verification.deviations) == 9


# -------------------- arguments


@case
def arguments_at_fault_are_named(folder: Path) -> None:
    """OP2, EX6: where, what was expected, what came; and nothing is written."""
    import torch

    from headrace.errors import HeadraceError
    from headrace.export import Aoti, Xnnpack, export

    plus, x = module(lambda self, x: x + 1), (randn(2, 2),)
    given = {"path": folder / "m.pte", "delegates": [Xnnpack()], "verify": False, "cache": False}
    for model, inputs, options, kind, text in (
        (plus, x, {"delegates": Aoti()}, "OptionError", "delegates: expected a list of delegates, got Aoti("),
        (plus, x, {"delegates": "aoti"}, "OptionError", "delegates: expected a list of delegates, got 'aoti'"),
        (plus, x, {"device": "gpu"}, "OptionError", "or 'cpu', got 'gpu'"),
        (plus, x, {"device": "cuda:1"}, "OptionError", "or 'cpu', got 'cuda:1'"),
        (plus, x, {"path": None}, "OptionError", "path: expected the name of a file to write, got None"),
        (plus, x, {"path": folder}, "OptionError", f"path, {folder}: expected a file, got a folder"),
        (plus, x, {"path": folder / "m.ptd", "weights": "beside"}, "OptionError", "than that of the data file"),
        ({}, {}, {}, "OptionError", "model: expected one method or more, got none"),
        (module(lambda self, x: None), x, {}, "ExportError", "forward: expected a model that returns a tensor"),
        (module(lambda self, x: torch.view_as_complex(x)), x, {}, "ExportError", "forward, result 0 "),
        (module(lambda self, x: torch.view_as_real(x)), (x[0].to(torch.complex64),), {}, "ExportError", "input 0 'args_0': "),
        (module(lambda self, x: torch.fft.rfft(x).abs()), x, {}, "ExportError", "aten__fft_r2c_default (aten._fft_r2c"),
    ):  # fmt: skip
        raised = ""
        try:
            export(model, inputs, **{**given, **options})
        except HeadraceError as error:
            raised = f"{type(error).__name__}: {error}"
        assert raised.startswith(f"{kind}: ") and text in raised, (raised, text)
    assert not list(folder.iterdir())
    # A number is a constant of the program, and an input that has to be it.
    made = exported(folder, module(lambda self, x, n: x * n), (*x, 3), [Xnnpack()], verify=verify())
    assert str(made.file.methods[0].inputs[1]) == "int 3" and made.verification.calls == 2
    # PyTorch's named tuples are tuples.
    several = module(lambda self, x: {"a": x.topk(1), "b": [x.max(1), x + 1]})
    made = exported(folder, several, x, [], verify=verify())
    assert len(made.verification.deviations) == 5
    made = exported(folder, plus, x, [Aoti()], device="cpu", verify=verify())
    assert {island.device for island in made.split.islands} == {"cpu"}
    made.plot(folder / "m.svg")
    for path in (folder / "m.png", folder / "no" / "m.svg"):
        refusals = []
        try:
            made.plot(path)
        except HeadraceError as error:
            refusals.append(str(error))
        assert refusals and refusals[0].startswith(f"plot, {path}: expected ") and not path.exists()


@case
def a_full_disk_names_the_file(folder: Path) -> None:
    """OP2: the one that was asked for; what is half written is taken away."""
    import resource

    from headrace.export import program

    (folder / "m.pte").write_bytes(b"older")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    names = []
    try:
        program._replace({folder / "m.pte": bytes(10), folder / "m.ptd": bytes(5000)})
    except OSError as error:
        names.append(error.filename)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names == [str(folder / "m.ptd")] and [path.name for path in folder.iterdir()] == ["m.pte"]
    assert (folder / "m.pte").read_bytes() == b"older"


@case
def what_had_no_effect_is_in_the_table(folder: Path) -> None:
    """EX5, OP2: patterns that match nothing, with a warning; weights that stayed in the program."""
    import warnings

    import torch

    from headrace.export import Aoti, Python, Xnnpack

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).eval()

    def run(*delegates: Any, **options: Any) -> Any:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = exported(folder, model, (randn(2, 8),), delegates, **options)
        notes = made.split.notes
        ours = [w for w in warned if "matches nothing" in str(w.message)]
        assert [str(w.message) for w in ours] == [note for note in notes if "matches nothing" in note]
        assert all(w.filename == __file__ and w.category is UserWarning for w in ours)
        assert [line[6:] for line in str(made.split).splitlines() if line.startswith("note: ")] == list(notes)
        return made

    # Before an operator is decomposed, or after.
    claims = {
        "operators": ["aten.layer_norm", "aten.gelu"],
        "modules": ["1", "2.*", "*.x"],
    }
    assert run(Python("StepsA", **claims), Xnnpack(modules=["0"]), Aoti()).split.notes == (
        "StepsA, modules: '*.x' matches nothing in the graph",
        "StepsA, modules: '2.*' matches nothing in the graph",
        "StepsA, operators: 'aten.gelu' matches nothing in the graph",
    )
    assert run(Python("StepsA", operators=["aten.native_layer_norm"]), Xnnpack()).split.notes == ()
    made = run(Xnnpack(modules=["0"]), Aoti(), weights="beside")
    (note,) = made.split.notes
    assert [path.name for path in made.data] == ["m.ptd"]
    assert note.startswith("weights='beside': m.ptd; only Aoti's islands read")
    assert "those of Xnnpack (2 constants, 288 bytes) are in the program" in note
    assert run(Aoti(), weights="beside").split.notes == ()
    (folder / "m.ptd").unlink()
    made = run(weights="beside")
    assert made.data == () and "no m.ptd was written" in made.split.notes[0]
    assert "those of kernels (6 constants, 496 bytes)" in made.split.notes[0], made.split.notes


@case
def what_a_trace_says_is_said_once_and_first(folder: Path) -> None:
    """EX6, OP3: the operator's own words and the user's line in the first line; nothing on standard error."""
    import contextlib
    import io
    import logging

    import torch

    from headrace.export import Xnnpack
    from headrace.export.quiet import quiet, told_by_the_error

    def branch(self: Any, x: Any) -> Any:
        return x + 1 if x.sum() > 0 else x

    def product(self: Any, x: Any) -> Any:
        return x @ torch.ones(3, 3)

    torchs = [h for h in logging.getLogger("torch").handlers if isinstance(h, logging.StreamHandler)]
    assert torchs
    for function, first in (
        (branch, "Could not guard on data-dependent expression "),
        (product, "RuntimeError: a and b must have same reduction dim, but got [2, 4] X [3, 3]., at "),
    ):
        text = io.StringIO()
        streams = [handler.setStream(text) for handler in torchs]
        try:
            with contextlib.redirect_stderr(text):
                error = refused(folder, module(function), (randn(2, 4),), [Xnnpack()])
        finally:
            for handler, stream in zip(torchs, streams, strict=True):
                handler.setStream(stream)
        line = str(error).partition("\n")[0]
        assert first in line and "split_child.py:" in line and "return x" in line, error
        assert text.getvalue() == "", text.getvalue()
    # Others pass, and what nothing follows is told after all.
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in (None, "torchao", "torch._guards")]
    for logger in loggers[1:]:
        logger.addHandler(handler)
    loggers[0].addHandler(handler)
    try:
        with quiet(), told_by_the_error():
            loggers[0].warning("Torchgen is not able to parse the schema of aten::add")
            loggers[1].warning("Failed to load something")
            loggers[1].warning("something else")
            loggers[2].error("and now?")
            assert set(records) == {"something else"}, records
        assert set(records) == {"something else", "and now?"}, records
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@case
def a_long_line_of_source_is_cut(folder: Path) -> None:
    """EX6: at 120 characters, in the table and in messages."""
    import torch

    from headrace.export import Xnnpack

    def run(self: Any, x: Any) -> Any:
        return torch.relu(x) + torch.relu(x * 2) + torch.relu(x * 3) + torch.relu(x * 4) + torch.relu(x * 5) + torch.relu(x)  # fmt: skip

    split = exported(folder, module(run), (randn(2, 4),), [Xnnpack()]).split
    assert len(split) > 5
    for node in split:
        code = node.source.partition("split_child.py:")[2].partition(": ")[2]
        assert len(code) == 120 and code.startswith("return torch.relu(x) + ") and code.endswith("…"), code


# -------------------- sizes that vary


@case
def sizes_without_a_bound_are_refused(folder: Path) -> None:
    """EX6: the input and the dimension; what the model itself bounds is bounded."""
    import torch
    from torch.export import Dim

    from headrace.export import Xnnpack

    def run(self: Any, x: Any, y: Any) -> Any:
        return x + 1, y * 2

    inputs = (randn(3, 4), randn(3, 4))
    for dim in (Dim("n"), Dim("n", min=2), Dim.AUTO, Dim.DYNAMIC):
        error = refused(folder, module(run), inputs, [Xnnpack()], dynamic_shapes={"args": ({}, {1: dim})})
        said(error, "forward, input 1 'args_1', dimension 1: expected a size with an upper bound")
        said(error, 'Dim("name", max=…)')
        assert type(error).__name__ == "ExportError" and error.node == "args_1"
    traced = torch.export.export(module(run), inputs, dynamic_shapes={"args": ({0: Dim.AUTO}, {})})
    said(refused(folder, traced, inputs, [Xnnpack()]), "input 0 'args_0', dimension 0")
    for dim in (Dim("n", max=9), Dim.AUTO(max=9)):
        exported(folder, module(run), inputs, [Xnnpack()], dynamic_shapes={"args": ({}, {1: dim})})

    def bounded(self: Any, x: Any) -> Any:
        torch._check(x.shape[0] <= 7)
        return x + 1

    made = exported(
        folder, module(bounded), inputs[:1], [Xnnpack()], dynamic_shapes={"args": ({0: Dim.AUTO},)}
    )
    assert made.file.methods[0].inputs[0].shape == (7, 4)


# -------------------- claims


@case
def claims_by_operator_module_and_predicate(folder: Path) -> None:
    from headrace.export import Python
    from tests.programs.split import Layers

    def run(**claims: Any) -> Any:
        return exported(folder, Layers(2).eval(), (randn(1, 3, 16),), [Python("StepsA", **claims)]).split

    by_operator = run(operators=["aten.gelu", "aten.*softmax*"])
    taken = [n.operator for n in by_operator if n.delegate == "StepsA"]
    assert sorted(taken) == ["aten.gelu.default"] * 2 + ["aten.softmax.int"] * 2, taken
    assert "claimed by operators=" in by_operator["aten_gelu_default"].why
    views = run(operators=["aten.view"])
    assert {n.operator for n in views if n.delegate == "StepsA"} == {"aten.view_copy.default"}

    by_module = run(modules=["layers.1"])
    for node in by_module:
        assert (node.delegate == "StepsA") == (
            node.module == "layers.1" or node.module.startswith("layers.1.")
        ), node
    assert {n.module for n in by_module if n.delegate == "StepsA"} >= {
        "layers.1",
        "layers.1.norm",
        "layers.1.out",
    }
    assert len(run(modules=["layers.*.norm"]).islands) == 2
    assert not run(modules=["*.nothing"]).islands

    by_predicate = run(predicate=lambda node: node.outputs[0][1] == (1, 3, 5))
    assert [n.operator for n in by_predicate if n.delegate == "StepsA"][-1].startswith("aten.")
    assert {n.result for n in by_predicate if n.delegate == "StepsA"} == {"float32[1, 3, 5]"}

    both = run(operators=["aten.gelu", "aten.linear"], modules=["layers.0*"], exclude=["aten.gelu"])
    assert {(n.operator, n.module) for n in both if n.delegate == "StepsA"} == {
        ("aten.linear.default", "layers.0.qkv"),
        ("aten.linear.default", "layers.0.out"),
    }
    # What was asked for by name is not decomposed, elsewhere it is.
    elsewhere = {n.operator for n in both if n.module == "head"}
    assert "aten.linear.default" not in elsewhere and "aten.addmm.default" in elsewhere


@case
def the_first_claims_and_the_next_fill_the_gaps(folder: Path) -> None:
    from headrace.export import Python, Xnnpack

    def run(self: Any, x: Any) -> Any:
        import torch

        return torch.relu(torch.tanh(self.a(x))).cumsum(1)

    model = module(run, a=lambda: __import__("torch").nn.Linear(8, 8))
    split = exported(
        folder, model, (randn(2, 8),), [Python("StepsA", operators=["aten.tanh"]), Python("StepsB", operators=["aten.tanh", "aten.relu"]), Xnnpack()]
    ).split  # fmt: skip
    assert list(who(split).values()) == ["Xnnpack", "StepsA", "StepsB", "kernels"], str(split)
    assert [i.delegate for i in split.islands] == ["Xnnpack", "StepsA", "StepsB"]
    why = split["aten_cumsum_default"].why
    assert "StepsA: not among operators" in why and "Xnnpack: not supported: XNNPACK has no such" in why, why
    assert split["aten_relu_default"].source.endswith("torch.relu(torch.tanh(self.a(x))).cumsum(1)")
    assert (
        split["aten_relu_default"].why.startswith("StepsA: not among") and len(str(split).splitlines()) == 5
    )


@case
def small_islands_are_given_up(folder: Path) -> None:
    import torch

    from headrace.export import Python

    def run(self: Any, x: Any) -> Any:
        a = torch.relu(x).cumsum(1)
        return torch.tanh(torch.neg(torch.exp(a)))

    names = ["aten.relu", "aten.tanh", "aten.neg", "aten.exp"]
    split = exported(
        folder, module(run), (randn(2, 8),), [Python("StepsA", operators=names, min_size=2)]
    ).split
    assert who(split) == {
        "aten_relu_default": "kernels",
        "aten_cumsum_default": "kernels",
        "aten_exp_default": "StepsA",
        "aten_neg_default": "StepsA",
        "aten_tanh_default": "StepsA",
    }
    assert "too small: 1 of at least 2 operators" in split["aten_relu_default"].why
    next_one = [Python("StepsA", operators=names, min_size=2), Python("StepsB", operators=names)]
    assert who(exported(folder, module(run), (randn(2, 8),), next_one).split)["aten_relu_default"] == "StepsB"


@case
def cycles_keep_islands_apart(folder: Path) -> None:
    import torch

    from headrace.export import Python

    def run(self: Any, x: Any) -> Any:
        a = torch.relu(x)
        return torch.relu(a + a.cumsum(1))

    split = exported(
        folder, module(run), (randn(2, 8),), [Python("StepsA", operators=["aten.relu", "aten.add"])]
    ).split
    assert [len(i.nodes) for i in split.islands] == [1, 2]
    why = split["aten_add_tensor"].why
    assert "a cycle: aten_cumsum_default stands between it and aten_relu_default" in why, why


@case
def what_nobody_computes_is_refused(folder: Path) -> None:
    import torch

    from headrace.export import Python, Xnnpack

    def run(self: Any, x: Any) -> Any:
        y = torch.relu(x)
        return torch.linalg.inv_ex(y)[0]

    error = refused(
        folder, module(run), (randn(4, 4),), [Python("StepsA", operators=["aten.relu"]), Xnnpack()]
    )
    message = str(error)
    assert type(error).__name__ == "ExportError" and error.node == "aten_linalg_inv_ex_default", repr(error)
    for part in (
        "(aten.linalg_inv_ex.default of float32[4, 4], at ",
        "split_child.py:",
        "return torch.linalg.inv_ex(y)[0]",
        "StepsA: not among operators=['aten.relu']",
        "Xnnpack: not supported",
        "claim it for a delegate",
    ):
        assert part in message, message

    def branch(self: Any, x: Any) -> Any:
        return torch.cond(
            x.sum() > 0, lambda v: torch.linalg.inv_ex(v)[0].contiguous(), lambda v: v + 1, (x,)
        )

    inside = refused(folder, module(branch), (randn(4, 4),), [Xnnpack()])
    assert "linalg_inv_ex" in str(inside) and "linalg_inv_ex" in (inside.node or ""), inside


@case
def control_flow_stays_with_the_engine(folder: Path) -> None:
    """EX1, EX4: what is in its branches is decomposed for the CPU kernels, though outside of them a delegate keeps it
    whole."""
    import torch

    from headrace.export import Aoti, Python, Xnnpack

    def run(self: Any, x: Any) -> Any:
        y = self.norm(x)
        y = torch.cond(y.sum() > 0, lambda v: self.norm(v).sin() + 1, lambda v: v.cos() - 1, (y,))
        y = torch.cat([torch.tanh(y), self.w])
        return torch.cumsum(torch.cat([torch.tanh(y), self.w]), 0)

    # The norm's weights are in an island too, and those of a ``cat`` in two.
    model = module(run, norm=torch.nn.LayerNorm(4), w=randn(2, 4))
    for number, delegates in enumerate(
        ([Aoti()], [Xnnpack(), Aoti()], [Python("StepsA", operators=["aten.tanh"]), Aoti(merge=False)])
    ):
        there = folder / str(number)
        there.mkdir()
        made = exported(there, model, (randn(2, 4),), delegates, verify=verify())
        assert made.split["cond"].delegate == "kernels"
        assert "Aoti: not supported: control flow" in made.split["cond"].why
        assert [n.delegate for n in made.split if "layer_norm" in n.operator] == ["Aoti"], str(made.split)


@case
def numbers_stay_with_the_engine(folder: Path) -> None:
    """A size that is a result of the method is nobody's island; one that an operator takes goes with it."""
    import torch

    from headrace.export import Python

    def run(self: Any, x: Any) -> Any:
        return torch.relu(x).reshape(x.shape[0] * 2, 2), x.shape[0] * 3

    dim = torch.export.Dim("batch", min=1, max=9)
    made = exported(
        folder, module(run), (randn(4, 4),), [Python("StepsA", predicate=lambda node: True)],
        dynamic_shapes={"args": ({0: dim},)}, verify=verify(),
    )  # fmt: skip
    split = made.split
    numbers = [n for n in split if not n.result and n.delegate == "kernels"]
    assert len(numbers) == 2 and any("it gives a number" in n.why for n in numbers), str(split)
    (island,) = split.islands
    assert any(n.startswith("sym_size") for n in island.nodes), str(split)
    assert [d.output for d in made.verification.deviations] == [0]


@case
def constants_of_several_islands_keep_their_names(folder: Path) -> None:
    """One weight in three islands: each has the whole of it, under a name that no other has."""
    import torch

    from headrace.export import Python

    seen: list[dict[str, Any]] = []

    def lower(island: Any) -> bytes:
        seen.append(dict(island.constants))
        return bytes(island.json())

    def run(self: Any, x: Any) -> Any:
        for _ in range(3):
            x = torch.cumsum(x @ self.weight, 0)
        return x

    weight = randn(4, 4)
    model = module(run, weight=weight)
    split = exported(
        folder, model, (randn(2, 4),), [Python("StepsA", operators=["aten.mm"], lower=lower)]
    ).split
    assert len(split.islands) == 3 == len(seen)
    names = [name for island in seen for name in island]
    assert len(set(names)) == 3 and all(
        torch.equal(torch.tensor(v), weight) for i in seen for v in i.values()
    )


@case
def a_payload_is_what_lower_gives(folder: Path) -> None:
    import torch

    from headrace.export import Python

    def run(self: Any, x: Any) -> Any:
        return torch.relu(x)

    given: list[Any] = []

    def lower(island: Any) -> bytes:
        given.append(island)
        return b"my payload"

    made = exported(
        folder, module(run), (randn(2, 4),), [Python("StepsA", operators=["aten.relu"], lower=lower, specs={"depth": b"3"})]
    )  # fmt: skip
    (island,) = made.file["forward"].islands
    raw = made.path.read_bytes()
    assert raw[island.payload_offset :][: island.payload_nbytes] == b"my payload"
    assert island.spec("depth") == b"3" and island.inputs == 1 and island.outputs == 1
    assert island.spec("headrace.lower") is None
    (graph,) = given
    assert [s.operator for s in graph.steps] == ["aten.relu.default"] and graph.inputs[0].shape == (2, 4)
    for wrong, text in (
        (lambda island: "text", "expected bytes from lower(), got str"),
        (lambda island: 1 / 0, "got ZeroDivisionError"),
    ):
        error = refused(
            folder, module(run), (randn(2, 4),), [Python("StepsA", operators=["aten.relu"], lower=wrong)]
        )
        assert text in str(error) and type(error).__name__ == "ExportError", error


@case
def claims_are_checked(folder: Path) -> None:
    from headrace.errors import OptionError
    from headrace.export import Aoti, Python, Verify, Xnnpack

    for make, text in (
        (lambda: Xnnpack(operators="aten.relu"), "expected a list of names"),
        (lambda: Xnnpack(modules=[3]), "expected a list of names"),
        (lambda: Aoti(min_size=0), "an integer of 1 or more"),
        (lambda: Aoti(min_size=True), "an integer of 1 or more"),
        (lambda: Xnnpack(predicate=3), "expected a function"),
        (lambda: Python("StepsA"), "say what it takes"),
        (lambda: Python(""), "expected a name"),
        (lambda: Verify(rtol=-1), "0 or more"),
        (lambda: Verify(imports="a"), "expected a list of names"),
    ):
        try:
            make()
            raise AssertionError(text)
        except OptionError as error:
            said(error, text)
    x = (randn(2, 4),)
    model = module(lambda self, x: x + 1)
    for delegates, options, text in (
        (["xnnpack"], {}, "expected Aoti(), Xnnpack()"),
        ([Xnnpack], {}, "expected Aoti(), Xnnpack()"),
        ([Python("XnnpackBackend", operators=["aten.add"])], {}, "that of a backend of ExecuTorch's"),
        ([Xnnpack()], {"verify": "no"}, "expected True, False or Verify"),
        ([Xnnpack()], {"verify": Verify(inputs={"backward": []})}, "expected methods among ['forward']"),
    ):
        error = refused(folder, model, x, delegates, **options)
        assert isinstance(error, OptionError) and text in str(error), error
    broken = refused(folder, model, x, [Xnnpack(predicate=lambda node: 1 / 0)])
    assert broken.node and "ZeroDivisionError" in str(broken), broken


# -------------------- verification


@case
def a_right_program_is_verified(folder: Path) -> None:
    import torch

    from headrace.export import Python, Xnnpack

    def run(self: Any, x: Any, n: Any) -> Any:
        return torch.relu(self.a(x)) * 2, x.bfloat16(), n + 1

    lines: list[str] = []
    dim = torch.export.Dim("batch", min=1, max=9)
    made = exported(
        folder, module(run, a=lambda: torch.nn.Linear(8, 8)), (randn(4, 8), torch.tensor([3, 1])),
        [Python("StepsA", operators=["aten.relu", "aten.mul"]), Xnnpack()],
        verify=verify(), progress=lines.append, dynamic_shapes={"args": ({0: dim}, None)},
    )  # fmt: skip
    said = made.verification
    assert said.devices == ("cpu", "sim (schedule late)", "sim (schedule 7)") and said.calls == 2, said
    assert [(d.output, d.dtype) for d in said.deviations] == [(0, "float32"), (1, "bfloat16"), (2, "int64")]
    assert 0 <= said.deviations[0].largest < 1e-5 and said.deviations[2].largest == 0 and said.note == ""
    assert "largest deviation" in str(said)
    stages = " | ".join(lines)
    assert all(
        s in stages
        for s in (
            "trace",
            "split and lower",
            "StepsA, 1 island",
            "an island of 2 operators",
            "plan memory",
            "verify on cpu, sim",
        )
    ), stages


@case
def a_wrong_program_is_not_handed_over(folder: Path) -> None:
    import re

    import torch

    from headrace.export import Python

    def run(self: Any, x: Any) -> Any:
        return x + 1.0, torch.relu(x)

    wrong = [Python("StepsWrong", operators=["aten.relu"])]
    error = refused(folder, module(run), (randn(4, 8),), wrong, verify=verify())
    message = str(error)
    assert "output 1, float32[4, 8]" in message and "the example inputs" in message, message
    assert abs(float(re.search(r"largest deviation of ([\d.e-]+)", message).group(1)) - 0.5) < 1e-6, message
    # The user's tolerance: what it takes is handed over, and says how far it was.
    made = exported(folder, module(run), (randn(4, 8),), wrong, verify=verify(atol=0.6))
    assert abs(made.verification.deviations[1].largest - 0.5) < 1e-6
    # A program whose delegate is not there is none either.
    gone = refused(
        folder, module(run), (randn(4, 8),), [Python("StepsNobody", operators=["aten.relu"])], verify=verify()
    )
    assert "StepsNobody" in str(gone) and "module=" in str(gone), gone
    missing = refused(
        folder, module(run), (randn(4, 8),), [Python("StepsA", operators=["aten.relu"], module="no_such_module")], verify=verify()
    )  # fmt: skip
    assert "no_such_module" in str(missing), missing


@case
def verification_takes_the_users_inputs(folder: Path) -> None:
    import torch

    from headrace.export import Python

    def run(self: Any, x: Any) -> Any:
        return torch.where(x > 5, torch.relu(x), x)

    # Wrong where x > 5 alone, which the example does not meet.
    wrong = [Python("StepsWrong", operators=["aten.relu"])]
    few, many = torch.zeros(4), torch.full((4,), 9.0)
    exported(folder, module(run), (few,), wrong, verify=verify(inputs=[(few - 1,)]))
    error = refused(folder, module(run), (few,), wrong, verify=verify(inputs=[(few - 1,), (many,)]))
    assert "inputs 1" in str(error), error
    # Nor may the model's state advance, or an argument change, for the sake of a check.
    state = module(lambda self, x: self.count.add_(1.0) + x.mul_(2.0), count=torch.zeros(1))
    x = torch.ones(1)
    made = exported(folder, state, (x,), [Python("StepsA", operators=["aten.add"])], verify=verify())
    assert float(state.count) == 0 and made.verification.calls == 2


@case
def an_interpreter_without_the_run_time_is_named(folder: Path) -> None:
    from headrace.export import Verify, Xnnpack

    model, x = module(lambda self, x: x + 1), (randn(2, 4),)
    for python, text in (("/no/such/python", "No such file"), (sys.executable, "exit status 1")):
        error = refused(folder, model, x, [Xnnpack()], verify=Verify(python=python))
        assert python in str(error) and text in str(error), error


@case
def a_plan_that_is_not_the_splits_is_found(folder: Path) -> None:
    """DM1: a tensor in a buffer of another device, an island whose arguments lie elsewhere, an island too few."""
    import dataclasses

    import torch

    from headrace.errors import ExportError
    from headrace.export import Python, Split
    from headrace.export.verify import check_plan

    made = exported(
        folder,
        module(lambda self, x: torch.relu(x)),
        (randn(2, 4),),
        [Python("StepsA", operators=["aten.relu"])],
    )
    file = made.file
    check_plan("m", file, made.split)
    (method,) = file.methods

    def with_method(**changes: Any) -> Any:
        return dataclasses.replace(file, methods=(dataclasses.replace(method, **changes),))

    moved = tuple(dataclasses.replace(b, device="cpu") for b in method.buffers)
    elsewhere = Split(tuple(dataclasses.replace(n, device="cpu") for n in made.split))
    for wrong, split, text in (
        (with_method(buffers=moved), made.split, "expected it planned on cuda:0, got a buffer on cpu"),
        (file, elsewhere, "expected its arguments on cpu"),
        (with_method(islands=()), made.split, "expected the 1 islands of the split, got 0"),
    ):
        try:
            check_plan("m", wrong, split)
            raise AssertionError(text)
        except ExportError as error:
            said(error, text)


# -------------------- the cache


@case
def a_key_holds_all_that_goes_in(folder: Path) -> None:
    import torch

    from headrace.export.content import key
    from headrace.export.target import Target

    def program(**changes: Any) -> Any:
        given = {"width": 4, "scale": 2.0, "seed": 0, "batch": 3, "dynamic": False, **changes}
        model = module(
            lambda self, x: torch.relu(self.a(x)) * given["scale"],
            seed=given["seed"],
            a=lambda: torch.nn.Linear(4, given["width"]),
        )
        dims = {"args": ({0: torch.export.Dim("b", min=1, max=8)},)} if given["dynamic"] else None
        return torch.export.export(model, (torch.randn(given["batch"], 4),), dynamic_shapes=dims)

    def keys(*targets: Any, **changes: Any) -> list[str]:
        return [key(program(**changes), t) for t in targets or (Target(),)]

    base = keys()
    assert keys() == base
    found = [
        *base,
        *keys(width=5),
        *keys(scale=2.5),
        *keys(seed=1),
        *keys(batch=5),
        *keys(Target(march="x86-64-v4")),
    ]
    found += [*keys(dynamic=True), *keys(dynamic=True, batch=5)]
    assert len(set(found)) == 8, found


@case
def what_comes_from_the_cache_is_what_was_compiled(folder: Path) -> None:
    import torch

    from headrace.export import Aoti, content, inductor

    def run(self: Any, x: Any) -> Any:
        return torch.relu(x @ self.weight) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    model, x = module(run, weight=randn(4, 4)), (randn(2, 4),)
    compilations: list[str] = []
    really = inductor.compile_program

    def counted(method: str, *args: Any) -> Any:
        compilations.append(method)
        return really(method, *args)

    from headrace.export import aoti

    aoti.compile_program = counted
    try:
        files = []
        for cache in (folder / "cache", folder / "cache", False):
            files.append(exported(folder, model, x, [Aoti()], cache=cache).path.read_bytes())
        assert files[0] == files[1] and compilations == ["forward"] * 2, compilations
        # Compiled anew it has the same constants in the same order.
        (kept,) = (folder / "cache").iterdir()
        kept.write_bytes(kept.read_bytes()[:-40] + bytes(40))
        again = exported(folder, model, x, [Aoti()], cache=folder / "cache").path.read_bytes()
        assert len(compilations) == 3 and again == files[0]
        other = module(run, weight=randn(4, 4) + 1)
        exported(folder, other, x, [Aoti()], cache=folder / "cache")
        assert len(compilations) == 4 and content.current() is None
    finally:
        aoti.compile_program = really


if __name__ == "__main__":
    case.main()
