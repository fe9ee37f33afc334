"""Checkpoints: which stored tensor, or which part of it, each parameter of this rank is.

Names in files are Hugging Face's for the target and z-lab's for the drafter; inside, query/key/value and gate/up
are fused. Both directions, and random weights, go through one table of slices, so a rank reads only what it holds.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddtree_bench.models.dflash import DFlashConfig, DFlashModel
from ddtree_bench.models.parallel import Parallel
from ddtree_bench.models.qwen3 import Qwen3Config, Qwen3Model

MAX_SHARD_BYTES = 16 * 1024 * 1024
BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_DRAFTERS = {"tiny-dense": "tiny-dense-dflash"}
LOAD_FORMATS = ("auto", "dummy")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of one stored tensor: [start, stop) along `dim`; the whole shape is kept for checks and dummies."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    stop: int | None = None

    @property
    def end(self) -> int:
        return self.shape[self.dim] if self.stop is None else self.stop


Table = dict[str, list[Piece]]
"""Parameter name -> pieces concatenated along axis 0."""

Read = Callable[[Piece], torch.Tensor]
Config = TypeVar("Config", Qwen3Config, DFlashConfig)


def layer_table(prefix: str, stored_prefix: str, config: Qwen3Config, parallel: Parallel) -> Table:
    """Return the pieces of one decoder layer's parameters on this rank."""
    hidden, ffn, size = config.hidden_size, config.intermediate_size, config.head_dim
    query = [size * head for head in parallel.shard_range(config.num_attention_heads, "num_attention_heads")]
    value = [size * head for head in parallel.kv_head_range(config.num_key_value_heads)]
    inner = parallel.shard_range(ffn, "intermediate_size")
    query_rows, value_rows = size * config.num_attention_heads, size * config.num_key_value_heads

    def rows(name: str, num_rows: int, span: Any) -> Piece:
        return Piece(f"{stored_prefix}{name}.weight", (num_rows, hidden), 0, *span)

    def columns(name: str, num_columns: int, span: Any) -> Piece:
        return Piece(f"{stored_prefix}{name}.weight", (hidden, num_columns), 1, *span)

    def vector(name: str, length: int) -> Piece:
        return Piece(f"{stored_prefix}{name}.weight", (length,))

    table = {
        "self_attn.qkv_proj": [
            rows("self_attn.q_proj", query_rows, query),
            rows("self_attn.k_proj", value_rows, value),
            rows("self_attn.v_proj", value_rows, value),
        ],
        "self_attn.o_proj": [columns("self_attn.o_proj", query_rows, query)],
        "self_attn.q_norm": [vector("self_attn.q_norm", size)],
        "self_attn.k_norm": [vector("self_attn.k_norm", size)],
        "mlp.gate_up_proj": [rows("mlp.gate_proj", ffn, inner), rows("mlp.up_proj", ffn, inner)],
        "mlp.down_proj": [columns("mlp.down_proj", ffn, inner)],
        "input_layernorm": [vector("input_layernorm", hidden)],
        "post_attention_layernorm": [vector("post_attention_layernorm", hidden)],
    }
    return {f"{prefix}{name}.weight": pieces for name, pieces in table.items()}


