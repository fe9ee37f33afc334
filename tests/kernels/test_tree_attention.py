"""`tree_attention`: against a query-by-query oracle on caches whose unwritten slots are NaN; independence of the batch."""

import pytest
import torch

from ddtree_bench.kernels.tree_attention import tree_attention
from ddtree_bench.kernels.tree_attention.cases import TEST_CASES, TreeAttentionCase


def by_query(inputs, attend_one, read_rows, dtype):
    """Attend each query to the slots it may see, read one by one."""
    out_THE = torch.zeros(inputs["q_THE"].shape, dtype=dtype)
    starts = inputs["query_starts_B1"].tolist()
    for row, prefix_length in enumerate(inputs["prefix_lengths_B"].tolist()):
        for node in range(starts[row + 1] - starts[row]):
            visible = range(node + 1)
            if inputs["visibility_BNN"] is not None:
                visible = torch.nonzero(inputs["visibility_BNN"][row, node]).flatten().tolist()
            positions = [*range(prefix_length), *(prefix_length + place for place in visible)]
            k_CGE, v_CGE = (
                read_rows(inputs[name], inputs["page_table_BP"][row], positions) for name in ("k_cache_PSGE", "v_cache_PSGE")
            )
            token = starts[row] + node
            out_THE[token] = attend_one(inputs["q_THE"][token], k_CGE, v_CGE, inputs["scale"], dtype=dtype)
    return out_THE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_against_float64(case, dtype, attention_oracle, read_rows, assert_float_error):
    inputs = case.make_inputs(seed=61, dtype=dtype)
    out_THE = tree_attention(**inputs)
    assert out_THE.dtype == dtype
    oracle_THE = by_query(inputs, attention_oracle, read_rows, torch.float64)
    assert_float_error(out_THE, by_query(inputs, attention_oracle, read_rows, dtype), oracle_THE)


@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_a_sequence_does_not_depend_on_its_batch(case):
    inputs = case.make_inputs(seed=62)
    out_THE = tree_attention(**inputs)
    starts = inputs["query_starts_B1"].tolist()
    for row in range(len(starts) - 1):
        start, end = starts[row], starts[row + 1]
        alone = inputs | {
            "q_THE": inputs["q_THE"][start:end],
            "page_table_BP": inputs["page_table_BP"][row : row + 1],
            "prefix_lengths_B": inputs["prefix_lengths_B"][row : row + 1],
            "query_starts_B1": torch.tensor([0, end - start], dtype=torch.int32),
        }
        if inputs["visibility_BNN"] is not None:
            alone["visibility_BNN"] = inputs["visibility_BNN"][row : row + 1]
        assert torch.equal(tree_attention(**alone), out_THE[start:end])


def test_a_chain_under_a_mask_equals_causal_without():
    inputs = TreeAttentionCase(name="chain", prefix_lengths=(5, 3), num_nodes=(8, 5), window="chain").make_inputs(seed=63)
    assert torch.equal(tree_attention(**inputs), tree_attention(**inputs | {"visibility_BNN": None}))


def test_rows_beyond_the_last_sequence_are_zero():
    inputs = TEST_CASES[2].make_inputs(seed=64)
    out_THE = tree_attention(**inputs)
    longer_THE = torch.cat([inputs["q_THE"], torch.full_like(inputs["q_THE"][:2], torch.nan)])
    longer_out_THE = tree_attention(**inputs | {"q_THE": longer_THE})
    assert torch.equal(longer_out_THE[:-2], out_THE)
    assert (longer_out_THE[-2:] == 0).all()


