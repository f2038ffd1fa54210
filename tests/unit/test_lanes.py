"""GC6: programs side by side in lanes, measured, and the split that meets targets. What is measured here is the simulated
device's, so its numbers say nothing; tests/cuda asks a GPU."""

from __future__ import annotations

import gc
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import cli, lanes
from headrace.lanes import split
from tests.conftest import run_python, succeeded
from tests.contract import delegates
from tests.contract.conftest import golden
from tests.programs import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def installed() -> None:
    delegates.install(delegates.OneCall)


def tenant(name: str = "two_islands", **more: Any) -> lanes.Tenant:
    program = golden(name)
    return lanes.Tenant(program.path, program.inputs(), name=name, **more)


def test_each_setting_is_measured_and_everything_given_back() -> None:
    """GC6, GC1, LT3: alone, in lanes, with nobody in a lane, with the others in none; granted sizes; nothing is left."""
    device = headrace.device("sim")
    before = device.memory()["current_nbytes"]
    found = lanes.side_by_side([tenant(), tenant("chain10")], [9, 64], device=device, calls=30)
    settings = {(one.tenant, one.sms, one.beside) for one in found}
    assert settings == {
        (name, sms, beside)
        for name, granted in (("two_islands", 16), ("chain10", 64))
        for sms, beside in (
            (0, "alone"),
            (granted, "alone"),
            (granted, "outside every lane"),
            (granted, "in lanes"),
            (0, "on the whole GPU"),
        )
    }
    assert len(found) == len(settings)
    for one in found:
        latency = one.latency
        assert latency.calls == 30 and 0 < latency.p50_us <= latency.p99_us <= latency.p999_us
    gc.collect()
    device.trim()
    assert device.partition(sms=128).sm_count == 128
    assert device.memory()["current_nbytes"] == before


def test_what_cannot_be_captured_is_measured_call_by_call() -> None:
    """GR7: as a user would run it."""
    (one,) = lanes.measure([tenant("host_first")], [8], device=headrace.device("sim"), calls=5)
    assert (one.sms, one.beside, one.latency.calls) == (8, "alone", 5)


def test_a_neighbour_that_fails_is_told() -> None:
    """OP3: its own error, and the measuring ends."""

    class Late(delegates.OneCall):
        calls = 0

        def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
            type(self).calls += 1
            if type(self).calls > 200:
                raise RuntimeError("on purpose")
            super().run(inputs, outputs, stream)

        def capturable(self) -> str:
            return "it counts its calls"

    delegates.install(Late)
    with pytest.raises(headrace.DelegateError, match="on purpose"):
        lanes.measure([tenant(), tenant("chain10")], [8, 8], device=headrace.device("sim"), calls=100_000)


