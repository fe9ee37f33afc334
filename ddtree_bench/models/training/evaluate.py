"""Acceptance of the pair on held-out prompts, exactly, without running an engine.

A request's text does not depend on the drafter: plain decoding gives it once. The drafter's marginals at every
position of that text, the tree built from them, and the walk along the text give what each verify step accepts.

Shapes: B prompts, L text length, A roots of one text, D depths, K candidates, V vocabulary.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree_bench.models.dflash import DFlashModel
from ddtree_bench.models.qwen3 import Qwen3Model
from ddtree_bench.models.tokenizer import Tokenizer
from ddtree_bench.models.training.common import Machine
from ddtree_bench.models.training.drafter import TargetFeatures, draft_hidden
from ddtree_bench.models.training.prompts import read_prompts
from ddtree_bench.models.training.sampling import continue_rows
from ddtree_bench.models.weights import load_drafter, load_target
from ddtree_bench.records import provenance, write_json

TEMPERATURES = (0.0, 0.6)
DRAFT_TEMPERATURES = (0.6, 0.8, 1.0)
BUDGETS = (7, 15, 31, 63)
NUM_CANDIDATES = 64
ROWS_AT_ONCE = 64
MIN_TOKENS, MAX_TOKENS = 40, 320


@dataclasses.dataclass(frozen=True)
class Text:
    """One prompt's continuation and the drafter's candidates at each of its positions.

    Args:
        kind: the prompt's class.
        tokens_L: prompt and continuation, cut after the first end of text.
        prompt_length: tokens of the prompt; the first root is the token after it.
        topk_tokens_ADK, topk_logits_ADK: candidates for blocks rooted at prompt_length + a.
        log_total_TAD: log-sum-exp of the logits at each draft temperature T.
    """

    kind: str
    tokens_L: np.ndarray
    prompt_length: int
    topk_tokens_ADK: np.ndarray
    topk_logits_ADK: np.ndarray
    log_total_TAD: np.ndarray


def decode_texts(
    target: Qwen3Model, tokenizer: Tokenizer, prompts: list[list[int]], temperature: float, new_tokens: int
) -> list[list[int]]:
    """Return prompt + text of each prompt, cut after the first end of text."""
    device = target.embed_tokens.weight.device
    texts: list[list[int]] = []
    for start in range(0, len(prompts), 4 * ROWS_AT_ONCE):
        part = prompts[start : start + 4 * ROWS_AT_ONCE]
        longest = max(map(len, part))
        prompts_BP = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in part], device=device)
        lengths_B = torch.tensor([len(prompt) for prompt in part], device=device)
        temperature_B = torch.full((len(part),), temperature, device=device)
        rows = continue_rows(target, prompts_BP, lengths_B, longest + new_tokens, temperature_B, seed=5).tolist()
        for prompt, row in zip(part, rows, strict=True):
            text = row[len(prompt) : len(prompt) + new_tokens]
            ends = [index for index, token in enumerate(text) if token in tokenizer.eos_token_ids]
            texts.append(prompt + (text[: ends[0] + 1] if ends else text))
    return texts


@torch.no_grad()
def draft_texts(
    target: Qwen3Model,
    drafter: DFlashModel,
    rows: list[tuple[str, list[int], int]],
    block_size: int,
    new_tokens: int,
    machine: Machine,
) -> list[Text]:
    """Return each text with the drafter's candidates at every root."""
    features_of = TargetFeatures(target, drafter.config.target_layer_ids, Machine(machine.device, use_compile=False))
    texts = []
    rows_at_once = ROWS_AT_ONCE if machine.device.type == "cuda" else 4
    for start in range(0, len(rows), rows_at_once):
        part = rows[start : start + rows_at_once]
        length = max(len(tokens) for _, tokens, _ in part)
        tokens_BL = torch.tensor([t + [0] * (length - len(t)) for _, t, _ in part], device=machine.device)
        first_B1 = torch.tensor([[prompt_length] for _, _, prompt_length in part], device=machine.device)
        roots_BA = (first_B1 + torch.arange(new_tokens, device=machine.device)).clamp(max=length - 1)
        sizes_BA = torch.full_like(roots_BA, block_size)
        _, features_TC = features_of(tokens_BL)
        hidden_BAJD = draft_hidden(drafter, target.embed_tokens, tokens_BL, features_TC, roots_BA, sizes_BA, block_size)
        for index, (kind, tokens, prompt_length) in enumerate(part):
            num_roots = max(0, len(tokens) - prompt_length - 1)
            logits_ADV = target.local_logits(hidden_BAJD[index, :num_roots, 1:].flatten(0, 1)).float()
            top = logits_ADV.topk(NUM_CANDIDATES, dim=-1)
            totals = torch.stack([(logits_ADV / scale).logsumexp(-1) for scale in DRAFT_TEMPERATURES])
            shape = (num_roots, block_size - 1)
            texts.append(
                Text(
                    kind=kind,
                    tokens_L=np.asarray(tokens),
                    prompt_length=prompt_length,
                    topk_tokens_ADK=top.indices.view(*shape, NUM_CANDIDATES).cpu().numpy(),
                    topk_logits_ADK=top.values.view(*shape, NUM_CANDIDATES).cpu().numpy(),
                    log_total_TAD=totals.view(len(DRAFT_TEMPERATURES), *shape).cpu().numpy(),
                )
            )
    return texts