def target_table(config: Qwen3Config, parallel: Parallel) -> Table:
    """Return the pieces of every parameter of the target on this rank."""
    local_size = -(-config.vocab_size // parallel.world_size)
    start = min(parallel.rank * local_size, config.vocab_size)
    stop = min(start + local_size, config.vocab_size)
    whole = (config.vocab_size, config.hidden_size)
    table: Table = {
        "embed_tokens.weight": [Piece("model.embed_tokens.weight", whole, 0, start, stop)],
        "norm.weight": [Piece("model.norm.weight", (config.hidden_size,))],
    }
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = [Piece("lm_head.weight", whole, 0, start, stop)]
    for index in range(config.num_hidden_layers):
        table |= layer_table(f"layers.{index}.", f"model.layers.{index}.", config, parallel)
    return table


def drafter_table(config: DFlashConfig, parallel: Parallel) -> Table:
    """Return the pieces of every parameter of the drafter on this rank."""
    hidden = config.hidden_size
    features = parallel.shard_range(config.num_features, "the drafter's feature width")
    table: Table = {
        "fc.weight": [Piece("fc.weight", (hidden, config.num_features), 1, *features)],
        "hidden_norm.weight": [Piece("hidden_norm.weight", (hidden,))],
        "norm.weight": [Piece("norm.weight", (hidden,))],
    }
    for index in range(config.layers.num_hidden_layers):
        table |= layer_table(f"layers.{index}.", f"layers.{index}.", config.layers, parallel)
    return table


class StoredTensors:
    """The safetensors of one folder, single file or sharded with an index; reads slices only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.file_of: dict[str, str] = _weight_map(index)
        elif (folder / "model.safetensors").exists():
            with _opened(folder / "model.safetensors") as handle:
                self.file_of = dict.fromkeys(handle.keys(), "model.safetensors")
        else:
            raise ValueError(
                f"a checkpoint folder must hold model.safetensors or model.safetensors.index.json; {folder} "
                "holds neither; pass the folder that the checkpoint was downloaded to"
            )
        self.handles: dict[str, Any] = {}

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the piece from disk.

        Raises:
            ValueError: the tensor is missing, its shape disagrees with config.json, or its file is missing or broken.
        """
        if piece.name not in self.file_of:
            raise ValueError(
                f"{self.folder} must hold tensor {piece.name!r}; it holds {len(self.file_of)} others; "
                "check that weights and config.json belong together"
            )
        file = self.file_of[piece.name]
        if file not in self.handles:
            self.handles[file] = _opened(self.folder / file)
        try:
            stored = self.handles[file].get_slice(piece.name)
        except SafetensorError as error:
            raise ValueError(
                f"{self.folder / file} must hold tensor {piece.name!r}, as the index says; {error}; fetch it again"
            ) from error
        if tuple(stored.get_shape()) != piece.shape:
            raise ValueError(
                f"{piece.name} must have shape {piece.shape} by config.json; the file in {self.folder} has "
                f"{tuple(stored.get_shape())}; check that weights and config.json belong together"
            )
        if piece.dim == 1:
            return stored[:, piece.start : piece.end]
        return stored[piece.start : piece.end]


def _opened(file: Path) -> Any:
    """Open one file of a checkpoint.

    Raises:
        ValueError: it is missing, or no whole safetensors file; names it and the reason.
    """
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(f"{file} must exist, the checkpoint's index names it; there is no such file; fetch it again") from error
    except SafetensorError as error:
        size = file.stat().st_size
        raise ValueError(f"{file} must be a whole safetensors file; {error} (it has {size} bytes); fetch it again") from error


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor by a checkpoint's index; ValueError names the index where it is broken."""
    found = _read_object(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index} must hold weight_map, tensor names to file names; it does not; fetch it again")
    return found


def dummy_reader(seed: int, device: torch.device | str) -> Read:
    """Return a reader of random weights that depend on seed and tensor name only, not on the rank."""

    def read(piece: Piece) -> torch.Tensor:
        if len(piece.shape) == 1:
            return torch.ones(piece.shape, device=device)[piece.start : piece.end]
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(piece.name.encode()))
        std = 0.02 if "embed_tokens" in piece.name else piece.shape[1] ** -0.5
        whole = torch.randn(piece.shape, generator=generator, device=device) * std
        return whole.narrow(piece.dim, piece.start, piece.end - piece.start)

    return read


