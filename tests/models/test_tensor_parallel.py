"""A model sharded over ranks computes what the whole model computes."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from ddtree_bench.models.parallel import Parallel
from ddtree_bench.models.weights import load_drafter, load_target
from tests.models.sizes import block_over_context, causal, drafter_sizes, target_sizes, write_config

TOKENS = torch.tensor([5, 100, 0, 17, 50, 51, 99])


def run_pair(folder: Path, parallel: Parallel) -> dict[str, torch.Tensor]:
    """Return logits and marginals of one prefix, whole on every rank."""
    target = load_target(folder / "target", parallel, load_format="dummy", seed=4)
    drafter = load_drafter(folder / "drafter", parallel, load_format="dummy", seed=5, target=target.config)
    positions = torch.arange(len(TOKENS))
    with torch.no_grad():
        hidden, features = target(TOKENS, positions, causal, drafter.config.target_layer_ids)
        context_kv = drafter.context_kv(drafter.project_context(features[:-1]), positions[:-1])
        block = torch.tensor([int(TOKENS[-1])] + [drafter.config.mask_token_id] * 3)
        drafted = drafter(target.embed(block), len(TOKENS) - 1 + torch.arange(4), block_over_context(context_kv))
        logits = parallel.all_gather(target.local_logits(hidden))
        marginals = parallel.all_gather(target.local_logits(drafted))
    size = target.config.vocab_size
    assert bool(torch.isneginf(logits[:, size:]).all())
    return {"logits": logits[:, :size], "marginals": marginals[:, :size], "features": features}


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{world_size}", rank=rank, world_size=world_size)
    parallel = Parallel.from_process_group()
    result = run_pair(folder, parallel)
    assert parallel.broadcast_object({"rank": rank}, source=world_size - 1) == {"rank": world_size - 1}
    torch.save(result, folder / f"result{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_compute_what_one_computes(world_size: int, tied: bool, tmp_path: Path) -> None:
    """Eight query heads over two key/value heads: with four ranks each key/value head is held twice."""
    config = target_sizes(tie_word_embeddings=tied)
    write_config(tmp_path / "target", config)
    write_config(tmp_path / "drafter", drafter_sizes(config))
    whole = run_pair(tmp_path, Parallel.single())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.spawn(run_rank, (world_size, tmp_path), nprocs=world_size)
    for rank in range(world_size):
        part = torch.load(tmp_path / f"result{rank}.pt")
        for name, expected in whole.items():
            torch.testing.assert_close(part[name], expected, atol=2e-5, rtol=1e-4, msg=name)


def test_degree_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, target_sizes())
    with pytest.raises(ValueError, match="num_attention_heads must divide"):
        load_target(tmp_path, Parallel(rank=0, world_size=3), load_format="dummy")