@pytest.mark.parametrize(
    ("sms", "more", "error", "words"),
    [
        ([8], {}, headrace.OptionError, "one size for each of 2 tenants, got 1"),
        ([8, 8], {"calls": 0}, headrace.OptionError, "calls: expected 1 or more"),
        ([64, 72], {}, headrace.DeviceError, "at most 132"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    sms: list[int], more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        lanes.measure([tenant(), tenant()], sms, device=headrace.device("sim"), **more)


# ---- the planner, over latencies that a model makes up

Model = Callable[[str, int, Sequence[int]], float]


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], None]:
    """Latencies by a formula of (tenant, its SMs, everybody's SMs)."""

    def use(model: Model) -> None:
        def measure(
            tenants: Sequence[lanes.Tenant], sms: Sequence[int], *, device: Any, calls: int
        ) -> list[lanes.Measured]:
            granted = [p.sm_count for p in device.split(sms)]
            return [
                lanes.Measured(
                    one.label,
                    size,
                    "alone" if len(tenants) == 1 else "in lanes",
                    lanes.Latency(*[model(one.label, size, granted)] * 3, calls),
                )
                for one, size in zip(tenants, granted, strict=True)
            ]

        monkeypatch.setattr(split, "measure", measure)

    return use


def named(name: str, target_us: float | None = None) -> lanes.Tenant:
    return lanes.Tenant("none.pte", (), name=name, target_us=target_us)


def test_each_gets_the_smallest_lane_that_leaves_a_margin(modelled: Any) -> None:
    """GC6: and who has no target gets what is left."""
    modelled(lambda name, sms, all_: 4000 / sms)
    device = headrace.device("sim")
    found = lanes.propose([named("a", 290), named("b", 130), named("c")], device=device)
    # 4000 / 16 = 250 leaves no fifth to 290; 32 does. 4000 / 32 = 125 leaves none to 130; 64 does.
    assert found.sms == (32, 64, 32) and "met" in found.reason
    assert [len(curve) for curve in found.curves] == [5, 5, 5]
    assert [one.sms for one in found.curves[0]] == [8, 16, 32, 64, 128]
    assert lanes.propose([named("a", 290)], device=device, margin=1).sms == (16,)
    assert lanes.propose([named("a", 290)], device=device, sizes=[24, 40]).sms == (24,)


def test_who_misses_beside_the_others_gets_a_larger_lane(modelled: Any) -> None:
    """GC6: what is proposed met its targets when it was run."""
    modelled(lambda name, sms, all_: 1000 / sms * (1.5 if len(all_) > 1 and name == "a" else 1))
    found = lanes.propose([named("a", 75), named("b", 200)], device=headrace.device("sim"))
    # Alone in 16 it takes 62.5, beside the others 93.75; in 32, 46.9.
    assert found.sms == (32, 8)
    assert [one.latency.p99_us for one in found.measured] == [46.875, 125]


def test_who_draws_the_bandwidth_gets_a_smaller_lane(modelled: Any) -> None:
    """GC6: where a larger lane does not help, those without a target are cut, and nobody gets more than it needs."""
    tried: list[tuple[int, ...]] = []

    def model(name: str, sms: int, all_: Sequence[int]) -> float:
        if name == "a":
            tried.append(tuple(all_))
        # Bound by memory: the others' SMs cost it, its own are no use.
        return 50 + (sum(all_) - sms if name == "a" else 0)

    modelled(model)
    found = lanes.propose([named("a", 100), named("b"), named("c")], device=headrace.device("sim"))
    # From 56 + 56 to 32 + 32 beside it are too much, whatever its own lane is; 16 + 16 are not.
    assert found.sms is not None and found.sms[0] == 8
    assert found.sms[1] == found.sms[2] and 50 + 2 * found.sms[1] <= 100
    assert found.sms in tried and [one.sms for one in found.measured] == list(found.sms)
    assert re.search(
        r"a takes 1\.\d times as long as alone in 8 SMs: memory bandwidth is shared", found.reason
    )
    # Larger lanes came first, with all of the rest beside them.
    assert (8, 56, 56) in tried and (16, 56, 56) in tried and (64, 32, 32) in tried


def test_a_lane_is_made_larger_and_the_others_smaller_where_it_takes_both(modelled: Any) -> None:
    modelled(lambda name, sms, all_: 800 / sms + (sum(all_) - sms if name == "a" else 0))
    # Alone in 16 it takes 50, which leaves the margin; beside 16 others no more than 66.
    found = lanes.propose([named("a", 61), named("b")], device=headrace.device("sim"))
    assert found.sms is not None and 800 / found.sms[0] + found.sms[1] <= 61
    assert found.sms[0] > 16


def test_the_whole_device_is_a_size(modelled: Any) -> None:
    modelled(lambda name, sms, all_: 13200 / sms)
    found = lanes.propose([named("a", 100)], device=headrace.device("sim"), sizes=[64, 132], margin=1)
    assert found.sms == (132,) and found.reason == "every target was met, all busy"


@pytest.mark.parametrize(
    ("model", "targets", "words"),
    [
        (
            lambda name, sms, all_: 4000 / sms,
            (20, None),
            "a: expected a p99 of 20 µs with a margin of 1.2, got 31 µs",
        ),
        (
            lambda name, sms, all_: 4000 / sms,
            (60, 60),
            r"132 SMs to be enough, got targets that ask for 128 \+ 128",
        ),
        (
            lambda name, sms, all_: 100 / sms * (50 if len(all_) > 1 else 1),
            (20, None),
            "a: expected a p99 of 20 µs beside the others, got 78 µs in 64 SMs.*bandwidth above all, lanes do not divide",
        ),
    ],
)
def test_where_no_split_meets_the_targets_it_says_why(
    model: Model, targets: tuple[float, ...], words: str, modelled: Any
) -> None:
    """GC6: nothing is proposed that was not seen to hold."""
    modelled(model)
    found = lanes.propose(
        [named(n, t) for n, t in zip("ab", targets, strict=True)], device=headrace.device("sim")
    )
    assert found.sms is None
    assert re.search(words, found.reason), found.reason


def test_proposals_need_a_target_and_sizes_that_exist() -> None:
    device = headrace.device("sim")
    with pytest.raises(headrace.OptionError, match="one with target_us at least, got none"):
        lanes.propose([named("a")], device=device)
    with pytest.raises(headrace.OptionError, match=r"margin: expected 1 or more, got 0\.5"):
        lanes.propose([named("a", 1)], device=device, margin=0.5)
    with pytest.raises(headrace.OptionError, match="1 to 132 multiprocessors, got 133"):
        lanes.propose([named("a", 1)], device=device, sizes=[8, 133])
    with pytest.raises(headrace.OptionError, match="sizes: expected at least one"):
        lanes.propose([named("a", 1)], device=device, sizes=[])
    with pytest.raises(headrace.OptionError, match="one size for each of 1 tenants, got 2"):
        lanes.side_by_side([tenant()], [8, 8], device=device)
    with pytest.raises(headrace.DeviceError, match="partition"):
        lanes.propose([named("a", 1)], device="cpu")
    for wrong in (0, -1, float("nan")):
        with pytest.raises(headrace.OptionError, match="target_us"):
            named("a", wrong)


# ---- pictures and the command


def test_pictures_show_every_measurement(tmp_path: Path, modelled: Any) -> None:
    latency = lanes.Latency(10, 20, 30, 5)
    measured = [lanes.Measured("<a>", 8, "alone", latency), lanes.Measured("b & c", 0, "in lanes", latency)]
    lanes.plot_side_by_side(measured, tmp_path / "bars.svg")
    root = ElementTree.parse(tmp_path / "bars.svg").getroot()
    assert len(root.findall(f"{SVG}rect")) == 1 + len(measured)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"<a>", "b & c", "8 SMs, alone", "whole GPU, in lanes"} <= set(texts)
    modelled(lambda name, sms, all_: 4000 / sms)
    who = [named("a", 300), named("b")]
    lanes.plot_curves(lanes.propose(who, device=headrace.device("sim")), who, tmp_path / "curves.svg")
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert len(root.findall(f"{SVG}polyline")) == 2
    assert len(root.findall(f"{SVG}circle")) >= 5 * 2 + 1
    assert any("target 300 µs" in (t.text or "") for t in root.iter(f"{SVG}text"))
    with pytest.raises(headrace.InputError):
        lanes.plot_side_by_side([], tmp_path / "none.svg")