def fill(module: torch.nn.Module, table: Table, read: Read, dtype: torch.dtype, device: torch.device | str) -> None:
    """Allocate every parameter of a module on the meta device and copy its pieces in; padding rows become zero."""
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        data = torch.zeros(parameter.shape, dtype=dtype, device=device)
        row = 0
        for piece in table[name]:
            part = read(piece)
            data[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        owner.weight = torch.nn.Parameter(_laid_out(data), requires_grad=False)


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Return the same values in the memory layout that the device multiplies fastest.

    Decoding multiplies a few rows by Wᵀ. In float32 on the CPU that takes a third less time at one row, and a fifth less
    at sixteen, where Wᵀ is what lies contiguously; so W [out, in] becomes a transposed view of it. Elsewhere W stays.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.ndim == 2:
        return weight.t().contiguous().t()
    return weight


def reader_of(folder: Path, load_format: str, seed: int, device: torch.device | str) -> Read:
    """Return the reader that `load_format` names."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {LOAD_FORMATS}; got {load_format!r}; choose one of them")
    return dummy_reader(seed, device) if load_format == "dummy" else StoredTensors(folder).read


def read_config(folder: Path | str) -> dict[str, Any]:
    """Return a checkpoint folder's config.json.

    Raises:
        ValueError: it is missing, is not JSON, or holds no object; names it.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise ValueError(f"a checkpoint folder must hold config.json; {folder} does not; pass another folder")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must hold JSON; {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; given {type(value).__name__}; fetch it again")
    return value


def _config_of(folder: Path | str, read: Callable[[dict[str, Any]], Config]) -> Config:
    """Return a checkpoint's sizes; what is wrong with a field is told with the file it stands in."""
    raw = read_config(folder)
    try:
        return read(raw)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from error


def load_target(
    folder: Path | str,
    parallel: Parallel | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
) -> Qwen3Model:
    """Load this rank's shard of a Qwen3 checkpoint; `dummy` needs config.json alone.

    Raises:
        ValueError: unsupported config, missing or misshapen tensors, a degree that does not divide the sizes.
    """
    parallel = parallel or Parallel.single()
    config = _config_of(folder, Qwen3Config.from_dict)
    with torch.device("meta"):
        model = Qwen3Model(config, parallel)
    fill(model, target_table(config, parallel), reader_of(Path(folder), load_format, seed, device), dtype, device)
    return model.eval()


def load_drafter(
    folder: Path | str,
    parallel: Parallel | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    target: Qwen3Config | None = None,
) -> DFlashModel:
    """Load this rank's shard of a DFlash checkpoint, checked against `target` when that is given.

    Raises:
        ValueError: as load_target, or the drafter belongs to another target.
    """
    parallel = parallel or Parallel.single()
    config = _config_of(folder, DFlashConfig.from_dict)
    if target is not None:
        check_pair(target, config)
    with torch.device("meta"):
        model = DFlashModel(config, parallel)
    fill(model, drafter_table(config, parallel), reader_of(Path(folder), load_format, seed, device), dtype, device)
    return model.eval()


def check_pair(target: Qwen3Config, drafter: DFlashConfig) -> None:
    """Raise ValueError unless the drafter was made for a target of these sizes."""
    pairs = {
        "vocab_size": (target.vocab_size, drafter.layers.vocab_size),
        "hidden_size": (target.hidden_size, drafter.hidden_size),
        "num_target_layers": (target.num_hidden_layers, drafter.num_target_layers),
    }
    for name, (wanted, given) in pairs.items():
        if wanted != given:
            raise ValueError(
                f"{name} of the drafter must be the target's; got {given} for a target with {wanted}; "
                "pass the drafter that was trained for this target"
            )
    if not all(0 <= layer < target.num_hidden_layers for layer in drafter.target_layer_ids):
        raise ValueError(
            f"target_layer_ids must be in [0, {target.num_hidden_layers}); got {list(drafter.target_layer_ids)}; "
            "pass the drafter that was trained for this target"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise ValueError(
            f"mask_token_id must be in [0, {target.vocab_size}); got {drafter.mask_token_id}; "
            "pass the drafter that was trained for this target"
        )


def stored_tensors(module: torch.nn.Module, table: Table) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (stored name, tensor) of a whole, unsharded module: fused parameters taken apart again."""
    for name, parameter in module.named_parameters():
        row = 0
        for piece in table[name]:
            num_rows = piece.shape[0]
            yield piece.name, parameter.detach()[row : row + num_rows]
            row += num_rows


def save_tensors(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Write safetensors, none larger than `max_shard_bytes`, and an index when there are several."""
    room = max_shard_bytes - 65_536
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in tensors:
        data = tensor.to(dtype=dtype, device="cpu").contiguous().clone()
        if data.nbytes > room:
            raise ValueError(
                f"max_shard_bytes must hold the largest tensor; {name} has {data.nbytes} bytes and "
                f"max_shard_bytes is {max_shard_bytes}; raise it"
            )
        if used + data.nbytes > room:
            shards.append({})
            used = 0
        shards[-1][name] = data
        used += data.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(data.nbytes for shard in shards for data in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json of a checkpoint."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_target(
    model: Qwen3Model,
    folder: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_config: dict[str, Any] | None = None,
) -> None:
    """Write config.json and weights of an unsharded target."""
    tensors = stored_tensors(model, target_table(model.config, Parallel.single()))
    save_tensors(Path(folder), tensors, dtype, max_shard_bytes)
    write_config(Path(folder), model.config.to_dict() | (extra_config or {}))


def save_drafter(
    model: DFlashModel,
    folder: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_config: dict[str, Any] | None = None,
) -> None:
    """Write config.json and weights of an unsharded drafter."""
    tensors = stored_tensors(model, drafter_table(model.config, Parallel.single()))
    save_tensors(Path(folder), tensors, dtype, max_shard_bytes)
    write_config(Path(folder), model.config.to_dict() | (extra_config or {}))


def resolve_model(name_or_dir: str | Path) -> Path:
    """Return the checkpoint folder of a bundled name, or the folder itself.

    Raises:
        ValueError: neither.
    """
    path = Path(name_or_dir)
    if (path / "config.json").exists():
        return path
    if (BUNDLED / path / "config.json").exists():
        return BUNDLED / path
    known = sorted(folder.parent.name for folder in BUNDLED.glob("*/config.json"))
    raise ValueError(
        f"a model must be a folder with config.json or one of {known}; got {str(name_or_dir)!r}; pass a local checkpoint folder"
    )


def bundled_drafter_of(name_or_dir: str | Path) -> Path | None:
    """Return the folder of the drafter that ships for a bundled target, None for any other target."""
    drafter = BUNDLED_DRAFTERS.get(Path(name_or_dir).name)
    is_bundled = drafter is not None and resolve_model(name_or_dir).parent == BUNDLED
    return BUNDLED / drafter if is_bundled and drafter else None