def replay_text(text: Text) -> dict[str, tuple[int, int]]:
    """Return, for each setting, (tokens accepted, verify steps) along one text.

    The budget-n tree is the first n + 1 nodes of any larger one, so one tree a root and draft temperature is built.
    """
    from ddtree_bench.tree import build_chain, build_ddtree_tree_from_topk, follow_verified_tree

    tokens_L, num_candidates = text.tokens_L, max(BUDGETS)
    totals: dict[str, tuple[int, int]] = {}
    for index, scale in enumerate(DRAFT_TEMPERATURES):
        accepted_of_root: dict[int, dict[str, int]] = {}
        names = [f"tree{budget}" for budget in BUDGETS] + (["linear"] if index == 0 else [])
        for name in names:
            root, num_accepted, num_steps = text.prompt_length, 0, 0
            while root < len(tokens_L) - 1:
                place = root - text.prompt_length
                if root not in accepted_of_root:
                    logprobs_DK = text.topk_logits_ADK[place] / scale - text.log_total_TAD[index, place][:, None]
                    arguments = (
                        logprobs_DK[:, :num_candidates].astype(np.float32),
                        text.topk_tokens_ADK[place][:, :num_candidates],
                    )
                    tree = build_ddtree_tree_from_topk(*arguments, node_budget=max(BUDGETS))
                    chain = build_chain(*arguments)
                    ahead = np.full(len(logprobs_DK) + 1, -1)
                    ahead[: len(tokens_L) - 1 - root] = tokens_L[root + 1 : root + 1 + len(ahead)]
                    walk = follow_verified_tree(tree, ahead[tree.depths_N])
                    chain_walk = follow_verified_tree(chain, ahead[chain.depths_N])
                    path = list(walk.node_indices)
                    accepted_of_root[root] = {f"tree{budget}": sum(node <= budget for node in path) - 1 for budget in BUDGETS} | {
                        "linear": chain_walk.num_accepted
                    }
                accepted = accepted_of_root[root][name]
                num_accepted += accepted
                num_steps += 1
                root += accepted + 1
            label = "linear" if name == "linear" else f"{name} at {scale}"
            totals[label] = (num_accepted, num_steps)
    return totals


def distinct_4grams(texts: list[Text]) -> float:
    """Return the share of 4-grams of the continuations that are distinct within their own text."""
    num_distinct = num_all = 0
    for text in texts:
        new = text.tokens_L[text.prompt_length :].tolist()
        grams = list(zip(new, new[1:], new[2:], new[3:], strict=False))
        num_distinct += len(set(grams))
        num_all += len(grams)
    return num_distinct / max(1, num_all)


def top1_by_depth(texts: list[Text]) -> list[float]:
    """Return, for each depth, how often the drafter's first choice is the text's token there."""
    num_depths = texts[0].topk_tokens_ADK.shape[1]
    hits, counts = np.zeros(num_depths), np.zeros(num_depths)
    for text in texts:
        first_AD = text.topk_tokens_ADK[:, :, 0]
        for place in range(len(first_AD)):
            ahead = text.tokens_L[text.prompt_length + place + 1 :][:num_depths]
            hits[: len(ahead)] += first_AD[place, : len(ahead)] == ahead
            counts[: len(ahead)] += 1
    return (hits / np.maximum(counts, 1)).round(3).tolist()


