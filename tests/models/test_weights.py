"""Saving and loading, slices of ranks, names in files, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ddtree_bench.models.parallel import Parallel
from ddtree_bench.models.weights import (
    bundled_drafter_of,
    load_drafter,
    load_target,
    read_config,
    resolve_model,
    save_drafter,
    save_target,
)
from tests.models.sizes import drafter_sizes, target_sizes, write_config


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A saved pair with random weights: the target in several files, the drafter in one."""
    config = target_sizes(tie_word_embeddings=False)
    write_config(tmp_path / "dummy", config)
    write_config(tmp_path / "dummy_drafter", drafter_sizes(config))
    target = load_target(tmp_path / "dummy", load_format="dummy", seed=1)
    drafter = load_drafter(tmp_path / "dummy_drafter", load_format="dummy", seed=2)
    save_target(target, tmp_path / "target", torch.float32, max_shard_bytes=65_536 + 40_000)
    save_drafter(drafter, tmp_path / "drafter", torch.float32)
    return tmp_path


def stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as handle:
            names |= set(handle.keys())
    return names


def test_round_trip_is_exact(pair: Path) -> None:
    for load, saved, dummy, seed in (
        (load_target, "target", "dummy", 1),
        (load_drafter, "drafter", "dummy_drafter", 2),
    ):
        loaded, made = load(pair / saved), load(pair / dummy, load_format="dummy", seed=seed)
        for (name, one), (_, other) in zip(loaded.named_parameters(), made.named_parameters(), strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize(("dtype", "is_transposed"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_matrices_lie_in_memory_as_the_cpu_multiplies_fastest(pair: Path, dtype: torch.dtype, is_transposed: bool) -> None:
    for model in (load_target(pair / "target", dtype=dtype), load_drafter(pair / "drafter", dtype=dtype)):
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                assert (parameter.t() if is_transposed else parameter).is_contiguous(), name


def test_names_and_files_are_the_field_s(pair: Path) -> None:
    names = stored_names(pair / "target")
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.2.self_attn.k_proj.weight"} <= names
    assert len(list((pair / "target").glob("model-*-of-*.safetensors"))) > 1
    assert all(path.stat().st_size <= 65_536 + 40_000 for path in (pair / "target").glob("*.safetensors"))
    drafter_names = stored_names(pair / "drafter")
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.mlp.gate_proj.weight"} <= drafter_names
    assert len(drafter_names) == 3 + 2 * 11


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_load_their_slices(pair: Path, world_size: int) -> None:
    whole = load_target(pair / "target")
    size, head = whole.config.head_dim, whole.config.num_attention_heads // world_size
    for rank in range(world_size):
        part = load_target(pair / "target", Parallel(rank=rank, world_size=world_size))
        attention, whole_attention = part.layers[1].self_attn, whole.layers[1].self_attn
        rows = slice(rank * head * size, (rank + 1) * head * size)
        assert torch.equal(attention.qkv_proj.weight[: head * size], whole_attention.qkv_proj.weight[rows])
        assert torch.equal(attention.o_proj.weight, whole_attention.o_proj.weight[:, rows])
        start = part.vocab_offset
        real = max(0, min(part.lm_head.local_size, 101 - start))
        assert torch.equal(part.lm_head.weight[:real], whole.lm_head.weight[start : start + real])


def test_two_generations_of_rope_fields_read_the_same(tmp_path: Path) -> None:
    raw = target_sizes().to_dict()
    raw.pop("rope_theta")
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_target(tmp_path, load_format="dummy").config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling must be none"),
        ("attention_bias", True, "attention_bias must be False"),
        ("model_type", "llama", "model_type must be 'qwen3'"),
        ("layer_types", ["sliding_attention"], "layer_types must all be"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**target_sizes().to_dict(), field: value}))
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path, load_format="dummy")


