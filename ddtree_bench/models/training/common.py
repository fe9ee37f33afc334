"""What the training loops share: initial weights, token windows, causal attention, state files, a log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ddtree_bench.models.layers import Attend, Rotary


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and how a stage runs."""

    device: torch.device
    use_compile: bool

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function compiled for fixed shapes, or as it is."""
        return torch.compile(function, dynamic=False) if self.use_compile else function

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the mixed-precision context: bfloat16 products on a GPU, plain float32 on a CPU."""
        is_cuda = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if is_cuda else contextlib.nullcontext()

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclasses.dataclass(frozen=True)
class Times:
    """How long a training stage runs, how often it saves, and whether exported weights are its start.

    Exported weights are what travels between machines: bfloat16, without the optimiser's state.
    """

    seconds: float
    checkpoint_s: float = 60.0
    continue_exported: bool = False


def initialise(module: nn.Module, num_layers: int, seed: int) -> None:
    """Fill a module made on the meta device: normal, projections back to the residual stream scaled down."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in list(module.named_parameters()):
        data = torch.ones(parameter.shape)
        if parameter.ndim == 2:
            is_back = "o_proj" in name or "down_proj" in name
            data.normal_(0.0, 0.02 / ((2 * num_layers) ** 0.5 if is_back else 1.0), generator=generator)
        owner = module.get_submodule(name.rpartition(".")[0])
        owner.weight = nn.Parameter(data)


def causal_attend(batch: int, length: int) -> Attend:
    """Return attention over `batch` packed sequences of equal length, each token seeing itself and earlier ones."""

    def attend(q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        num_heads, head_dim = q_THE.shape[1:]
        q, k, v = (x.view(batch, length, x.shape[1], head_dim).transpose(1, 2) for x in (q_THE, k_TGE, v_TGE))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != num_heads)
        return o.transpose(1, 2).reshape(batch * length, num_heads, head_dim)

    return attend


def layer_step(layer: nn.Module, x_TD: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
    """Run one layer: the region that is compiled once and used for every layer."""
    return layer(x_TD, rotary, attend)


class Windows:
    """Random windows of a flat token file, kept on the device."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.tokens = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)

    def sample(self, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Return tokens_BL, int64."""
        if len(self.tokens) <= length:
            raise ValueError(f"a split must hold more than {length} tokens; it holds {len(self.tokens)}; gather more text")
        device = self.tokens.device
        starts = torch.randint(len(self.tokens) - length, (rows, 1), generator=generator, device=device)
        return self.tokens[starts + torch.arange(length, device=device)].long()


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Replace a stage's state file as one step, so that an interrupted write loses nothing."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def load_state(path: Path, device: torch.device) -> dict[str, Any] | None:
    """Return a stage's state, None at its first start."""
    return torch.load(path, map_location=device, weights_only=True) if path.exists() else None


class Log:
    """Prints a line and appends it to the stage's file."""

    def __init__(self, stage: str, path: Path) -> None:
        self.stage = stage
        self.path = path
        self.start_s = time.monotonic()

    def write(self, **values: float | int | str) -> None:
        row = {"wall_s": round(time.monotonic() - self.start_s, 2), **values}
        with self.path.open("a") as handle:
            handle.write(json.dumps(row) + "\n")
        shown = "  ".join(f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
        print(f"{self.stage}: {shown}", flush=True)


def every(seconds: float) -> Iterator[bool]:
    """Yield True whenever `seconds` have passed since the last True."""
    last_s = time.monotonic()
    while True:
        is_due = time.monotonic() - last_s >= seconds
        if is_due:
            last_s = time.monotonic()
        yield is_due
