"""OP3: what messages consist of, read from the sources that raise them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import errors

SOURCE = Path(__file__).parents[2] / "src/headrace"
# Whose message is put together elsewhere, and says there what to do: by file and function.
ELSEWHERE = {
    "aoti.py: read": "it puts a place before the words of another ProgramError",
    "pte/tensorrt.py: islands": "it puts a place before the words of another ProgramError",
    "audit/policy.py: _changed": "it puts a place before the words of a RowError",
    "delegate/tensorrt.py: _enqueue": "_why_not() ends with the likely cause and what to do about it",
    "export/child.py: in_child": "it is the message of an ExportError that the child raised",
    "export/program.py: _exported": "_useful_first() says it behind the first line of PyTorch's words",
    "ordering/__init__.py: check": "each conflict ends with the wait that would order it",
}
# Files whose messages are never seen alone.
DETAILS = {"audit/elf.py": "they are the details of a finding, whose rule in policy.toml says what to do"}


def words(node: ast.expr) -> str:
    """What a message says whatever comes into it; "…" for the rest."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return "…"


def says_what_to_do(message: str) -> bool:
    """A part behind a semicolon, or a second sentence: where, what was expected and what came stand before it."""
    before, mark, after = message.partition("; " if "; " in message else ". ")
    return bool(mark) and bool(before.strip()) and bool(after.strip(" …") or after.endswith("…"))


def messages(text: str) -> Iterator[tuple[str, str]]:
    """(function, message) of every public error that is made."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in errors.__all__:
                yield function, words(node.args[0])
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    yield from walk(ast.parse(text), "")


def test_every_message_says_what_to_do() -> None:
    """OP3: where, what was expected, what came, and what to do, in every message."""
    seen = 0
    silent: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if place.as_posix() in DETAILS:
            continue
        for function, message in messages(path.read_text()):
            seen += 1
            if not says_what_to_do(message):
                silent.setdefault(f"{place.as_posix()}: {function}", []).append(message)
    assert seen > 100
    assert {where: text for where, text in silent.items() if where not in ELSEWHERE} == {}
    # One that is silent no longer, or more often than was looked at, is no exception.
    assert {where: len(text) for where, text in silent.items()} == dict.fromkeys(ELSEWHERE, 1)
    assert all((SOURCE / name).is_file() for name in DETAILS)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise InputError(f'x: expected a bool, got {x}; pass True or False')", True),
        ("raise InputError(f'x: expected a bool, got {x}. Pass one.')", True),
        ("raise InputError('x: expected a bool, ' + f'got {x}; {ADVICE}')", True),
        ("raise errors.DeviceError(f'x: expected a bool, got {x}', device='sim')", False),
        ("error = OptionError(f'x: expected 1.5, got {x}')", False),
        ("raise OptionError(f'x: expected one, got {x}; ')", False),
        ("raise AuditError(text)", False),
    ],
)
def test_a_message_without_what_to_do_is_seen(source: str, says: bool) -> None:
    """OP3: the check above, on messages with and without."""
    ((_, message),) = messages(source)
    assert says_what_to_do(message) is says


def test_what_no_user_is_told_is_not_looked_at() -> None:
    """OP3: exceptions that are no public ones have no such form."""
    assert list(messages("raise ValueError('planted')\nraise InputError\nraise found")) == []
