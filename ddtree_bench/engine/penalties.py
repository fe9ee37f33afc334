"""Repetition, presence and frequency penalties, exact at every node of a tree.

A node's choice sees the committed tokens and the node's own ancestors, itself included, as plain decoding would have at
that point. Repetition counts prompt and output, presence and frequency count output only.

Letters: N nodes, V vocabulary ids of this shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddtree_bench.engine.request import SamplingParams


class TokenHistory:
    """Which tokens of this rank's shard one sequence holds; counted once, as the sequence grows."""

    def __init__(self, vocab_offset: int, num_tokens: int, device: torch.device) -> None:
        self.vocab_offset = vocab_offset
        self.is_in_prompt_V = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        self.output_counts_V = torch.zeros(num_tokens, device=device)
        self._num_counted = 0

    def update(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Count the tokens that came since the last call."""
        start = self._num_counted
        prompt, output = tokens[start:num_prompt_tokens], tokens[max(start, num_prompt_tokens) :]
        self.is_in_prompt_V[self._local(prompt)] = True
        local = self._local(output)
        self.output_counts_V.index_add_(0, local, torch.ones(len(local), device=local.device))
        self._num_counted = len(tokens)

    def counts_at(self, draft_tokens: torch.Tensor, visibility_NN: torch.Tensor) -> torch.Tensor:
        """Return counts_NV of output tokens at each node: the committed ones and the node's ancestors.

        Args:
            draft_tokens: int64 [N − 1], tokens of the nodes below the root, which is committed.
            visibility_NN: bool, ancestor or self.
        """
        num_nodes, num_tokens = len(visibility_NN), len(self.output_counts_V)
        counts_NV = self.output_counts_V.repeat(num_nodes, 1)
        local = draft_tokens - self.vocab_offset
        is_here = (local >= 0) & (local < num_tokens)
        added = visibility_NN[:, 1:] & is_here
        return counts_NV.scatter_add_(1, local.where(is_here, 0).expand(num_nodes, -1), added.float())

    def _local(self, tokens: Sequence[int]) -> torch.Tensor:
        end = self.vocab_offset + len(self.output_counts_V)
        local = [token - self.vocab_offset for token in tokens if self.vocab_offset <= token < end]
        return torch.tensor(local, dtype=torch.int64, device=self.output_counts_V.device)


def penalise(
    logits_NV: torch.Tensor,
    sampling: SamplingParams,
    history: TokenHistory,
    draft_tokens: torch.Tensor,
    visibility_NN: torch.Tensor,
) -> torch.Tensor:
    """Return the logits after the penalties, in new memory."""
    counts_NV = history.counts_at(draft_tokens, visibility_NN)
    is_in_output_NV = counts_NV > 0
    factor = sampling.repetition_penalty
    repeated_NV = torch.where(logits_NV > 0, logits_NV / factor, logits_NV * factor)
    penalised_NV = torch.where(is_in_output_NV | history.is_in_prompt_V, repeated_NV, logits_NV)
    return penalised_NV - sampling.frequency_penalty * counts_NV - sampling.presence_penalty * is_in_output_NV