@pytest.mark.parametrize("num_fillers", [1, 4])
def test_slots_that_no_query_sees_may_hold_anything(num_fillers):
    inputs = TreeAttentionCase(name="fillers", prefix_lengths=(6, 2), num_nodes=(9, 9)).make_inputs(seed=67)
    num_nodes = 9 - num_fillers
    inputs["visibility_BNN"][:, num_nodes:] = False
    inputs["visibility_BNN"][:, :, num_nodes:] = False
    expected_BNHE = tree_attention(**inputs).unflatten(0, (2, 9))
    for row, prefix_length in enumerate((6, 2)):
        for position in range(prefix_length + num_nodes, prefix_length + 9):
            place = (inputs["page_table_BP"][row, position // 4], position % 4)
            inputs["k_cache_PSGE"][place] = inputs["v_cache_PSGE"][place] = torch.nan
    out_BNHE = tree_attention(**inputs).unflatten(0, (2, 9))
    assert torch.equal(out_BNHE, expected_BNHE)
    assert out_BNHE.isfinite().all()


def test_a_query_that_sees_nothing_is_zero():
    inputs = TreeAttentionCase(name="blind", prefix_lengths=(0,), num_nodes=(3,)).make_inputs(seed=65)
    inputs["visibility_BNN"][0, 1] = False
    out_THE = tree_attention(**inputs)
    assert (out_THE[1] == 0).all()
    assert out_THE.isfinite().all()


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("q_THE", lambda q: q[:, :3], ValueError, r"a multiple of the cache's 2 heads, got 3"),
        ("q_THE", lambda q: q.bfloat16(), TypeError, r"k_cache_PSGE must be bfloat16, got float32"),
        ("v_cache_PSGE", lambda v: v[:1], ValueError, r"v_cache_PSGE must have shape"),
        ("page_table_BP", lambda table: table.long(), TypeError, r"page_table_BP must be int32, got int64"),
        ("page_table_BP", lambda table: table[:, :2], ValueError, r"page_table_BP must hold the 4 pages of 16 slots of 4 each"),
        ("query_starts_B1", lambda starts: starts[:-1], ValueError, r"query_starts_B1 must have shape \(4\), got \(3,\)"),
        ("visibility_BNN", lambda mask: mask[:, :8, :8], ValueError, r"must cover the 9 queries of sequence 0, got 8 rows"),
        ("visibility_BNN", lambda mask: mask.int(), TypeError, r"visibility_BNN must be bool, got int32"),
        ("visibility_BNN", lambda mask: mask[:, :8], ValueError, r"visibility_BNN must have shape \(3, 17, 17\)"),
    ],
)
def test_refusals(name, change, error, message):
    inputs = TEST_CASES[2].make_inputs(seed=66)
    with pytest.raises(error, match=message):
        tree_attention(**inputs | {name: change(inputs[name])})


# The interpreter multiplies bfloat16 as integers, so without a GPU float16 stands for the 16-bit types.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# Small blocks, and splits of one block, let short windows reach every branch of the kernel.
TRITON_CONFIGS = {
    "float32": (torch.float32, {}),
    "half": (HALF, {}),
    "half-one-split": (HALF, {"block_m": 16, "block_n": 16, "num_splits": 1}),
    "half-three-splits": (HALF, {"block_m": 16, "block_n": 16, "num_splits": 3}),
}


def run_triton(inputs, device, **options):
    """Run the Triton implementation on a device, the tile sizes given or chosen, and return the output on the CPU."""
    from ddtree_bench.kernels.paged_triton import AttentionConfig
    from ddtree_bench.kernels.tree_attention import triton_kernel

    num_splits = options.pop("num_splits", None)
    config = AttentionConfig(min_blocks=1, **options) if options else None
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return triton_kernel.tree_attention(**placed, config=config, num_splits=num_splits).cpu()


@pytest.mark.parametrize(("dtype", "options"), TRITON_CONFIGS.values(), ids=TRITON_CONFIGS)
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_triton_against_float64(case, dtype, options, kernel_device, attention_oracle, read_rows, assert_float_error):
    inputs = case.make_inputs(seed=81, dtype=dtype)
    out_THE = run_triton(inputs, kernel_device, **options)
    assert out_THE.dtype == dtype
    oracle_THE = by_query(inputs, attention_oracle, read_rows, torch.float64)
    assert_float_error(out_THE, by_query(inputs, attention_oracle, read_rows, dtype), oracle_THE)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_triton_clears_rows_beyond_the_last_sequence(num_splits, kernel_device):
    inputs = TEST_CASES[3].make_inputs(seed=82)
    out_THE = run_triton(inputs, kernel_device, block_m=16, block_n=16, num_splits=num_splits)
    longer_THE = torch.cat([inputs["q_THE"], torch.full_like(inputs["q_THE"][:5], torch.nan)])
    longer_out_THE = run_triton(inputs | {"q_THE": longer_THE}, kernel_device, block_m=16, block_n=16, num_splits=num_splits)
    assert torch.equal(longer_out_THE[:-5], out_THE)
    assert (longer_out_THE[-5:] == 0).all()


def test_triton_with_given_splits_does_not_depend_on_the_batch(kernel_device):
    inputs = TEST_CASES[2].make_inputs(seed=83)
    options = {"block_m": 16, "block_n": 16, "num_splits": 2}
    out_THE = run_triton(inputs, kernel_device, **options)
    starts = inputs["query_starts_B1"].tolist()
    for row in range(len(starts) - 1):
        start, end = starts[row], starts[row + 1]
        alone = inputs | {
            "q_THE": inputs["q_THE"][start:end],
            "page_table_BP": inputs["page_table_BP"][row : row + 1],
            "prefix_lengths_B": inputs["prefix_lengths_B"][row : row + 1],
            "query_starts_B1": torch.tensor([0, end - start], dtype=torch.int32),
        }
        if inputs["visibility_BNN"] is not None:
            alone["visibility_BNN"] = inputs["visibility_BNN"][row : row + 1]
        assert torch.equal(run_triton(alone, kernel_device, **options), out_THE[start:end])


