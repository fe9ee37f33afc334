"""Training of the drafter: at random roots, predict the target's own distribution in every slot of a block.

    loss = Σ_d w_d · H(p_target(· | actual tokens before slot d), q_d),   w_d = exp(−(d − 1) / γ)

The target's labels are taken at the temperature at which the sequence was decoded, so that the mixture the drafter
learns is the one of the tokens that serving will meet. Real code first, then mostly the target's own text.

Shapes: B sequences, L their length, A blocks of a sequence, J slots, N = B · A · (J − 1) predictions,
T packed tokens, D hidden size, C features, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
from torch import nn

from ddtree_bench.models.dflash import DFlashConfig, DFlashModel
from ddtree_bench.models.layers import VocabParallelEmbedding
from ddtree_bench.models.qwen3 import Qwen3Model
from ddtree_bench.models.training.block_attention import block_attend
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
from ddtree_bench.models.training.generate import load_for
from ddtree_bench.models.training.optimiser import Budget, MuonAdamW, rate_scale
from ddtree_bench.models.training.settings import MASK_ID, Settings, Workdir
from ddtree_bench.models.training.target import CLIP_NORM
from ddtree_bench.models.weights import load_drafter, save_drafter

GAMMA = 7.0
SIZE_SHARES = {16: 0.5, 12: 0.15, 8: 0.25, 4: 0.1}
GREEDY_LABEL_TEMPERATURE = 0.1
LATER_REAL_EVERY = 10
MIN_CONTEXT = 16
LOG_EVERY = 100


@dataclasses.dataclass(frozen=True)
class Sequences:
    """A batch to train on: tokens_BL, the temperature its labels are taken at, the first position of a root."""

    tokens_BL: torch.Tensor
    temperature_B: torch.Tensor
    first_root: int


class OwnText:
    """The generated batches, kept on the device."""

    def __init__(self, workdir: Workdir, device: torch.device) -> None:
        self.batches = []
        for path in sorted(workdir.generated.glob("batch-?????.npz")):
            stored = np.load(path)
            tokens_BL = torch.from_numpy(stored["tokens"].astype(np.int16)).to(device)
            temperature_B = torch.from_numpy(stored["temperature"]).to(device)
            self.batches.append(Sequences(tokens_BL, temperature_B, int(stored["prompt_length"])))
        if not self.batches:
            raise ValueError(f"generated text must exist in {workdir.generated}; it holds none; run stage generate")

    def sample(self, rows: int, step: int, generator: torch.Generator) -> Sequences:
        """Return random rows of one batch; steps take the batches in turn."""
        batch = self.batches[step % len(self.batches)]
        device = batch.tokens_BL.device
        chosen_B = torch.randint(len(batch.tokens_BL), (rows,), generator=generator, device=device)
        temperature_B = batch.temperature_B[chosen_B]
        temperature_B = torch.where(temperature_B == 0, GREEDY_LABEL_TEMPERATURE, temperature_B)
        return Sequences(batch.tokens_BL[chosen_B].long(), temperature_B, batch.first_root)


def drafter_config(settings: Settings, target: Qwen3Model) -> DFlashConfig:
    """Return the drafter's sizes: the target's layers, fewer of them."""
    return DFlashConfig(
        layers=dataclasses.replace(target.config, num_hidden_layers=settings.num_draft_layers),
        block_size=settings.block_size,
        mask_token_id=MASK_ID,
        target_layer_ids=settings.target_layer_ids,
        num_target_layers=target.config.num_hidden_layers,
    )


class TargetFeatures:
    """The frozen target over whole sequences."""

    def __init__(self, target: Qwen3Model, layer_ids: tuple[int, ...], machine: Machine) -> None:
        self.target = target
        self.layer_ids = layer_ids
        self.layer = machine.compile(layer_step)

    @torch.no_grad()
    def __call__(self, tokens_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden_TD after the final norm and features_TC."""
        batch, length = tokens_BL.shape
        attend = causal_attend(batch, length)
        x_TD = self.target.embed(tokens_BL.reshape(-1))
        rotary = self.target.rotary(torch.arange(length, device=tokens_BL.device).repeat(batch))
        captured = {}
        for index, layer in enumerate(self.target.layers):
            x_TD = captured[index] = self.layer(layer, x_TD, rotary, attend)
        return self.target.norm(x_TD), torch.cat([captured[index] for index in self.layer_ids], dim=-1)


