"""The drafter as trained (many blocks, one mask) and as served (one block over a cache) give the same marginals."""

from pathlib import Path

import pytest
import torch

from ddtree_bench.models.training.common import Machine
from ddtree_bench.models.training.drafter import TargetFeatures, draft_hidden
from ddtree_bench.models.weights import load_drafter, load_target
from tests.models.sizes import block_over_context, causal, drafter_sizes, target_sizes, write_config


@pytest.mark.parametrize("num_slots", [2, 5, 8])
def test_training_and_cached_marginals_agree(tmp_path: Path, num_slots: int) -> None:
    config = target_sizes()
    target = load_target(write_config(tmp_path / "t", config), load_format="dummy", seed=1)
    drafter = load_drafter(write_config(tmp_path / "d", drafter_sizes(config)), load_format="dummy", seed=2)
    generator = torch.Generator().manual_seed(9)
    tokens_BL = torch.randint(config.vocab_size, (2, 12), generator=generator)
    roots_BA = torch.tensor([[1, 4, 11], [6, 6, 2]])
    sizes_BA = torch.full_like(roots_BA, num_slots)
    features_of = TargetFeatures(target, drafter.config.target_layer_ids, Machine(torch.device("cpu"), False))
    with torch.no_grad():
        _, features_TC = features_of(tokens_BL)
        hidden = draft_hidden(drafter, target.embed_tokens, tokens_BL, features_TC, roots_BA, sizes_BA, num_slots)
        trained = target.local_logits(hidden).log_softmax(-1)
        for row in range(2):
            for place, root in enumerate(roots_BA[row].tolist()):
                prefix = torch.arange(root)
                _, features = target(tokens_BL[row, :root], prefix, causal, drafter.config.target_layer_ids)
                context_kv = drafter.context_kv(drafter.project_context(features), prefix)
                block = torch.tensor([int(tokens_BL[row, root])] + [drafter.config.mask_token_id] * (num_slots - 1))
                positions = root + torch.arange(num_slots)
                served = drafter(target.embed(block), positions, block_over_context(context_kv))
                marginals = target.local_logits(served).log_softmax(-1)
                torch.testing.assert_close(trained[row, place], marginals, atol=1e-4, rtol=0)
