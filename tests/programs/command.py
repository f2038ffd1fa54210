"""What the tests of ``headrace export`` export. Needs torch, when called."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["make", "wrong"]


def make() -> dict[str, Any]:
    import torch

    from headrace.export import Verify

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), torch.nn.Tanh()
    )
    return {
        "model": model.eval(),
        "example_inputs": (torch.randn(2, 8),),
        "verify": Verify(python=os.environ["HEADRACE_TEST_PYTHON"]),
    }


def wrong() -> int:
    return 3