def draft_hidden(
    drafter: DFlashModel,
    embedding: nn.Module,
    tokens_BL: torch.Tensor,
    features_TC: torch.Tensor,
    roots_BA: torch.Tensor,
    sizes_BA: torch.Tensor,
    num_slots: int,
) -> torch.Tensor:
    """Return hidden of every slot, [B, A, J, D], for blocks at the given roots."""
    batch, length = tokens_BL.shape
    device = tokens_BL.device
    context_TD = drafter.project_context(features_TC)
    context_kv = drafter.context_kv(context_TD, torch.arange(length, device=device).repeat(batch))
    slots_J = torch.arange(num_slots, device=device)
    root_tokens_BA = tokens_BL.gather(1, roots_BA)
    block_BAJ = torch.where(slots_J == 0, root_tokens_BA[..., None], drafter.config.mask_token_id)
    positions_T = (roots_BA[..., None] + slots_J).reshape(-1)
    attend = block_attend(context_kv, roots_BA, sizes_BA, length, num_slots)
    hidden_TD = drafter(embedding(block_BAJ.reshape(-1)), positions_T, attend)
    return hidden_TD.view(*roots_BA.shape, num_slots, -1)


def soft_label_loss(
    head: VocabParallelEmbedding,
    draft_ND: torch.Tensor,
    target_ND: torch.Tensor,
    temperature_N: torch.Tensor,
    weight_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted mean cross-entropy to the target's distribution, and where both argmaxes agree."""
    label_NV = head.local_logits(target_ND).float().div(temperature_N[:, None]).softmax(-1)
    logits_NV = head.local_logits(draft_ND).float()
    loss_N = logits_NV.logsumexp(-1) - (label_NV * logits_NV).sum(-1)
    agrees_N = logits_NV.argmax(-1) == label_NV.argmax(-1)
    return (loss_N * weight_N).sum() / weight_N.sum(), agrees_N


class DrafterLoss:
    """Draws roots and block sizes, and scores the drafter there."""

    def __init__(self, target: Qwen3Model, drafter: DFlashModel, settings: Settings, machine: Machine) -> None:
        self.target, self.drafter, self.settings, self.machine = target, drafter, settings, machine
        self.features = TargetFeatures(target, settings.target_layer_ids, machine)
        self.draft = machine.compile(draft_hidden)
        self.loss = machine.compile(soft_label_loss)
        shares = {size: share for size, share in SIZE_SHARES.items() if size <= settings.block_size}
        self.sizes = torch.tensor(list(shares), device=machine.device)
        self.shares = torch.tensor(list(shares.values()), device=machine.device)

    def __call__(self, batch: Sequences, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and top-1 agreement by depth."""
        tokens_BL, device = batch.tokens_BL, self.machine.device
        rows, length = tokens_BL.shape
        num_blocks, num_slots = self.settings.num_anchors, self.settings.block_size
        first = max(batch.first_root, MIN_CONTEXT)
        roots_BA = torch.randint(first, length - 2, (rows, num_blocks), generator=generator, device=device)
        drawn = torch.multinomial(self.shares, rows * num_blocks, replacement=True, generator=generator)
        sizes_BA = self.sizes[drawn].view(rows, num_blocks)
        hidden_TD, features_TC = self.features(tokens_BL)
        depths_J = torch.arange(1, num_slots, device=device)
        before_BAJ = roots_BA[..., None] + depths_J - 1
        is_used_BAJ = (before_BAJ < length) & (depths_J < sizes_BA[..., None])
        weight_BAJ = torch.exp(-(depths_J - 1) / GAMMA) * is_used_BAJ
        row_start_B11 = torch.arange(rows, device=device)[:, None, None] * length
        target_ND = hidden_TD[(before_BAJ.clamp(max=length - 1) + row_start_B11).reshape(-1)]
        temperature_N = batch.temperature_B[:, None, None].expand_as(weight_BAJ).reshape(-1)
        with self.machine.autocast():
            draft_BAJD = self.draft(self.drafter, self.target.embed_tokens, tokens_BL, features_TC, roots_BA, sizes_BA, num_slots)
            draft_ND = draft_BAJD[:, :, 1:].reshape(-1, draft_BAJD.shape[-1])
            loss, agrees_N = self.loss(self.target.lm_head, draft_ND, target_ND, temperature_N, weight_BAJ.reshape(-1))
        agrees_BAJ = agrees_N.view_as(weight_BAJ) & is_used_BAJ
        return loss, agrees_BAJ.sum((0, 1)) / is_used_BAJ.sum((0, 1)).clamp_min(1)


def train_drafter(workdir: Workdir, settings: Settings, machine: Machine, times: Times) -> None:
    """Train until the time budget is used, from the state file if there is one, and export the result."""
    target = load_for(machine, workdir)
    with torch.device("meta"):
        drafter = DFlashModel(drafter_config(settings, target))
    initialise(drafter, settings.num_draft_layers, seed=2)
    drafter.norm.weight.data.copy_(target.norm.weight)
    drafter.to(machine.device)
    optimiser = MuonAdamW(drafter, learning_rate=settings.drafter_learning_rate)
    step, num_roots, used_s = 0, 0, 0.0
    state = load_state(workdir.state("drafter"), machine.device)
    if state is None and times.continue_exported:
        drafter.load_state_dict(load_drafter(workdir.drafter, device=machine.device).state_dict())
    if state is not None:
        drafter.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step, num_roots, used_s = state["step"], state["num_roots"], state["used_s"]
    real, own = Windows(workdir.tokens("train"), machine.device), OwnText(workdir, machine.device)
    budget = Budget(times.seconds, used_s)
    loss_of = DrafterLoss(target, drafter, settings, machine)
    log = Log("drafter", workdir.log("drafter"))
    is_checkpoint_due = every(times.checkpoint_s)
    generator = torch.Generator(machine.device)

    def save() -> None:
        whole = {"model": drafter.state_dict(), "optimiser": optimiser.state_dict()}
        save_state(workdir.state("drafter"), {**whole, "step": step, "num_roots": num_roots, "used_s": budget.used_s})
        save_drafter(drafter, workdir.drafter)

    mark_s, mark_roots = time.monotonic(), num_roots
    while budget.fraction < 1.0:
        generator.manual_seed(2_000_003 + step)
        rows = settings.drafter_rows
        if budget.fraction < settings.real_share or step % LATER_REAL_EVERY == 0:
            tokens_BL = real.sample(rows, settings.drafter_length, generator)
            batch = Sequences(tokens_BL, torch.ones(rows, device=machine.device), MIN_CONTEXT)
        else:
            batch = own.sample(rows, step, generator)
        loss, agreement_J = loss_of(batch, generator)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(drafter.parameters(), CLIP_NORM)
        optimiser.step(rate_scale(step, budget.fraction))
        step += 1
        num_roots += rows * settings.num_anchors
        if step in (1, 2, 5, 20) or step % LOG_EVERY == LOG_EVERY // 2:
            loss_value = loss.item()
            now_s = time.monotonic()
            roots_s = (num_roots - mark_roots) / (now_s - mark_s)
            mark_s, mark_roots = now_s, num_roots
            log.write(
                step=step, roots_m=num_roots / 1e6, loss=loss_value, grad=norm.item(), roots_s=roots_s,
                top1=" ".join(f"{value:.2f}" for value in agreement_J[[0, 1, 2, 3, 5, 7, 10, 14]].tolist()),
                used_s=budget.used_s,
            )  # fmt: skip
        if next(is_checkpoint_due):
            save()
    save()
    log.write(step=step, roots_m=num_roots / 1e6)
