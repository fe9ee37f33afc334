"""Muon for matrices, AdamW for the rest, and a learning rate that follows the time budget.

Muon (Jordan et al. 2024): momentum, made orthogonal by a Newton-Schulz iteration; scaled to AdamW's usual step size
as in arXiv 2502.16982, so that one learning rate serves both. Matrices of one shape are stacked and orthogonalised
together: a model of a few million parameters would otherwise spend its time on launches.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
FUSED_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}


def orthogonalise(g_NRC: torch.Tensor) -> torch.Tensor:
    """Return, for each of N matrices, nearly U Vᵀ of its singular value decomposition; bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = g_NRC.shape[-2] > g_NRC.shape[-1]
    x = g_NRC.bfloat16()
    x = x.mT if is_tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class MuonAdamW:
    """Both optimisers over one module's parameters.

    Fused projections are taken apart first, when their parts have equal sizes.
    """

    def __init__(self, module: nn.Module, *, learning_rate: float, weight_decay: float = 0.1) -> None:
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.matrices: dict[tuple[int, int], list[tuple[nn.Parameter, int]]] = defaultdict(list)
        others = []
        for name, parameter in module.named_parameters():
            if parameter.ndim != 2 or "embed" in name or "lm_head" in name:
                others.append(parameter)
                continue
            parts = FUSED_PARTS.get(name.split(".")[-2], 1)
            parts = parts if parameter.shape[0] % parts == 0 else 1
            self.matrices[(parameter.shape[0] // parts, parameter.shape[1])].append((parameter, parts))
        is_cuda = all(parameter.is_cuda for parameter in module.parameters())
        self.adamw = torch.optim.AdamW(
            others, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=is_cuda or None
        )
        self.momenta = {
            shape: torch.zeros(sum(parts for _, parts in group), *shape, device=group[0][0].device)
            for shape, group in self.matrices.items()
        }

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update all parameters with `scale` times the learning rate, and clear their gradients."""
        rate = self.learning_rate * scale
        for shape, group in self.matrices.items():
            gradients = [gradient.view(parts, *shape) for p, parts in group if (gradient := p.grad) is not None]
            g_NRC = torch.cat(gradients).float()
            momentum_NRC = self.momenta[shape]
            momentum_NRC.lerp_(g_NRC, 0.05)
            update_NRC = orthogonalise(g_NRC.lerp(momentum_NRC, 0.95)).float()
            size = 0.2 * math.sqrt(max(shape)) * rate
            updates = update_NRC.split([parts for _, parts in group])
            parameters: list[torch.Tensor] = [parameter for parameter, _ in group]
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
            torch._foreach_add_(parameters, [u.reshape(p.shape) for u, p in zip(updates, parameters, strict=True)], alpha=-size)
            for parameter in parameters:
                parameter.grad = None
        for settings in self.adamw.param_groups:
            settings["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "momenta": self.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for shape, momentum_NRC in state["momenta"].items():
            self.momenta[shape].copy_(momentum_NRC)


class Budget:
    """Wall-clock seconds of a stage: used before (kept in its checkpoint) and since this object was made."""

    def __init__(self, seconds: float, used_s: float = 0.0) -> None:
        self.seconds = seconds
        self.used_before_s = used_s
        self.start_s = time.monotonic()

    @property
    def used_s(self) -> float:
        return self.used_before_s + time.monotonic() - self.start_s

    @property
    def fraction(self) -> float:
        return min(1.0, self.used_s / self.seconds)


def rate_scale(step: int, fraction: float, warm_up_steps: int = 100) -> float:
    """Return the learning rate's scale: up over the first steps, and linearly down to zero over the budget."""
    return min(1.0, (step + 1) / warm_up_steps) * (1.0 - fraction)
