"""Train a small network on scikit-learn's handwritten digits. Needs torch and scikit-learn.

::

    python -m examples.digits.train       # half a minute; writes build/digits/weights.pt and digits.npz here

1797 images of 8 x 8 pixels with values from 0 to 16; a fifth is held out, the same fifth each time, and
goes into ``digits.npz`` for the demo.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE.parent.parent / "build" / "digits" / "weights.pt"
HELD_OUT = HERE / "digits.npz"
SEED = 20
LEAST_ACCURACY = 0.96


class Network(torch.nn.Module):
    """Images as float32[n, 1, 8, 8] in any brightness to log-probabilities, float32[n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.second = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = torch.nn.Linear(32 * 4 * 4, 64)
        self.last = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(images, (8, 8))
        x = torch.relu(self.first(x))
        x = F.max_pool2d(torch.relu(self.second(x)), 2)
        x = torch.relu(self.hidden(x.flatten(1)))
        return F.log_softmax(self.last(x), dim=-1)


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, held-out images and labels; images as uint8[n, 8, 8]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    order = np.random.default_rng(SEED).permutation(len(images))
    held, trained = order[: len(order) // 5], order[len(order) // 5 :]
    return images[trained], labels[trained], images[held], labels[held]


def accuracy(network: Network, images: np.ndarray, labels: np.ndarray) -> float:
    with torch.no_grad():
        found = network(torch.from_numpy(images).float().unsqueeze(1)).argmax(dim=-1)
    return float((found.numpy() == labels).mean())


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    images, labels, held_images, held_labels = data()
    x, y = torch.from_numpy(images).float().unsqueeze(1), torch.from_numpy(labels).long()
    network = Network()
    epochs, batch = 30, 32
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            F.nll_loss(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
        schedule.step()
    network.eval()
    reached = accuracy(network, held_images, held_labels)
    print(f"accuracy on {len(held_labels)} held-out images: {reached:.2%}")
    if reached < LEAST_ACCURACY:
        raise SystemExit(
            f"examples/digits: expected an accuracy of {LEAST_ACCURACY:.0%} or more, got {reached:.2%}"
        )
    WEIGHTS.parent.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), WEIGHTS)
    np.savez_compressed(HELD_OUT, images=held_images, labels=held_labels)


if __name__ == "__main__":
    main()
