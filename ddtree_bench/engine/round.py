"""The decoding round: draft → topk_logprobs → build_tree → verify → walk_tree → commit (DESIGN section 4.2).

One code path for every mode: a chain is a tree whose nodes have one child, and plain decoding is a tree that is its root.
The root is the last committed token; its cache entry is written by the verify step that carries it.

Letters: B sequences, N room for nodes, T = B · N packed nodes, R = B · depth, D depth, K candidates, V vocabulary shard,
W ranks, M cache rows to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree_bench.engine.digest import check_ranks_agree
from ddtree_bench.engine.kv_caches import page_table, slots_of
from ddtree_bench.engine.penalties import TokenHistory
from ddtree_bench.engine.request import TokenLogprob
from ddtree_bench.engine.runner import Runner, Window
from ddtree_bench.engine.sampling import ChoiceBatch, choose_tokens, token_logprobs
from ddtree_bench.engine.sequence import SequenceState
from ddtree_bench.engine.stage_clock import StageClock
from ddtree_bench.kernels.build_tree import TreeBatch, build_chain_batch, build_tree
from ddtree_bench.kernels.commit_kv import commit_kv
from ddtree_bench.kernels.topk_logprobs import merge_topk_partials, topk_partials
from ddtree_bench.kernels.walk_tree import walk_tree


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundBatch:
    """The sequences of one round as they stand before it.

    Args:
        prefix_lengths: cached tokens of each; the root's position.
        root_tokens_B, prefix_lengths_B: int64.
        page_table_BP: int32.
    """

    sequences: Sequence[SequenceState]
    prefix_lengths: Sequence[int]
    root_tokens_B: torch.Tensor
    prefix_lengths_B: torch.Tensor
    page_table_BP: torch.Tensor


def run_round(runner: Runner, sequences: Sequence[SequenceState], *, round_number: int, clock: StageClock) -> None:
    """Run one round and give every sequence its tokens.

    Raises:
        RanksDisagreeError: the ranks hold different trees or took different walks.
    """
    batch = _batch_of(runner, sequences)
    with clock.stage("draft"):
        topk = _draft(runner, batch)
    with clock.stage("build_tree"):
        tree = _build(runner, batch, topk)
    with clock.stage("verify"):
        window = _window_of(runner, batch, tree)
        hidden_TD, features_TC = runner.run_target(window)
        logits_TV = runner.logits(hidden_TD)
    with clock.stage("walk"):
        choices = choice_batch(
            runner, sequences, 1 + window.positions_T.view_as(tree.tokens_BN), tree.tokens_BN, tree.visibility_BNN
        )
        logits_BNV = logits_TV.view(*tree.tokens_BN.shape, -1)
        target_tokens_BN = choose_tokens(logits_BNV, choices, runner.parallel, runner.vocab_offset)
        walk = walk_tree(tree.tokens_BN, tree.parents_BN, tree.num_nodes_B, target_tokens_BN)
        check_ranks_agree(
            [tree.tokens_BN, tree.parents_BN, walk.path_BN, walk.bonus_tokens_B],
            runner.parallel,
            round_number=round_number,
            what="tree and walk",
        )
        paths = [
            path[: num_accepted + 1]
            for path, num_accepted in zip(walk.path_BN.tolist(), walk.num_accepted_B.tolist(), strict=True)
        ]
    with clock.stage("commit"):
        _hand_over(runner, batch, tree, paths, walk.bonus_tokens_B.tolist(), logits_BNV)
        _commit(runner, batch, paths, features_TC)


def choice_batch(
    runner: Runner,
    sequences: Sequence[SequenceState],
    positions_BN: torch.Tensor,
    tokens_BN: torch.Tensor,
    visibility_BNN: torch.Tensor | None,
) -> ChoiceBatch:
    """Collect what the target's choices depend on; brings the penalties' counts up to date."""
    return ChoiceBatch(
        samplings=[sequence.request.sampling for sequence in sequences],
        histories=[_history_of(runner, sequence) for sequence in sequences],
        positions_BN=positions_BN,
        tokens_BN=tokens_BN,
        visibility_BNN=visibility_BNN,
    )


def _history_of(runner: Runner, sequence: SequenceState) -> TokenHistory | None:
    if not sequence.request.sampling.has_penalties:
        return None
    if sequence.history is None:
        sequence.history = TokenHistory(runner.vocab_offset, runner.num_local_tokens, runner.device)
    sequence.history.update(sequence.tokens, sequence.num_prompt_tokens)
    return sequence.history


def _batch_of(runner: Runner, sequences: Sequence[SequenceState]) -> RoundBatch:
    prefix_lengths = [sequence.num_cached for sequence in sequences]
    return RoundBatch(
        sequences=sequences,
        prefix_lengths=prefix_lengths,
        root_tokens_B=torch.tensor([sequence.root for sequence in sequences], device=runner.device),
        prefix_lengths_B=torch.tensor(prefix_lengths, device=runner.device),
        page_table_BP=page_table([sequence.pages for sequence in sequences], runner.device),
    )


def _draft(runner: Runner, batch: RoundBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (logprobs_BDK, tokens_BDK) of the drafter's best candidates, the same on every rank; None in plain decoding."""
    setting = runner.setting
    if setting.num_draft_tokens == 0:
        return None
    logits_RV = runner.draft_logits(batch.root_tokens_B, batch.prefix_lengths_B, batch.page_table_BP)
    partials = topk_partials(logits_RV, setting.top_k, vocab_offset=runner.vocab_offset, temperature=setting.draft_temperature)
    packed_1RF = torch.cat(
        [partials.logits_RK.view(torch.int32), partials.tokens_RK.int(), partials.lse_R.view(torch.int32)[:, None]], dim=1
    )[None]
    logits_WRK, tokens_WRK, lse_WR1 = runner.parallel.all_gather(packed_1RF, dim=0).split(
        [setting.top_k, setting.top_k, 1], dim=2
    )
    logprobs_RK, tokens_RK = merge_topk_partials(
        logits_WRK.contiguous().view(torch.float32),
        tokens_WRK.long(),
        lse_WR1.contiguous().view(torch.float32)[..., 0],
        setting.top_k,
        temperature=setting.draft_temperature,
    )
    shape = (len(batch.sequences), setting.max_depth, setting.top_k)
    return logprobs_RK.view(shape), tokens_RK.view(shape)


