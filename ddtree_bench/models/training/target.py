"""Training of the target: next-token loss on windows of real code, for a given number of seconds.

Shapes: B rows, L window length, T = B · L packed tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from ddtree_bench.models.layers import VocabParallelEmbedding
from ddtree_bench.models.qwen3 import Qwen3Config, Qwen3Model
from ddtree_bench.models.training.common import (
    Log,
    Machine,
    Times,
    Windows,
    causal_attend,
    every,
    initialise,
    layer_step,
    load_state,
    save_state,
)
from ddtree_bench.models.training.optimiser import Budget, MuonAdamW, rate_scale
from ddtree_bench.models.training.settings import EOS_ID, Settings, Workdir
from ddtree_bench.models.weights import load_target, save_target

LOG_EVERY = 100
VALIDATE_EVERY_S = 60.0
CLIP_NORM = 1.0
VALIDATION_ROWS = 64


def target_config(settings: Settings) -> Qwen3Config:
    """Return the target's sizes."""
    return Qwen3Config(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=settings.head_dim,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=True,
    )


def export_target(model: Qwen3Model, workdir: Workdir) -> None:
    """Write the target in bfloat16 with the ids that a server reads from config.json."""
    save_target(model, workdir.target, extra_config={"bos_token_id": None, "eos_token_id": EOS_ID})


def head_loss(norm: nn.Module, head: VocabParallelEmbedding, x_TD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss, in float32."""
    return functional.cross_entropy(head.local_logits(norm(x_TD)).float(), labels_T)


class TargetLoss:
    """The target's loss on whole windows: layers and head are compiled as two regions."""

    def __init__(self, model: Qwen3Model, machine: Machine) -> None:
        self.model = model
        self.machine = machine
        self.layer: Callable[..., torch.Tensor] = machine.compile(layer_step)
        self.head: Callable[..., torch.Tensor] = machine.compile(head_loss)

    def __call__(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        batch, length = tokens_BL.shape[0], tokens_BL.shape[1] - 1
        positions_T = torch.arange(length, device=tokens_BL.device).repeat(batch)
        attend = causal_attend(batch, length)
        with self.machine.autocast():
            x_TD = self.model.embed(tokens_BL[:, :-1].reshape(-1)).to(self.machine.activation_dtype)
            rotary = self.model.rotary(positions_T)
            for layer in self.model.layers:
                x_TD = self.layer(layer, x_TD, rotary, attend)
            return self.head(self.model.norm, self.model.lm_head, x_TD, tokens_BL[:, 1:].reshape(-1))


def train_target(workdir: Workdir, settings: Settings, machine: Machine, times: Times) -> None:
    """Train until the time budget is used, from the state file if there is one, and export the result."""
    with torch.device("meta"):
        model = Qwen3Model(target_config(settings))
    initialise(model, settings.num_layers, seed=1)
    model.to(machine.device)
    optimiser = MuonAdamW(model, learning_rate=settings.target_learning_rate)
    step, num_tokens, used_s = 0, 0, 0.0
    state = load_state(workdir.state("target"), machine.device)
    if state is None and times.continue_exported:
        model.load_state_dict(load_target(workdir.target, device=machine.device).state_dict())
    if state is not None:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step, num_tokens, used_s = state["step"], state["num_tokens"], state["used_s"]
    budget = Budget(times.seconds, used_s)
    loss_of = TargetLoss(model, machine)
    train, validation = (Windows(workdir.tokens(split), machine.device) for split in ("train", "validation"))
    log = Log("target", workdir.log("target"))
    is_checkpoint_due, is_validation_due = every(times.checkpoint_s), every(VALIDATE_EVERY_S)
    generator = torch.Generator(machine.device)

    def save() -> None:
        whole = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
        save_state(workdir.state("target"), {**whole, "step": step, "num_tokens": num_tokens, "used_s": budget.used_s})
        export_target(model, workdir)

    mark_s, mark_tokens = time.monotonic(), num_tokens
    while budget.fraction < 1.0:
        is_long = budget.fraction >= 1.0 - settings.long_share
        length = settings.long_sequence_length if is_long else settings.sequence_length
        tokens_BL = train.sample(settings.batch_tokens // length, length + 1, generator.manual_seed(1_000_003 + step))
        loss = loss_of(tokens_BL)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimiser.step(rate_scale(step, budget.fraction))
        step += 1
        num_tokens += tokens_BL.shape[0] * length
        if step in (1, 2, 5, 20) or step % LOG_EVERY == 0:
            loss_value = loss.item()
            now_s = time.monotonic()
            tok_s = (num_tokens - mark_tokens) / (now_s - mark_s)
            mark_s, mark_tokens = now_s, num_tokens
            log.write(
                step=step, tokens_m=num_tokens / 1e6, loss=loss_value, grad=norm.item(), length=length,
                tok_s=tok_s, used_s=budget.used_s,
            )  # fmt: skip
        if next(is_validation_due):
            log.write(step=step, validation_loss=validation_loss(loss_of, validation, settings))
        if next(is_checkpoint_due):
            save()
    save()
    log.write(step=step, tokens_m=num_tokens / 1e6, validation_loss=validation_loss(loss_of, validation, settings))


@torch.no_grad()
def validation_loss(loss_of: TargetLoss, windows: Windows, settings: Settings) -> float:
    """Return nats per token on fixed windows of held-out files; not compiled, so that no new shape is."""
    eager = TargetLoss(loss_of.model, Machine(loss_of.machine.device, use_compile=False))
    rows = max(1, min(VALIDATION_ROWS, settings.batch_tokens // settings.sequence_length))
    generator = torch.Generator(windows.tokens.device).manual_seed(7)
    return eager(windows.sample(rows, settings.sequence_length + 1, generator)).item()
