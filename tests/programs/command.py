"""What the tests of ``headrace export`` export. Needs torch, when called."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["make", "noisy", "wrong"]


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


def noisy() -> dict[str, Any]:
    """A model that prints; and when it is made, a folder comes to be where the picture was asked for."""
    import torch

    class Printing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("called")
            self.count.add_(1.0)
            return x + self.count

    print("made")
    os.mkdir(os.environ["HEADRACE_TEST_FOLDER"])
    return {**make(), "model": Printing().eval(), "example_inputs": (torch.randn(2),)}


def wrong() -> int:
    return 3