def _build(runner: Runner, batch: RoundBatch, topk: tuple[torch.Tensor, torch.Tensor] | None) -> TreeBatch:
    setting, roots_B = runner.setting, batch.root_tokens_B
    if topk is None:
        no_candidates = roots_B.new_zeros((len(roots_B), 0, 1))
        return build_chain_batch(no_candidates.float(), no_candidates, roots_B, depth_B=torch.zeros_like(roots_B), max_nodes=1)
    depth_B = torch.full_like(roots_B, setting.max_depth)
    if setting.mode == "linear":
        return build_chain_batch(*topk, roots_B, depth_B=depth_B, max_nodes=setting.verify_width)
    return build_tree(
        *topk,
        roots_B,
        node_budget_B=torch.full_like(roots_B, setting.node_budget),
        depth_B=depth_B,
        branching_B=torch.full_like(roots_B, setting.branching or setting.top_k),
        max_nodes=setting.verify_width,
    )


def _window_of(runner: Runner, batch: RoundBatch, tree: TreeBatch) -> Window:
    """Lay out the nodes: node i in slot prefix + i, at position prefix + depth. Fillers ride along and are seen by none."""
    batch_size, num_columns = tree.tokens_BN.shape
    nodes_N = np.arange(num_columns)
    slots_BN = np.stack(
        [
            slots_of(sequence.pages, prefix_length + nodes_N, runner.page_size)
            for sequence, prefix_length in zip(batch.sequences, batch.prefix_lengths, strict=True)
        ]
    )
    return Window(
        tokens_T=tree.tokens_BN.flatten(),
        positions_T=(batch.prefix_lengths_B[:, None] + tree.depths_BN).flatten(),
        slots_T=torch.from_numpy(slots_BN).to(runner.device).flatten(),
        page_table_BP=batch.page_table_BP,
        prefix_lengths_B=batch.prefix_lengths_B,
        query_starts_B1=torch.arange(batch_size + 1, device=runner.device) * num_columns,
        visibility_BNN=tree.visibility_BNN if num_columns > 1 else None,
    )


def _hand_over(
    runner: Runner,
    batch: RoundBatch,
    tree: TreeBatch,
    paths: Sequence[Sequence[int]],
    bonus_tokens: Sequence[int],
    logits_BNV: torch.Tensor,
) -> None:
    """Give each sequence its accepted tokens and the bonus; it cuts them where the request ends."""
    tokens_BN, num_nodes = tree.tokens_BN.tolist(), tree.num_nodes_B.tolist()
    for b, sequence in enumerate(batch.sequences):
        if bonus_tokens[b] < 0:
            sequence.fail_without_choice()
            continue
        tokens = [tokens_BN[b][node] for node in paths[b][1:]] + [bonus_tokens[b]]
        logprobs: tuple[TokenLogprob, ...] = ()
        if sequence.request.sampling.logprobs is not None:
            logprobs = token_logprobs(logits_BNV[b, paths[b]], tokens, sequence.request.sampling.logprobs, runner.parallel)
        sequence.end_verify_step(tokens, num_draft_tokens=num_nodes[b] - 1, logprobs=logprobs)


def _commit(runner: Runner, batch: RoundBatch, paths: Sequence[Sequence[int]], features_TC: torch.Tensor) -> None:
    """Move the accepted nodes' entries behind the prefix and add the drafter's; sequences that have ended need neither."""
    num_columns = len(features_TC) // len(batch.sequences)
    sources, destinations, positions, rows = [], [], [], []
    for b, sequence in enumerate(batch.sequences):
        if sequence.finish_reason is None:
            path_N = np.asarray(paths[b])
            position_N = batch.prefix_lengths[b] + np.arange(len(path_N))
            sources.append(slots_of(sequence.pages, batch.prefix_lengths[b] + path_N, runner.page_size))
            destinations.append(slots_of(sequence.pages, position_N, runner.page_size))
            positions.append(position_N)
            rows.append(b * num_columns + path_N)
    if not rows:
        return
    source_M, destination_M = np.concatenate(sources), np.concatenate(destinations)
    destination_slots_M = torch.from_numpy(destination_M).to(runner.device)
    if (source_M != destination_M).any():
        caches = runner.target_caches
        assert caches is not None, "caches are allocated before the first step"
        commit_kv(caches.k_caches, caches.v_caches, torch.from_numpy(source_M).to(runner.device), destination_slots_M)
    features_MC = features_TC[torch.from_numpy(np.concatenate(rows)).to(runner.device)]
    runner.append_context(features_MC, torch.from_numpy(np.concatenate(positions)).to(runner.device), destination_slots_M)