def pooled(texts: list[Text], replays: list[dict[str, tuple[int, int]]]) -> dict[str, dict[str, float]]:
    """Return acceptance_length of each setting, by class and over all."""
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for text, replay in zip(texts, replays, strict=True):
        for name, (num_accepted, num_steps) in replay.items():
            for group in (text.kind, "all"):
                sums[group][name][0] += num_accepted
                sums[group][name][1] += num_steps
    return {
        group: {name: round(1 + accepted / max(1, steps), 4) for name, (accepted, steps) in values.items()}
        for group, values in sums.items()
    }


def evaluate(
    target_dir: Path,
    drafter_dir: Path,
    results: Path,
    machine: Machine,
    *,
    prompts_path: Path,
    num_prompts: int,
    block_size: int,
    new_tokens: int,
) -> dict[str, Any]:
    """Print acceptance of chain and trees and return it; also written, with provenance, to results/evaluation.json."""
    tokenizer = Tokenizer.load(target_dir)
    target = load_target(target_dir, dtype=torch.float32, device=machine.device)
    drafter = load_drafter(drafter_dir, dtype=torch.float32, device=machine.device, target=target.config)
    rows = read_prompts(prompts_path)
    rows = [rows[index] for index in np.linspace(0, len(rows) - 1, min(num_prompts, len(rows))).astype(int)]
    encoded = [(row["class"], tokenizer.encode(row["prompt"])[:MAX_TOKENS]) for row in rows]
    encoded = [(kind, ids) for kind, ids in encoded if len(ids) >= MIN_TOKENS]
    result: dict[str, Any] = {
        "provenance": provenance(),
        "target": target_dir.name,
        "drafter": drafter_dir.name,
        "num_prompts": len(encoded),
        "block_size": block_size,
        "new_tokens": new_tokens,
    }
    workers = os.cpu_count() or 1
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for temperature in TEMPERATURES:
            start_s = time.monotonic()
            texts_tokens = decode_texts(target, tokenizer, [ids for _, ids in encoded], temperature, new_tokens)
            decoded_s = time.monotonic()
            pairs = [(kind, tokens, len(ids)) for (kind, ids), tokens in zip(encoded, texts_tokens, strict=True)]
            texts = draft_texts(target, drafter, pairs, block_size, new_tokens, machine)
            drafted_s = time.monotonic()
            replays = list(pool.map(replay_text, texts, chunksize=2))
            print(
                f"evaluate: temperature {temperature}: decoding {decoded_s - start_s:.1f} s, "
                f"drafting {drafted_s - decoded_s:.1f} s, replay {time.monotonic() - drafted_s:.1f} s",
                flush=True,
            )
            result[f"temperature_{temperature}"] = {
                "acceptance_length": pooled(texts, replays),
                "distinct_4grams": round(distinct_4grams(texts), 4),
                "top1_by_depth": top1_by_depth(texts),
                "num_output_tokens": sum(len(text.tokens_L) - text.prompt_length for text in texts),
            }
            show(temperature, result[f"temperature_{temperature}"])
            write_json(results / "evaluation.json", result)
    return result


def show(temperature: float, part: dict[str, Any]) -> None:
    """Print one temperature's table: a row a class, acceptance at the best draft temperature of each budget."""
    print(f"evaluate: distinct 4-grams {part['distinct_4grams']}, top-1 by depth {part['top1_by_depth']}")
    for group, values in sorted(part["acceptance_length"].items()):
        cells = [f"linear {values['linear']:.2f}"]
        for budget in BUDGETS:
            options = {scale: values[f"tree{budget} at {scale}"] for scale in DRAFT_TEMPERATURES}
            best = max(options, key=lambda scale: options[scale])
            cells.append(f"tree{budget} {options[best]:.2f} (x{options[best] / values['linear']:.2f} at {best})")
        print(f"evaluate: T={temperature} {group:10} " + "  ".join(cells), flush=True)
