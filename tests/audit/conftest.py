from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.audit import audit
from headrace.audit.report import Report
from tests.audit.wheel_forge import Forge, Wheel


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    return Forge(tmp_path_factory.mktemp("forge"))


@pytest.fixture
def audited(forge: Forge, tmp_path: Path) -> Callable[[Wheel], Report]:
    """Packs a wheel of the corpus and audits it under its own policy."""

    def run(wheel: Wheel) -> Report:
        policy = None
        if wheel.policy:
            policy = tmp_path / "policy.toml"
            policy.write_text(wheel.policy)
        return audit(forge.wheel(wheel, tmp_path), policy=policy)

    return run
