"""What `doctor` reads from checkpoint folders: whether target and drafter are whole, belong together, and divide over ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.cli.doctor_checks import OK, STOP, WARN, Line

BUNDLED = Path(__file__).parent.parent / "models" / "bundled"


def folder_of(given: str) -> Path:
    """Return the checkpoint folder of a bundled name, or the folder itself."""
    bundled = BUNDLED / given
    return bundled if "/" not in given and bundled.is_dir() else Path(given)


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return config.json, a text model's part lifted out of a multimodal one; None where it is missing or broken."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return {**config, **config.get("text_config", {})} if isinstance(config, dict) else None


def check(model: str | None, drafter: str | None, tensor_parallel: int) -> list[Line]:
    """Check what was named; a pair is checked where both were."""
    lines, configs = [], {}
    for name, given in (("model", model), ("drafter", drafter)):
        if given is None:
            continue
        folder = folder_of(given)
        config = read_config(folder)
        if config is None:
            do = "name a checkpoint folder that holds config.json, or a bundled model"
            lines.append(Line(name=name, status=STOP, found=f"no readable {folder}/config.json", do=do))
            continue
        configs[name] = config
        lines.append(_architecture(name, config))
        lines.append(_weights(name, folder))
        lines.append(_ranks(name, config, tensor_parallel))
        if name == "model":
            lines.append(_tokenizer(folder))
    if len(configs) == 2:
        lines += pair(configs["model"], configs["drafter"])
    return lines


def _architecture(name: str, config: Mapping[str, Any]) -> Line:
    known = {"drafter": ("DFlashDraftModel",), "model": ("Qwen3ForCausalLM",)}[name]
    given = list(config.get("architectures") or [])
    if any(one in known for one in given):
        return Line(
            name=name, status=OK, found=f"{given[0]}, {config.get('num_hidden_layers')} layers of {config.get('hidden_size')}"
        )
    if name == "drafter":
        return Line(name=name, status=STOP, found=f"architectures {given}", do="name a DFlash checkpoint (DFlashDraftModel)")
    do = "the embedded server loads Qwen3ForCausalLM; serve others with the backend sglang"
    return Line(name=name, status=WARN, found=f"architectures {given}", do=do)


def _weights(name: str, folder: Path) -> Line:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        wanted = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        missing = sorted(file for file in wanted if not (folder / file).exists())
        if missing:
            found = f"{len(missing)} of {len(wanted)} weight files are missing, e.g. {missing[0]}"
            return Line(name=f"{name} weights", status=STOP, found=found, do="download the checkpoint again")
    files = list(folder.glob("*.safetensors"))
    if not files:
        return Line(name=f"{name} weights", status=STOP, found="no *.safetensors", do="use a safetensors checkpoint")
    size = sum(file.stat().st_size for file in files)
    tiny = [file.name for file in files if file.stat().st_size < 1024]
    if tiny:
        return Line(
            name=f"{name} weights", status=STOP, found=f"{tiny[0]} is a pointer, not weights", do="run git lfs pull there"
        )
    return Line(name=f"{name} weights", status=OK, found=f"{len(files)} files, {size / 1e9:.2f} GB")


def _ranks(name: str, config: Mapping[str, Any], tensor_parallel: int) -> Line:
    """A rank needs whole query heads; key/value heads are split, or each is held by several ranks."""
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    found = f"{heads} query and {kv_heads} key/value heads over {tensor_parallel} ranks"
    if not heads or not kv_heads:
        return Line(name=f"{name} heads", status=WARN, found="config.json tells no heads", do="check the checkpoint")
    fits = heads % tensor_parallel == 0 and (kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0)
    do = "" if fits else "choose a tensor-parallel degree that divides the heads"
    return Line(name=f"{name} heads", status=OK if fits else STOP, found=found, do=do)


def _tokenizer(folder: Path) -> Line:
    if not (folder / "tokenizer.json").exists():
        return Line(name="tokenizer", status=STOP, found="no tokenizer.json", do="copy it from the same release as the weights")
    config = folder / "tokenizer_config.json"
    told = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    has_template = bool(told.get("chat_template")) or (folder / "chat_template.jinja").exists()
    found = "tokenizer.json" + (" with a chat template" if has_template else ", no chat template: the endpoint chat is off")
    return Line(name="tokenizer", status=OK, found=found)


def pair(model: Mapping[str, Any], drafter: Mapping[str, Any]) -> list[Line]:
    """Check that a drafter belongs to a target: widths, vocabularies, mask token, the target's layers it looks at."""
    special = drafter.get("dflash_config") or {}
    mask, layers = special.get("mask_token_id"), special.get("target_layer_ids")
    vocabulary, num_layers = model.get("vocab_size"), model.get("num_hidden_layers")
    faults = [
        f"{key} {model.get(key)} and {drafter.get(key)}"
        for key in ("hidden_size", "vocab_size")
        if model.get(key) != drafter.get(key)
    ]
    if mask is None or layers is None:
        faults.append("dflash_config holds no mask_token_id or target_layer_ids")
    elif vocabulary is not None and not 0 <= mask < vocabulary:
        faults.append(f"mask_token_id {mask} outside the vocabulary of {vocabulary}")
    if layers and num_layers is not None and max(layers) >= num_layers:
        faults.append(f"target layer {max(layers)} of a target with {num_layers}")
    trained_for = drafter.get("num_target_layers")
    if trained_for is not None and num_layers is not None and trained_for != num_layers:
        faults.append(f"trained for a target of {trained_for} layers, given {num_layers}")
    if faults:
        do = "take the drafter that was made for this target"
        return [Line(name="pair", status=STOP, found="they do not belong together: " + "; ".join(faults), do=do)]
    found = f"they belong together: width {model.get('hidden_size')}, vocabulary {vocabulary}, block {drafter.get('block_size')}"
    return [Line(name="pair", status=OK, found=found)]
