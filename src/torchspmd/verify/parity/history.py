"""How much an updated parameter may differ, given how sure its gradients are.

An optimizer such as Adam divides by the size of the gradient: where a gradient is zero but
for rounding (a bias before a norm, a key's bias), its step has full size and any sign.
The relative error of a step is at most that of its gradient, so each element is allowed
the size of the updates so far times the relative error of its gradient.
"""

from dataclasses import dataclass, field

import torch

from torchspmd.verify.parity.match import largest


@dataclass(slots=True)
class History:
    """What is known of each parameter from the steps before."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    doubt: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    def note_gradient(self, name: str, gradient: torch.Tensor, noise: float) -> None:
        """Remember the relative error of each element of a gradient, at most 1."""
        size = gradient.double().abs()
        doubt = torch.where(size > 0, noise / size, 0.0).clamp(max=1.0)
        known = self.doubt.get(name)
        if known is not None and known.shape == doubt.shape:
            doubt = torch.maximum(known, doubt)
        self.doubt[name] = doubt

    def note_found(
        self, name: str, gradient: torch.Tensor, found: torch.Tensor
    ) -> None:
        """Doubt a zero that the parallel run does not have: it is rounding there."""
        doubt = self.doubt.get(name)
        if doubt is not None and doubt.shape == found.shape:
            doubt[(gradient == 0) & (found != 0)] = 1.0

    def note_value(self, name: str, value: torch.Tensor) -> None:
        """Remember a parameter's value after a step, and how far it moved."""
        before = self.values.get(name)
        if before is not None and before.shape == value.shape and value.numel():
            step = largest(value.double() - before.double())
            self.moved[name] = self.moved.get(name, 0.0) + step
        self.values[name] = value

    def allowance(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """What each element may differ on top of rounding; twice, for a change of sign.

        Where the gradient is nothing but rounding, its step may have any size that steps
        have at all.
        """
        doubt = self.doubt.get(name)
        if doubt is None or doubt.shape != like.shape:
            return torch.zeros((), dtype=torch.float64)
        own, any_step = self.moved.get(name, 0.0), max(self.moved.values(), default=0.0)
        return 2 * torch.where(doubt < 1, own * doubt, any_step)
