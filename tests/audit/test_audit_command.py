"""PK5, PK6: the command and the policy file: what is printed, and by which exit code."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.audit import audit, command, default_policy, load_policy
from headrace.audit.report import Report
from headrace.errors import AuditError
from tests.audit.wheel_faults import RUNTIME12, cuda12
from tests.audit.wheel_forge import Entry, Forge, Wheel, fatbin

Audited = Callable[[Wheel], Report]
REPOSITORY = Path(__file__).parents[2]


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def good(forge: Forge, tmp_path: Path) -> Path:
    return forge.wheel(Wheel({"pkg/_c.so": cuda12(forge)}, requires=[RUNTIME12]), tmp_path)


@pytest.fixture
def bad(forge: Forge, tmp_path: Path) -> Path:
    return forge.wheel(Wheel({"bad/_c.so": cuda12(forge, "")}, name="bad"), tmp_path)


def test_exit_codes_tell_clean_problems_and_unusable_apart(
    good: Path, bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PK5."""
    assert run(good) == 0
    assert run(bad) == 1
    assert run(good, bad) == 1
    capsys.readouterr()
    assert run("no-such-thing") == 2
    assert run(bad, "no-such-thing") == 2
    assert run() == 2
    told = capsys.readouterr()
    assert "no-such-thing" in told.err
    assert "PATH or --row" in told.err
    assert "component-undeclared" in told.out


