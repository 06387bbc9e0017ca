"""Do the training of one stage: owns the parameters, their running average, the optimizers, and where it stands.

A run that was stopped goes on from its last saved state. Randomness is a generator seeded by the step, so that it goes on
as if it had never stopped.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoints.emoji.train.optim import Muon, split
from checkpoints.emoji.train.recipe import StagePlan
from checkpoints.emoji.train.sheets import save_curve

__all__ = ["Loss", "initialise", "train"]

Loss = Callable[[torch.Generator], Tensor]
REPORT_EVERY = 100
MAX_NORM = 1.0


class _Run:
    def __init__(self, module: nn.Module, plan: StagePlan, stem: Path) -> None:
        self.module, self.plan, self.stem = module, plan, stem
        self.average = copy.deepcopy(module).requires_grad_(False)
        muon, adam = split(module)
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(adam, plan.lr, (0.9, 0.98), weight_decay=0.0)]
        self.optimizers += [Muon(muon, plan.lr)] if muon else []
        self.step = 0
        self.curve: list[tuple[int, float]] = []

    def advance(self, loss_of: Loss, device: str) -> Tensor:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = _rate(self.step, self.plan)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(torch.Generator(device).manual_seed(self.step))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        weight = 1 - min(self.plan.ema, self.step / (self.step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.module.parameters()), weight)
        return loss.detach()

    def save(self) -> None:
        state = {"step": self.step, "curve": self.curve, "module": self.module.state_dict(),
                 "average": self.average.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}  # fmt: skip
        torch.save(state, self._path())
        save_curve(self.curve, self.stem.with_suffix(".curve.png"))

    def resume(self) -> None:
        if not self._path().exists():
            return
        state = torch.load(self._path(), weights_only=True)
        self.step, self.curve = state["step"], [tuple(point) for point in state["curve"]]
        self.module.load_state_dict(state["module"])
        self.average.load_state_dict(state["average"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)

    def _path(self) -> Path:
        return self.stem.with_suffix(".state.pt")


def train(module: nn.Module, loss_of: Loss, plan: StagePlan, stem: Path, device: str) -> nn.Module:
    """Train `module` in place for `plan.steps` steps and return the running average of its parameters.

    `loss_of` gets the step's generator. `stem`.state.pt is where the run stands, `stem`.curve.png its loss.
    """
    run = _Run(module, plan, stem)
    run.resume()
    began_s, began_step = time.monotonic(), run.step
    total = torch.zeros((), device=device)
    while run.step < plan.steps:
        total += run.advance(loss_of, device)
        if run.step % REPORT_EVERY == 0 or run.step == plan.steps:
            num = (run.step - 1) % REPORT_EVERY + 1
            run.curve.append((run.step, float(total) / num))
            total.zero_()
            if run.step % (10 * REPORT_EVERY) == 0 or run.step == plan.steps:
                rate = (run.step - began_step) / (time.monotonic() - began_s)
                print(f"{stem.name} {run.step}/{plan.steps} loss {run.curve[-1][1]:.4f} {rate:.1f} steps/s", flush=True)
        if run.step % plan.save_every == 0 or run.step == plan.steps:
            run.save()
    return run.average


def initialise(module: nn.Module, seed: int) -> None:
    """Draw the weights of a module built on the meta device, on the CPU; modulation and output start at zero."""
    module.to_empty(device="cpu").requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = parameter.data
        if values.ndim == 1:
            values.fill_(0.0 if name.endswith("bias") else 1.0)
        elif "norm1.linear" in name or "norm_out" in name or name == "lm_head.weight":
            values.zero_()
        elif "embed_tokens" in name or name.endswith("query"):
            values.normal_(0, 0.1, generator=generator)
        else:
            values.normal_(0, values.shape[-1] ** -0.5, generator=generator)


def _rate(step: int, plan: StagePlan) -> float:
    rising = (step + 1) / plan.warm_up
    falling = (plan.steps - step) / max(1, plan.steps * plan.decay)
    return plan.lr * min(1.0, rising, falling)
