"""Small modules with parts, and what a pass of them shows, for tests of rows by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verify.onpolicy.live.capturing import Capture, Seen

PLACES = torch.tensor([[0, 1, 2]])
X = torch.arange(1.0, 7.0).reshape(1, 3, 2)


class Inner(nn.Module):
    """Its own code runs between its two parts."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.one, self.two, self.shift = nn.Identity(), nn.Identity(), shift

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).clone()
        x[:, 1] += self.shift
        return self.two(x)


class Outer(nn.Module):
    """A leaf, a module with parts, a leaf."""

    def __init__(self, shift: float = 0.0, gain: float = 1.0) -> None:
        super().__init__()
        self.first, self.middle, self.last = Scaled(gain), Inner(shift), Scaled(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Scaled(nn.Module):
    """A leaf."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def seen(model: nn.Module, x: Tensor, where: Tensor = PLACES, largest: int = 1 << 20) -> Seen:
    capture = Capture(model, largest)
    with capture.listening():
        capture.begin(where)
        model(x)
    return capture.taken()


class Sometimes(nn.Module):
    """One part is called for each row that begins with an odd number."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.after = Inner(0.0), Scaled(1.0)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int((x[0, :, 0] % 2).sum())):
            self.part(x)
        return self.after(x)