@pytest.mark.parametrize("num_splits", [1, 3])
def test_triton_reads_no_slot_that_no_query_sees(num_splits, kernel_device):
    inputs = TreeAttentionCase(name="fillers", prefix_lengths=(30, 2), num_nodes=(9, 9)).make_inputs(seed=84)
    inputs["visibility_BNN"][:, 6:] = False
    inputs["visibility_BNN"][:, :, 6:] = False
    for row, prefix_length in enumerate((30, 2)):
        for position in range(prefix_length + 6, prefix_length + 9):
            place = (inputs["page_table_BP"][row, position // 4], position % 4)
            inputs["k_cache_PSGE"][place] = inputs["v_cache_PSGE"][place] = torch.nan
    out_THE = run_triton(inputs, kernel_device, block_m=16, block_n=16, num_splits=num_splits)
    torch.testing.assert_close(out_THE, tree_attention(**inputs))


@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("window", ["tree", "causal"])
def test_triton_follows_no_page_beyond_a_sequence(window, num_splits, kernel_device):
    """Beyond a sequence's pages a row of the table may hold anything; prefixes end in, at and after a block's end."""
    case = TreeAttentionCase(name="junk", prefix_lengths=(64, 37, 3, 15), num_nodes=(9, 2, 17, 1), window=window)
    inputs = case.make_inputs(seed=87)
    expected_THE = tree_attention(**inputs)
    table_BP = torch.nn.functional.pad(inputs["page_table_BP"], (0, 9))
    for row, (prefix_length, num_nodes) in enumerate(zip(case.prefix_lengths, case.num_nodes, strict=True)):
        table_BP[row, -(-(prefix_length + num_nodes) // case.page_size) :] = 2**31 - 1
    junk = inputs | {"page_table_BP": table_BP}
    torch.testing.assert_close(run_triton(junk, kernel_device, block_m=16, block_n=16, num_splits=num_splits), expected_THE)


def test_triton_query_that_sees_nothing_is_zero(kernel_device):
    inputs = TreeAttentionCase(name="blind", prefix_lengths=(0,), num_nodes=(3,)).make_inputs(seed=85)
    inputs["visibility_BNN"][0, 1] = False
    out_THE = run_triton(inputs, kernel_device)
    assert (out_THE[1] == 0).all()
    torch.testing.assert_close(out_THE, tree_attention(**inputs))


def test_triton_takes_strided_caches_64_bit_lengths_and_a_negative_scale(kernel_device):
    inputs = TEST_CASES[2].make_inputs(seed=86)
    both_2PSGE = torch.stack([inputs["k_cache_PSGE"], inputs["v_cache_PSGE"]], dim=1)
    inputs |= {"k_cache_PSGE": both_2PSGE[:, 0], "v_cache_PSGE": both_2PSGE[:, 1], "scale": -inputs["scale"]}
    inputs |= {name: inputs[name].long() for name in ("prefix_lengths_B", "query_starts_B1")}
    torch.testing.assert_close(run_triton(inputs, kernel_device), tree_attention(**inputs))


@pytest.mark.parametrize(
    ("num_rows", "head_size", "num_slots", "expected"),
    [
        (16, 128, 2**20, (16, 64)),
        (64, 128, 2**20, (64, 64)),
        (68, 128, 2080, (128, 64)),
        (68, 128, 8 * 16_400, (128, 128)),
        (260, 128, 2112, (128, 128)),
        (1028, 64, 2**20, (128, 128)),
        (68, 256, 2**20, (128, 32)),
    ],
)
def test_choice_of_tile_sizes(num_rows, head_size, num_slots, expected):
    from ddtree_bench.kernels.paged_triton import choose_config

    config = choose_config(num_rows, head_size, torch.bfloat16, num_slots)
    assert (config.block_m, config.block_n) == expected


@pytest.mark.parametrize(
    ("num_programs", "num_blocks", "programs_per_sm", "expected"),
    [(8, 1024, 1, 16), (64, 1024, 1, 2), (256, 1024, 1, 1), (8, 1, 1, 1), (256, 8192, 2, 1)],
)
def test_splits_fill_the_device(num_programs, num_blocks, programs_per_sm, expected):
    from ddtree_bench.kernels.paged_triton import AttentionConfig, choose_num_splits

    config = AttentionConfig(block_m=64, block_n=64, programs_per_sm=programs_per_sm)
    assert choose_num_splits(num_programs, num_blocks, config, num_processors=132) == expected