def test_weights_that_disagree_with_config_are_refused(pair: Path) -> None:
    config = json.loads((pair / "drafter" / "config.json").read_text())
    (pair / "drafter" / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(ValueError, match="must have shape"):
        load_drafter(pair / "drafter")
    (pair / "drafter" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"must hold tensor 'layers\.2\."):
        load_drafter(pair / "drafter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 103}, "vocab_size of the drafter"),
        ({"hidden_size": 64}, "hidden_size of the drafter"),
        ({"num_hidden_layers": 2}, "num_target_layers of the drafter"),
    ],
)
def test_drafter_of_another_target_is_refused(pair: Path, change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_drafter(pair / "drafter", target=target_sizes(**change))


def test_unknown_names_are_answered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a folder with config"):
        resolve_model("no-such-model")
    with pytest.raises(ValueError, match="load_format must be one of"):
        load_target(write_config(tmp_path, target_sizes()), load_format="dumy")
    with pytest.raises(ValueError, match="a checkpoint folder must hold model"):
        load_target(tmp_path)
    assert bundled_drafter_of(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [lambda whole: whole[:-10], lambda whole: b"", lambda whole: whole[:20], lambda whole: b"x" * 100],
    ids=["truncated", "empty", "header-cut", "bad-header"],
)
@pytest.mark.parametrize("part", ["target", "drafter"])
def test_broken_weights_are_named(pair: Path, part: str, content: Callable[[bytes], bytes]) -> None:
    file = sorted((pair / part).glob("*.safetensors"))[-1]
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"{file.name} must be a whole safetensors file; .*bytes\); fetch it again"):
        load_target(pair / part) if part == "target" else load_drafter(pair / part)


def test_missing_shard_is_named(pair: Path) -> None:
    file = sorted((pair / "target").glob("model-*.safetensors"))[-1]
    file.unlink()
    with pytest.raises(ValueError, match=rf"{file.name} must exist, .*fetch it again"):
        load_target(pair / "target")


def test_shard_of_another_checkpoint_is_named(pair: Path) -> None:
    first, *_, last = sorted((pair / "target").glob("model-*.safetensors"))
    last.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=rf"{last.name} must hold tensor .*fetch it again"):
        load_target(pair / "target")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": null}}'])
def test_broken_index_is_named(pair: Path, content: str) -> None:
    (pair / "target" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json must hold .*fetch it again"):
        load_target(pair / "target")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"], ids=["empty", "torn", "list", "no-text"])
def test_broken_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json must hold .*fetch it again"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "x"),
        ("num_hidden_layers", None),
        ("vocab_size", True),
        ("hidden_size", 32.0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", None),
        ("rms_norm_eps", -1e-6),
        ("rope_theta", "x"),
        ("rope_parameters", 3),
        ("max_position_embeddings", 0),
        ("tie_word_embeddings", "yes"),
        ("layer_types", 3),
        ("architectures", ["LlamaForCausalLM"]),
        ("architectures", 3),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
    ],
    ids=str,
)
def test_config_field_of_no_use_is_named_with_its_file(tmp_path: Path, field: str, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**target_sizes().to_dict(), field: value}))
    with pytest.raises(ValueError, match=rf"config\.json: {field} must .*; got "):
        load_target(tmp_path, load_format="dummy")


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_missing_config_field_is_named_with_its_file(tmp_path: Path, field: str) -> None:
    raw = target_sizes().to_dict()
    del raw[field]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"config\.json: {field} must be an integer of at least 1; got nothing"):
        load_target(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    "absent", [{}, {"architectures": None, "num_key_value_heads": None, "head_dim": None}], ids=["out", "null"]
)
def test_what_a_config_may_leave_out_is_derived(tmp_path: Path, absent: dict[str, None]) -> None:
    raw = target_sizes().to_dict()
    for field in ("architectures", "num_key_value_heads", "head_dim"):
        del raw[field]
    (tmp_path / "config.json").write_text(json.dumps({**raw, **absent}))
    config = load_target(tmp_path, load_format="dummy").config
    assert (config.num_key_value_heads, config.head_dim) == (8, 4)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_size": "x"}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"architectures": None}, "architectures"),
        ({"dflash_config": 3}, "dflash_config"),
        ({"dflash_config": {"mask_token_id": "x", "target_layer_ids": [0]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": ["x"]}}, "target_layer_ids"),
    ],
    ids=str,
)
def test_drafter_field_of_no_use_is_named_with_its_file(tmp_path: Path, change: dict[str, object], field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**drafter_sizes(target_sizes()).to_dict(), **change}))
    with pytest.raises(ValueError, match=rf"config\.json: {field} must .*; got "):
        load_drafter(tmp_path, load_format="dummy")
