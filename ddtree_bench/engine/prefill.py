"""Prefill: write the cache entries of prompts, in chunks, and choose the first token of those that are complete.

After a preemption prompt and output come back this way; their last token is the root already, so nothing is chosen.

Letters: B sequences, T packed tokens, V vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ddtree_bench.engine.digest import check_ranks_agree
from ddtree_bench.engine.kv_caches import page_table, slots_of
from ddtree_bench.engine.request import TokenLogprob
from ddtree_bench.engine.round import choice_batch
from ddtree_bench.engine.runner import Runner, Window
from ddtree_bench.engine.sampling import choose_tokens, token_logprobs
from ddtree_bench.engine.scheduler import PrefillChunk
from ddtree_bench.engine.sequence import SequenceState


def run_prefill(runner: Runner, chunks: Sequence[PrefillChunk], *, round_number: int) -> None:
    """Cache the chunks' tokens in both caches and give complete prompts their first token.

    Raises:
        RanksDisagreeError: the ranks chose different tokens.
    """
    window = _window_of(runner, chunks)
    hidden_TD, features_TC = runner.run_target(window)
    runner.append_context(features_TC, window.positions_T, window.slots_T)
    complete: list[SequenceState] = []
    last_rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += chunk.stop - chunk.start
        chunk.sequence.num_cached = chunk.stop
        if chunk.stop == chunk.sequence.num_prompt_tokens and chunk.sequence.num_output_tokens == 0:
            complete.append(chunk.sequence)
            last_rows.append(end - 1)
    if complete:
        _choose_first(runner, complete, runner.logits(hidden_TD[last_rows]), round_number)


def _window_of(runner: Runner, chunks: Sequence[PrefillChunk]) -> Window:
    positions = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
    slots = [slots_of(chunk.sequence.pages, at, runner.page_size) for chunk, at in zip(chunks, positions, strict=True)]
    tokens = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.stop]]
    starts = np.cumsum([0, *(len(at) for at in positions)])
    device = runner.device
    return Window(
        tokens_T=torch.tensor(tokens, device=device),
        positions_T=torch.from_numpy(np.concatenate(positions)).to(device),
        slots_T=torch.from_numpy(np.concatenate(slots)).to(device),
        page_table_BP=page_table([chunk.sequence.pages for chunk in chunks], device),
        prefix_lengths_B=torch.tensor([chunk.start for chunk in chunks], device=device),
        query_starts_B1=torch.from_numpy(starts).to(device),
    )


def _choose_first(runner: Runner, sequences: Sequence[SequenceState], logits_BV: torch.Tensor, round_number: int) -> None:
    positions_B1 = torch.tensor([[len(sequence.tokens)] for sequence in sequences], device=runner.device)
    last_B1 = torch.tensor([[sequence.tokens[-1]] for sequence in sequences], device=runner.device)
    choices = choice_batch(runner, sequences, positions_B1, last_B1, None)
    tokens_B1 = choose_tokens(logits_BV[:, None], choices, runner.parallel, runner.vocab_offset)
    check_ranks_agree([tokens_B1], runner.parallel, round_number=round_number, what="first tokens")
    for b, token in enumerate(tokens_B1[:, 0].tolist()):
        sequence = sequences[b]
        if token < 0:
            sequence.fail_without_choice()
            continue
        num_top = sequence.request.sampling.logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if num_top is not None:
            logprobs = token_logprobs(logits_BV[b : b + 1], [token], num_top, runner.parallel)
        sequence.start_from_prefill(token, logprobs)
