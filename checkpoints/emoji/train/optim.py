"""Do the update: Muon for the matrices inside blocks, AdamW for everything else, one learning rate for both.

**Source** Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), with the update scaled to the
size of an AdamW step (Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982, section 2.2). Matrices of one
shape are orthogonalised in one batch: at these widths a step is bound by launches, not by arithmetic.

M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Muon", "orthogonalised", "split"]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_ROUNDS = 5
OUTER = ("embed", "head", "norm_out", "query", "encoder", "decoder")  # inputs, outputs and convolutions are AdamW's


def split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters for Muon and those for AdamW."""
    muon: list[nn.Parameter] = []
    adam: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        inner = parameter.ndim == 2 and not any(word in name for word in OUTER)
        (muon if inner else adam).append(parameter)
    return muon, adam


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                update_MRC = orthogonalised(self._momentum(parameters, group["momentum"]))
                size = 0.2 * max(shape) ** 0.5
                torch._foreach_add_(parameters, list(update_MRC.unbind()), alpha=-group["lr"] * size)

    def _momentum(self, parameters: list[Tensor], momentum: float) -> Tensor:
        """Fold the gradients into their running mean and return Nesterov's look ahead, [M,R,C]."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means = [self.state[parameter].setdefault("mean", torch.zeros_like(parameter)) for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        return torch.lerp(torch.stack(gradients), torch.stack(means), momentum)


def orthogonalised(x_MRC: Tensor) -> Tensor:
    """Return the nearest matrices with all singular values near one, in float32."""
    tall = x_MRC.shape[-2] > x_MRC.shape[-1]
    x = (x_MRC.mT if tall else x_MRC).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    nearest: Tensor = (x.mT if tall else x).float()
    return nearest
