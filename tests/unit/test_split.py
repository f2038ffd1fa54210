"""Splitting a model over several delegates: claims, refusals, verification, the picture, the command, the cache."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace import cli, engine
from headrace.export import Split, SplitNode, cache, plot
from tests import programs
from tests.conftest import run_python
from tests.programs.with_run_time import interpreter
from tests.unit import cases

CASES = cases.named("tests.unit.split_child")
PACKAGE = Path(cache.__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case of split_child.py said, in one process with torch."""
    return cases.ran("tests.unit.split_child", tmp_path_factory.mktemp("split"), sys.executable)


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_with_torch(case: str, results: dict[str, str]) -> None:
    """EX1, EX3, EX4, EX5, EX6, OP3, OP4, DM1: the case of split_child.py."""
    assert results[case] == ""


def test_kernels_are_the_engines() -> None:
    """EX6: what the exporter counts on is what the engine registers."""
    listed = (PACKAGE.parent / "pte" / "kernels.txt").read_text().split()
    assert listed == sorted(set(engine.core.kernels())) and len(listed) > 200


# -------------------- the same input, the same bytes

AGAIN = """
    import hashlib, sys, warnings
    from tests.programs.exporting import without_run_time
    without_run_time(sys.argv[2:])
    warnings.simplefilter("ignore")
    import headrace.export
    from tests.programs.split import MODELS, SPLITS
    for name, split in (("shared_weight", "crumbs"), ("transformer", "first_layer")):
        made = MODELS[name]()
        path = f"{sys.argv[1]}/{name}.pte"
        headrace.export.export(
            made.methods["forward"].module.eval(), tuple(made.methods["forward"].calls[0]), path=path,
            delegates=SPLITS[split], verify=False,
        )
        print(hashlib.sha256(open(path, "rb").read()).hexdigest())
"""


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    """EX1: in processes whose hashes differ, over Python delegates and XNNPACK, with a constant of several islands."""

    def once(seed: int) -> list[str]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        done = run_python(
            AGAIN,
            folder,
            *programs.package_folders(),
            environment={"PYTHONHASHSEED": str(seed)},
            python=programs.export_python(),
            timeout_s=1200,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(once, (1, 2))
    assert first == second and len(set(first)) == 2


# -------------------- the command


def command(
    *arguments: object, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*interpreter(), *map(str, arguments)],
        cwd=programs.ROOT,
        env={
            **os.environ,
            "HEADRACE_EXPORT_CACHE": str(folder / "cache"),
            "HEADRACE_TEST_PYTHON": sys.executable,
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_the_command_exports_and_says_what_it_did(tmp_path: Path) -> None:
    """EX1, EX4, EX5: progress on standard error, one JSON object on standard output, the program and its picture."""
    done = command(
        "export", "tests.programs.command:make", "-o", tmp_path / "m.pte", "--json", "--plot", tmp_path / "m.svg",
        "--delegate", "python:StepsA:operators=aten.relu+aten.tanh,module=tests.programs.step_delegates",
        "--device", "cuda:0", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["version"] == 1 and said["command"] == "export" and said["file"] == str(tmp_path / "m.pte")
    assert {n["delegate"] for n in said["split"]} == {"StepsA", "kernels"}
    assert [i["delegate"] for i in said["islands"]] == ["StepsA"] * len(said["islands"]) and said["islands"]
    assert said["verification"]["calls"] == 2 and len(said["verification"]["devices"]) == 3
    for stage in ("forward: trace", "forward: split and lower", "an island of", "verify on cpu, sim"):
        assert stage in done.stderr, done.stderr
    assert (tmp_path / "m.pte").exists() and (tmp_path / "m.svg").read_text().startswith("<svg ")


def test_the_command_tells_all_that_was_done_and_nothing_else(tmp_path: Path) -> None:
    """EX5, OP3: what a model prints is not in the object; a picture that cannot be written in the end takes nothing else away;
    quietly nobody else says anything."""
    picture = tmp_path / "m.svg"
    done = command(
        "export", "tests.programs.command:noisy", "-o", tmp_path / "m.pte", "--json", "--quiet", "--plot", picture,
        "--delegate", "xnnpack:operators=aten.mul", folder=tmp_path, environment={"HEADRACE_TEST_FOLDER": str(picture)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    said = json.loads(done.stdout)
    note = "Xnnpack, operators: 'aten.mul' matches nothing in the graph"
    assert said["file"] == str(tmp_path / "m.pte") and said["notes"] == [note]
    assert (tmp_path / "m.pte").exists()
    made, *others = done.stderr.splitlines()
    assert made == "made" and "called" in others, done.stderr
    (refused,) = [line for line in others if line != "called"]
    assert refused.startswith(f"headrace: --plot, {picture}: OptionError: ") and "got a folder" in refused


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """OP2, OP3: exit status 2, a message, and no file."""
    program = tmp_path / "m.pte"
    for arguments, text in (
        (["tests.programs.command"], "expected MODULE:CALLABLE"),
        (["tests.programs.command:nothing"], "got no 'nothing'"),
        (
            ["tests.programs.command:make", "--delegate", "tensorflow"],
            "expected aoti, xnnpack, tensorrt or python:NAME",
        ),
        (["tests.programs.command:make", "--delegate", "xnnpack:colour=red"], "got 'colour=red'"),
        (["tests.programs.command:make", "--delegate", "xnnpack:merge=maybe"], "got 'merge=maybe'"),
        (["tests.programs.command:make", "--target", "tpu"], "target 'tpu'"),
        (["tests.programs.command:wrong"], "a mapping, got int"),
        # Before any code of the model's runs.
        (["nowhere:make", "--device", "gpu"], "or 'cpu', got 'gpu'"),
        (["nowhere:make", "--device", "cuda:1"], "or 'cpu', got 'cuda:1'"),
        (["nowhere:make", "--delegate", "aoti:operators=a,operators=b"], "expected operators once"),
        (["nowhere:make", "--plot", tmp_path / "s.png"], "s.png: expected a name that ends in .svg"),
        (["nowhere:make", "--plot", tmp_path / "no" / "s.svg"], "no, got none; make it first"),
        (["nowhere:make", "--plot", tmp_path], f"--plot, {tmp_path}: expected a file, got a folder"),
    ):
        done = run_python(
            "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))",
            "export", *arguments, "-o", program,
        )  # fmt: skip
        assert done.returncode == 2 and text in done.stderr, (arguments, done.stderr)
        assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_the_command_looks_first_where_the_program_goes(tmp_path: Path) -> None:
    """OP2: one line and exit status 2, before the model is imported; nothing is left there."""
    (tmp_path / "file").write_text("")
    for output, text in (
        (tmp_path, f"--output, {tmp_path}: expected a file, got a folder"),
        (tmp_path / "no" / "m.pte", f"expected the folder {tmp_path / 'no'}, got none; make it first"),
        (tmp_path / "file" / "m.pte", f"expected the folder {tmp_path / 'file'}, got a file"),
        (tmp_path / ("a" * 300), "expected a file that can be written, got: File name too long"),
        ("/proc/m.pte", "--output, /proc/m.pte: expected a file that can be written, got: "),
        ("/dev/null", "expected a file, got a device"),
        ("", "expected the name of a file to write, got ''"),
    ):
        done = run_python(
            "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))",
            "export", "nowhere:make", "--json", "-o", output,
        )  # fmt: skip
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert text in done.stderr and json.loads(done.stdout)["error"] == "OptionError", done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_in_the_end_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """OP2: a full disk, told by the command in one line."""

    def full(args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there/m.pte")

    monkeypatch.setattr(cli.export_command, "run", full)
    said: list[str] = []
    monkeypatch.setattr("sys.stderr", types.SimpleNamespace(write=said.append, flush=lambda: None))
    assert cli.main(["export", "json:dumps", "-o", "m.pte"]) == 2
    assert "".join(said) == "headrace: OSError: [Errno 28] No space left on device: 'there/m.pte'\n"


# -------------------- the picture


def node(
    name: str, *inputs: str, delegate: str = "kernels", island: int | None = None, device: str = "cpu"
) -> SplitNode:
    return SplitNode(
        "forward", name, "aten.add.Tensor", delegate, island, device, "why & wherefore", "layers.0", 'm.py:1: "x" < y',
        inputs, "float32[4, 8]", 128,
    )  # fmt: skip


def drawn(split: Split) -> ElementTree.Element:
    return ElementTree.fromstring(plot.svg(split))


def texts(root: ElementTree.Element) -> list[str]:
    return [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_shows_islands_and_what_crosses_devices() -> None:
    """EX5: an island is a box with its operators; a line to another device is marked, with what is copied."""
    split = Split(
        (
            node("a", "x", delegate="A", island=0, device="cuda:0"),
            node("b", "a", delegate="A", island=0, device="cuda:0"),
            node("c", "b"),
            node("d", "c", "b", delegate="B", island=1, device="cuda:0"),
        )
    )
    root = drawn(split)
    assert {
        "0 · A · cuda:0 · 2 operators",
        "1 · B · cuda:0 · 1 operator",
        "CPU kernels · 1 operator",
        "x",
    } <= set(texts(root))
    paths = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if len(p)]
    kinds = {(p.get("class"), p[0].text) for p in paths}
    assert ("edge", "a → b") in kinds and ("cross", "x, cpu → cuda:0") in kinds
    assert ("cross", "b: float32[4, 8], cuda:0 → cpu") in kinds and (
        "cross",
        "c: float32[4, 8], cpu → cuda:0",
    ) in kinds
    assert ("edge", "b: float32[4, 8], cuda:0 → cuda:0") in kinds
    assert texts(root).count("float32[4, 8]") == 2
    assert any(
        'm.py:1: "x" < y\nwhy & wherefore' in (t.text or "")
        for t in root.iter("{http://www.w3.org/2000/svg}title")
    )


def boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    found = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "box"]
    return [tuple(float(r.get(k) or 0) for k in ("x", "y", "width", "height")) for r in found]  # type: ignore[misc]


@pytest.mark.parametrize("count", [50, 2000])
def test_no_box_covers_another(count: int) -> None:
    """EX5: readable for 50 operators, usable for 2,000: boxes apart, inside the picture, and every operator there."""
    nodes = []
    for i in range(count):
        where = (i // 7) % 3
        given = {} if where == 2 else {"delegate": "AB"[where], "island": i // 7, "device": "cuda:0"}
        nodes.append(node(f"n{i}", *({f"n{i - 1}", f"n{max(0, i - 9)}"} if i else {"x"}), **given))
    split = Split(tuple(nodes))
    root = drawn(split)
    width, height = float(root.get("width") or 0), float(root.get("height") or 0)
    placed = boxes(root)
    assert len(placed) > count // 21
    for x, y, w, h in placed:
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
    for i, (x, y, w, h) in enumerate(placed):
        for u, v, p, q in placed[:i]:
            assert x + w <= u or u + p <= x or y + h <= v or v + q <= y
    operators = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "op"]
    assert len(operators) == count


# -------------------- the cache


def test_where_islands_are_kept() -> None:
    """EX1: a flag, a variable, the user's cache folder by the XDG specification."""
    home = Path(os.path.expanduser("~")) / ".cache/headrace/islands"
    for option, environment, wanted in (
        (True, {}, home),
        (True, {"XDG_CACHE_HOME": "/c"}, Path("/c/headrace/islands")),
        (True, {"XDG_CACHE_HOME": "relative"}, home),
        (True, {cache.VARIABLE: "0"}, None),
        (True, {cache.VARIABLE: "/d"}, Path("/d")),
        (False, {cache.VARIABLE: "/d"}, None),
        ("/e", {cache.VARIABLE: "0"}, Path("/e")),
    ):
        assert cache.folder_of(option, environment) == wanted


def test_what_is_kept_is_whole_or_nothing(tmp_path: Path) -> None:
    """OP3: damaged, cut short, under another name: compiled anew, never believed."""
    store = cache.Store(tmp_path / "deep" / "folder")
    assert store.read("k") is None
    store.write("k", {"a": [1]}, [b"library", b"", b"\0" * 100])
    assert store.read("k") == ({"a": [1]}, [b"library", b"", b"\0" * 100])
    (path,) = store.folder.iterdir()
    whole = path.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert store.read("k") is None
        path.write_bytes(whole[:at])
        assert store.read("k") is None
    path.write_bytes(whole)
    path.rename(store.folder / "other.island")
    assert store.read("other") is None and store.read("k") is None


def test_the_least_used_go_first(tmp_path: Path) -> None:
    """EX1: the folder does not grow for ever; a file that cannot be kept is no error."""
    store = cache.Store(tmp_path, most_nbytes=3000)
    for i, name in enumerate("abcd"):
        store.write(name, {}, [bytes(900)])
        os.utime(tmp_path / f"{name}.island", ns=(i, i))
    store.read("b")
    store.write("e", {}, [bytes(900)])
    assert {p.stem for p in tmp_path.iterdir()} == {"b", "d", "e"}
    (tmp_path / "file").write_bytes(b"")
    cache.Store(tmp_path / "file").write("k", {}, [])
    assert cache.Store(tmp_path / "file").read("k") is None


WRITER = """
    import sys
    from pathlib import Path
    from headrace.export.cache import Store
    store, wrong = Store(Path(sys.argv[1])), 0
    for i in range(150):
        store.write(f"k{i % 3}", {"of": i % 3}, [bytes([i % 3]) * 5000])
        found = store.read(f"k{(i + 1) % 3}")
        wrong += found is not None and found != ({"of": (i + 1) % 3}, [bytes([(i + 1) % 3]) * 5000])
    print(wrong)
"""


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """EX1: three that write and read the same names at once see whole islands alone, and leave nothing behind."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run_python(WRITER, tmp_path), range(3)))
    assert [d.stdout.strip() for d in done] == ["0"] * 3, done[0].stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k0.island", "k1.island", "k2.island"]