def test_the_command_measures_and_proposes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """GC6: a table, JSON and a picture; the exit status says whether the targets can be met."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = cli.main([str(a) for a in argv])
        return status, *capsys.readouterr()

    files = [
        "examples/scale.pte",
        "examples/scale.pte",
        "--import",
        "examples.scale",
        "--device",
        "sim",
        "--calls",
        10,
    ]
    picture = tmp_path / "lanes.svg"
    status, out, err = run("bench", *files, "--lanes", "8,64", "--plot", picture)
    assert (status, err) == (0, "") and picture.exists()
    assert out.count("alone") >= 5 and "no ratio is promised" in out
    for number, granted in enumerate((8, 64)):
        assert (
            f"examples/scale.pte #{number}, forward: stays in its lane: {granted} SMs seen of {granted}"
            in out
        )
    status, out, _ = run("bench", *files, "--targets", "1e9,-", "--json")
    told = json.loads(out)
    assert status == 0 and told["proposal"]["lanes"] == [8, 120] and len(told["curves"]) == 2
    status, out, _ = run("bench", *files, "--targets", "1e-3,-")
    assert status != 0 and "no lanes meet the targets" in out
    for wrong in (
        *(["--lanes", text] for text in ("8", "8,x", "8,8.5", "8,nan", "8,1e30", "8,0")),
        *(["--targets", text] for text in ("1", "nan,-", "0,-", "inf,-")),
        *([], ["--lanes", "8,8", "--targets", "1,1"], ["--lanes", "8,8", "--plot", tmp_path]),
        ["--lanes", "8,8", "--plot", tmp_path / "none" / "lanes.svg"],
    ):
        status, _, err = run("bench", *files, *wrong)
        assert status != 0 and "OptionError" in err
    assert np.isfinite(told["measured"][0]["latency"]["p99_us"])


def test_the_page_about_lanes_runs() -> None:
    """SY2, GC1: docs/lanes.md."""
    first, workqueues = re.findall(r"```python\n(.*?)```", (ROOT / "docs/lanes.md").read_text(), re.DOTALL)
    assert succeeded(run_python(first)) == "8 64\n[6. 6. 6. 6.] [6. 6. 6. 6.]\n"
    assert succeeded(run_python("import headrace\n" + workqueues)) == "2\n"
