"""`write_kv`: every named slot and no other is written."""

import pytest
import torch

from ddtree_bench.kernels.write_kv import reference, write_kv
from ddtree_bench.kernels.write_kv.cases import TEST_CASES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_writes_the_named_slots_only(case, dtype):
    inputs = case.make_inputs(seed=81, dtype=dtype)
    assert write_kv(**inputs) is None
    for rows_TGE, cache_PSGE in (
        (inputs["k_TGE"], inputs["k_cache_PSGE"]),
        (inputs["v_TGE"], inputs["v_cache_PSGE"]),
    ):
        flat = cache_PSGE.flatten(0, 1)
        written = {slot: token for token, slot in enumerate(inputs["slots_T"].tolist()) if slot >= 0}
        assert len(written) == case.num_tokens - case.num_skipped
        for slot in range(len(flat)):
            if slot in written:
                assert torch.equal(flat[slot], rows_TGE[written[slot]])
            else:
                assert flat[slot].isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("slots_T", lambda slots: slots + 35, ValueError, r"slots_T must be below 5 pages x 7 slots, got"),
        ("slots_T", lambda slots: slots.int(), TypeError, r"slots_T must be int64, got int32"),
        ("slots_T", lambda slots: slots[1:], ValueError, r"slots_T must have shape \(13\), got \(12,\)"),
        ("v_TGE", lambda v: v[:, :1], ValueError, r"v_TGE must have shape \(13, 2, 16\), got \(13, 1, 16\)"),
        ("k_cache_PSGE", lambda k: k.bfloat16(), TypeError, r"k_cache_PSGE must be float32, got bfloat16"),
    ],
)
def test_refusals(name, change, error, message):
    inputs = TEST_CASES[2].make_inputs(seed=82)
    with pytest.raises(error, match=message):
        write_kv(**inputs | {name: change(inputs[name])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_kernel(case, dtype, kernel_device):
    from ddtree_bench.kernels.write_kv import triton_kernel

    inputs, expected = (case.make_inputs(seed=83, dtype=dtype, device=kernel_device) for _ in range(2))
    reference.write_kv(**expected)
    triton_kernel.write_kv(**inputs)
    for name in ("k_cache_PSGE", "v_cache_PSGE"):
        torch.testing.assert_close(inputs[name], expected[name], rtol=0, atol=0, equal_nan=True)


def test_kernel_reads_and_writes_strided_tensors(kernel_device):
    """Keys and values are slices of one projection, the caches views of one tensor; a program writes a part of a row."""
    from ddtree_bench.kernels.write_kv import triton_kernel

    generator = torch.Generator().manual_seed(84)
    projected = torch.randn(5, 4, 24, generator=generator).to(kernel_device)
    slots_T = torch.tensor([3, 9, -1, 0, 7], device=kernel_device)
    pools = [torch.full((4, 3, 2, 48), torch.nan, device=kernel_device) for _ in range(2)]
    calls = (reference.write_kv, lambda *arguments: triton_kernel.write_kv(*arguments, max_block=32))
    for write, pool in zip(calls, pools, strict=True):
        write(projected[:, :2], projected[:, 2:], pool[..., :24], pool[..., 24:], slots_T)
    torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=0, equal_nan=True)