def test_text_says_what_why_and_how_to_mend_it(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PK5."""
    run(bad)
    text = capsys.readouterr().out
    rule = default_policy().rules["component-undeclared"]
    for part in (
        "bad/_c.so: needs libcudart.so.12",
        rule.title,
        rule.reason,
        rule.fix,
        "looked at 1 ELF files",
    ):
        assert part in text
    assert "rules that had nothing to look at: " in text


def test_json_carries_a_version_and_all_that_was_found(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PK5."""
    run(bad, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 1
    (report,) = told["reports"]
    assert (report["ok"], report["distribution"]) == (False, {"name": "bad", "version": "1.0"})
    assert report["problems"][0]["rule"] == "component-undeclared"
    assert report["problems"][0]["subject"] == "libcudart.so.12"
    assert report["libraries"][0]["needed"] == ["libcudart.so.12"]
    assert set(report["looked_at"]) == set(default_policy().rules)


def test_annotations_are_one_workflow_command_a_finding(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PK5."""
    assert run(bad, "--annotations") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(r"::(error|notice) title=[^:,]+::.+%0Awhy: .+%0Afix: .+", line)


def test_row_alone_prints_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    """PK6."""
    assert run("--row", "cu130", "--toolkit", "13.0") == 0
    assert "HEADRACE_CUDA=ON\n" in capsys.readouterr().out
    assert run("--row", "rocm13.2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["row"]["kind"] == "rocm"
    assert run("--row", "") == 0
    assert "HEADRACE_ROW_KIND=cpu\n" in capsys.readouterr().out
    for refused in (["--row", "cu118"], ["--row", "cu130", "--toolkit", "12.6"]):
        assert run(*refused) == 1
        told = capsys.readouterr()
        assert told.out == ""
        assert "headrace audit: row cu1" in told.err


def test_row_with_a_wheel_is_held_against_its_content(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PK5, PK6: the classifier that the build used judges the package."""
    assert run(good, "--row", "cu126") == 0
    for row, rule in {
        "cu130": "cuda-tag-wrong-major",
        "cpu": "cpu-tag-with-cuda",
        "": "cpu-tag-with-cuda",
    }.items():
        assert run(good, "--row", row) == 1
        assert f"[{rule}]" in capsys.readouterr().out
    assert run(good, "--row", "cu118") == 1
    assert "unsupported" in capsys.readouterr().err


def test_architectures_can_be_declared_by_option(
    forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PK5."""
    code = fatbin(Entry("sass", 90), Entry("ptx", 90))
    path = forge.wheel(Wheel({"pkg/_c.so": forge.shared("int entry;", code=code)}), tmp_path)
    assert run(path, "--arch", "sm_90", "--arch", "compute_90") == 0
    assert run(path, "--arch", "sm_90") == 1
    assert "gpu-arch-undeclared" in capsys.readouterr().out
    assert run(path, "--arch", "90") == 2
    assert "sm_NN" in capsys.readouterr().err


def test_rules_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """PK5."""
    assert run("--rules") == 0
    text = capsys.readouterr().out
    assert all(f"{rule.id} ({rule.level}): {rule.title}" in text for rule in default_policy().rules.values())
    assert run("--rules", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["rules"]) == len(default_policy().rules)


# The policy file.


def policy(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def test_an_allowance_accepts_what_it_covers_and_is_told_when_unused(bad: Path, tmp_path: Path) -> None:
    """PK5: with a reason, by rule, path and subject."""
    allow = "[[allow]]\nrule = 'component-undeclared'\npath = 'bad/*'\nsubject = 'libcudart*'\n"
    allow += "reason = 'by hand'\n"
    report = audit(bad, policy=policy(tmp_path, allow))
    assert report.ok
    assert [(f.rule, allowance.reason) for f, allowance in report.allowed] == [
        ("component-undeclared", "by hand")
    ]
    assert "because: by hand" in report.text()
    elsewhere = audit(bad, policy=policy(tmp_path, allow.replace("bad/*", "other/*")))
    assert not elsewhere.ok
    assert len(elsewhere.unused_allowances) == 1
    assert "unused allowance" in elsewhere.text()


def test_a_level_can_be_changed(good: Path, bad: Path, tmp_path: Path) -> None:
    """PK5: what is advice to most can be a problem to one."""
    lower = audit(bad, policy=policy(tmp_path, "level.component-undeclared = 'advice'"))
    assert lower.ok
    assert lower.advice


def test_platform_libraries_can_be_added(forge: Forge, tmp_path: Path) -> None:
    """PK5."""
    other = forge.stub("libcompany.so.1", "other")
    library = forge.shared("extern int other(void); int entry(void) { return other(); }", links=[other])
    path = forge.wheel(Wheel({"pkg/_c.so": library}), tmp_path)
    assert not audit(path).ok
    assert audit(path, policy=policy(tmp_path, "platform.libraries = ['libcompany.so.1']")).ok


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("allow = 3", "expected list"),
        ("[[allow]]\nrule = 'build-path'", "'reason'"),
        ("[[allow]]\nrule = 'build-path'\nreason = ' '", "'reason'"),
        ("[[allow]]\nrule = 'no-such-rule'\nreason = 'x'", "a rule's id"),
        ("[[allow]]\nrule = 'build-path'\nreason = 'x'\nwhere = 'y'", "unknown key where"),
        ("[[require]]\nlibrary = 'x'\nsymbols = 'shim'", "expected list"),
        ("[[require]]\nlibrary = 'x'\nsymbols = [1]", "list of strings"),
        ("[[require]]\nsymbols = ['shim']", "'library'"),
        ("architectures = ['90']", "sm_NN"),
        ("row = 'cu118'", "unsupported"),
        ("row = 3", "expected str"),
        ("level.build-path = 'off'", "problem or advice"),
        ("cuda.headers = ['(']", "regular expression"),
        ("rules = []", "unknown key rules"),
        ("= 3", "TOML"),
    ],
)
def test_a_policy_at_fault_is_refused(text: str, fault: str, tmp_path: Path) -> None:
    """PK5: a misspelt policy is not a lenient one."""
    with pytest.raises(AuditError, match=fault):
        load_policy(policy(tmp_path, text))


def test_a_policy_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """PK5."""
    with pytest.raises(AuditError, match="TOML file"):
        load_policy(tmp_path / "none.toml")


def test_the_documentation_has_the_rules_as_they_are() -> None:
    """PK5: every rule with its level, reason and fix."""
    text = (REPOSITORY / "docs" / "audit.md").read_text(encoding="utf-8")
    for rule in default_policy().rules.values():
        assert f"### {rule.id}" in text
        assert f"*{rule.level}*: {rule.title}. {rule.reason}" in text, rule.id
        assert f"Fix: {rule.fix}" in text, rule.id
    assert text.count("\n### ") == len(default_policy().rules)
