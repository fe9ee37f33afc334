"""`commit_kv`: rows move as if all were read before any is written, and nothing else changes."""

import pytest
import torch

from ddtree_bench.kernels.commit_kv import commit_kv, reference
from ddtree_bench.kernels.commit_kv.cases import TEST_CASES

CACHES = ("k_caches_LPSGE", "v_caches_LPSGE")


def assert_moved(inputs, sources, destinations):
    before = {name: [cache_PSGE.clone() for cache_PSGE in inputs[name]] for name in CACHES}
    commit_kv(**inputs)
    for name in CACHES:
        for old_PSGE, new_PSGE in zip(before[name], inputs[name], strict=True):
            expected = old_PSGE.flatten(0, 1).clone()
            for source, destination in zip(sources, destinations, strict=True):
                expected[destination] = old_PSGE.flatten(0, 1)[source]
            assert torch.equal(new_PSGE.flatten(0, 1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_moves_accepted_rows_in_every_layer(case, dtype):
    inputs = case.make_inputs(seed=91, dtype=dtype)
    assert_moved(inputs, inputs["source_slots_M"].tolist(), inputs["destination_slots_M"].tolist())


@pytest.mark.parametrize("order", ["up", "down", "cycle"])
def test_overlap_in_any_order(order):
    inputs = TEST_CASES[2].make_inputs(seed=92)
    sources = {"up": [3, 4, 5, 6], "down": [1, 2, 3, 4], "cycle": [4, 3, 2, 5]}[order]
    destinations = [2, 3, 4, 5]
    inputs |= {"source_slots_M": torch.tensor(sources), "destination_slots_M": torch.tensor(destinations)}
    assert_moved(inputs, sources, destinations)


def test_a_second_round_reads_what_the_first_one_moved():
    """A path 0, 3, 9, then a path 0, 2, of one sequence in one page: the prefix holds the accepted rows in order."""
    cache_PSGE = torch.arange(32.0).reshape(1, 32, 1, 1)
    k_caches, v_caches = [cache_PSGE.clone()], [-cache_PSGE]
    commit_kv(k_caches, v_caches, 7 + torch.tensor([0, 3, 9]), 7 + torch.arange(3))
    k_caches[0][0, 10:14, 0, 0] = torch.tensor([100.0, 101.0, 102.0, 103.0])
    v_caches[0][0, 10:14, 0, 0] = -k_caches[0][0, 10:14, 0, 0]
    commit_kv(k_caches, v_caches, 10 + torch.tensor([0, 2]), 10 + torch.arange(2))
    assert k_caches[0].flatten()[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 16, 100, 102]
    assert torch.equal(v_caches[0].flatten()[:12], -k_caches[0].flatten()[:12])


def test_negative_slots_are_skipped_and_unwritten_memory_stays():
    k_caches, v_caches = [torch.full((2, 3, 1, 1), torch.nan)], [torch.full((2, 3, 1, 1), torch.nan)]
    k_caches[0][0, 2], v_caches[0][0, 2] = 5.0, 6.0
    commit_kv(k_caches, v_caches, torch.tensor([2, -1, 2, -1]), torch.tensor([3, 0, -1, -1]))
    assert k_caches[0].flatten().nan_to_num(-1).tolist() == [-1, -1, 5, 5, -1, -1]
    assert v_caches[0].flatten().nan_to_num(-1).tolist() == [-1, -1, 6, 6, -1, -1]


def test_stacked_caches_are_written_in_place():
    inputs = TEST_CASES[1].make_inputs(seed=93)
    stacked = inputs | {name: torch.stack(inputs[name]) for name in CACHES}
    commit_kv(**stacked)
    commit_kv(**inputs)
    for name in CACHES:
        assert torch.equal(stacked[name], torch.stack(inputs[name]))


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("v_caches_LPSGE", lambda caches: caches[1:], ValueError, r"one cache a layer, got 3 and 2"),
        ("v_caches_LPSGE", lambda caches: [cache[:1] for cache in caches], ValueError, r"v_caches_LPSGE\[0\] must have shape"),
        ("destination_slots_M", lambda slots: slots[1:], ValueError, r"destination_slots_M must have shape \(3\), got \(2,\)"),
        ("source_slots_M", lambda slots: slots.int(), TypeError, r"source_slots_M must be int64, got int32"),
        ("source_slots_M", lambda slots: slots + 100, ValueError, r"slots must be below 5 pages x 4 slots, got"),
    ],
)
def test_refusals(name, change, error, message):
    inputs = TEST_CASES[1].make_inputs(seed=94)
    with pytest.raises(error, match=message):
        commit_kv(**inputs | {name: change(inputs[name])})


def assert_kernel_equals_reference(inputs, **options):
    from ddtree_bench.kernels.commit_kv import triton_kernel

    expected = inputs | {name: [cache_PSGE.clone() for cache_PSGE in inputs[name]] for name in CACHES}
    reference.commit_kv(**expected)
    triton_kernel.commit_kv(**inputs, **options)
    for name in CACHES:
        for found_PSGE, expected_PSGE in zip(inputs[name], expected[name], strict=True):
            torch.testing.assert_close(found_PSGE, expected_PSGE, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"block": 16}, {"max_tile": 8}], ids=["one-launch", "narrow", "two-launches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_kernel(case, dtype, options, kernel_device):
    assert_kernel_equals_reference(case.make_inputs(seed=95, dtype=dtype, device=kernel_device), **options)


@pytest.mark.parametrize("options", [{}, {"max_tile": 8}], ids=["one-launch", "two-launches"])
@pytest.mark.parametrize("order", ["down", "cycle", "skipped"])
def test_kernel_with_overlap_in_any_order(order, options, kernel_device):
    inputs = TEST_CASES[2].make_inputs(seed=96, device=kernel_device)
    sources = {"down": [1, 2, 3, 4], "cycle": [4, 3, 2, 5], "skipped": [1, -1, 3, 2]}[order]
    destinations = {"down": [2, 3, 4, 5], "cycle": [2, 4, 3, 5], "skipped": [2, 0, -1, 3]}[order]
    slots = {"source_slots_M": sources, "destination_slots_M": destinations}
    inputs |= {name: torch.tensor(values, device=kernel_device) for name, values in slots.items()}
    assert_kernel_equals_reference(inputs, **options)


@pytest.mark.parametrize("layout", ["separate", "stacked", "one-pool", "pages-apart", "heads-first"])
def test_kernel_in_any_layout_of_the_caches(layout, kernel_device):
    inputs = TEST_CASES[1].make_inputs(seed=97, device=kernel_device)
    stacks = {name: torch.stack(inputs[name]) for name in CACHES}
    if layout == "separate":
        stacks = {name: [cache_PSGE.clone() for cache_PSGE in stack] for name, stack in stacks.items()}
    elif layout == "one-pool":
        stacks = dict(zip(CACHES, torch.stack(list(stacks.values()), dim=1).unbind(1), strict=True))
    elif layout == "pages-apart":
        stacks = {name: torch.cat([stack, stack], dim=2)[:, :, : stack.shape[2]] for name, stack in stacks.items()}
    elif layout == "heads-first":
        stacks = {name: stack.transpose(2, 3).contiguous().transpose(2, 3) for name, stack in stacks.items()}
    assert_kernel_equals_reference(inputs | stacks)


def test_kernel_without_rows(kernel_device):
    inputs = TEST_CASES[1].make_inputs(seed=98, device=kernel_device)
    empty = {name: inputs[name][:0] for name in ("source_slots_M", "destination_slots_M")}
    assert_kernel_equals_reference(inputs | empty)
