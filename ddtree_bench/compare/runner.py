"""Runs the blocks of a comparison: every block sends the same prompts with the same seeds to every arm, one arm at a time."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_bench.backends.ready import server_info
from ddtree_bench.compare.arms import ArmSpec
from ddtree_bench.compare.servers import Servers, flat_config, safe_name, speculation_label
from ddtree_bench.config import LoadSpec, SweepSpec, TreeSetting
from ddtree_bench.metrics.certificate import Certificate, output_certificate
from ddtree_bench.metrics.comparison import Arm, Comparison, compare_arms
from ddtree_bench.records import GateResult, RequestRecord
from ddtree_bench.trial.gates import ASSUMPTION, divergence, effective_setting, setting_gate
from ddtree_bench.trial.measure import run_watched
from ddtree_bench.trial.plain import GatePrompt, PlainOutput, collect_plain

OnStage = Callable[[str], None]


@dataclass(kw_only=True)
class _Seen:
    """What was observed of one arm so far."""

    blocks: list[list[RequestRecord]] = field(default_factory=list)
    counters: dict[str, float] | None = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a comparison gave, and what it ran: arms by name with source, command and configuration, and the order of blocks."""

    comparison: Comparison
    arms: Mapping[str, Mapping[str, Any]]
    order: Sequence[Sequence[str]]
    load: LoadSpec
    wall_s: float


def run_comparison(
    arms: Sequence[ArmSpec],
    plain: ArmSpec | None,
    spec: SweepSpec,
    folder: Path,
    *,
    num_blocks: int = 4,
    seed: int = 0,
    keep_up: bool = True,
    on_stage: OnStage = lambda text: None,
) -> Outcome:
    """Run `num_blocks` interleaved blocks and compare arms[1] with arms[0]; records and logs go to `folder`.

    Raises:
        ServerError: a server did not start or died. Interrupted: SIGINT or SIGTERM; every server is stopped first.
    """
    start_s = time.monotonic()
    everyone = [*([plain] if plain is not None else []), *arms]
    seen = {arm.name: _Seen() for arm in everyone}
    order = block_order([arm.name for arm in everyone], num_blocks, seed)
    by_name = {arm.name: arm for arm in everyone}
    with Servers(folder, keep_up=keep_up) as servers:
        on_stage(f"starting {order[0][0]}")
        servers.get(by_name[order[0][0]])  # a start that fails leaves the records of an earlier comparison whole
        for old in folder.glob("requests-*.jsonl*"):
            old.unlink()
        for number, names in enumerate(order):
            for name in names:
                on_stage(f"block {number + 1} of {num_blocks}: {name}")
                _run_block(by_name[name], servers, seen[name], spec.load, folder, number)
        folded = _fold(everyone, seen)
        on_stage("comparing outputs")
        reference = plain if plain is not None else arms[0]
        certificates = [_certificate(reference, arm, folded, servers, spec) for arm in everyone if arm.name != reference.name]
    comparison = compare_arms(
        folded[arms[0].name],
        folded[arms[1].name],
        folded[plain.name] if plain is not None else None,
        certificates=[certificate for certificate in certificates if certificate is not None],
        drift_limit=spec.gates.drift,
        seed=seed,
    )
    about = {
        arm.name: {
            "label": folded[arm.name].label,
            "source": arm.source,
            "command": list(seen[arm.name].command),
            "config": dict(folded[arm.name].config),
        }
        for arm in everyone
    }
    return Outcome(comparison=comparison, arms=about, order=order, load=spec.load, wall_s=time.monotonic() - start_s)


def block_order(names: Sequence[str], num_blocks: int, seed: int) -> list[list[str]]:
    """Return the arms' order in each block: shuffled by seed, so that no arm is always the first."""
    rng = random.Random(seed)
    return [rng.sample(list(names), len(names)) for _ in range(num_blocks)]


def _run_block(arm: ArmSpec, servers: Servers, seen: _Seen, load: LoadSpec, folder: Path, number: int) -> None:
    is_warm = servers.is_up(arm)
    running = servers.get(arm)
    seen.info, seen.command = server_info(running.url), running.command
    load = dataclasses.replace(load, num_warmups=min(1, load.num_warmups)) if is_warm else load
    result = run_watched(running, load, log_path=folder / f"requests-{safe_name(arm.name)}-{number}.jsonl")
    seen.blocks.append(list(result.records))
    values = result.counters.values
    if seen.counters is not None:
        seen.counters = {k: seen.counters.get(k, 0.0) + v for k, v in values.items()} if values else None
    servers.release(arm)


def _fold(arms: Sequence[ArmSpec], seen: Mapping[str, _Seen]) -> dict[str, Arm]:
    """Return the arms as the metrics take them; beside a foreign server only what all arms tell can be compared."""
    configs = {arm.name: flat_config(arm, seen[arm.name].info) for arm in arms}
    if any(arm.server.backend == "attach" for arm in arms):
        shared = set.intersection(*(set(config) for config in configs.values())) - {"mode"}
        configs = {name: {key: config[key] for key in shared} for name, config in configs.items()}
    folded = {}
    for arm in arms:
        running = effective_setting(seen[arm.name].info)
        gates: list[GateResult] = [] if arm.setting is None else [setting_gate(arm.setting, running)]
        folded[arm.name] = Arm(
            name=arm.name,
            label=_label_of(arm, running, seen[arm.name].info),
            blocks=seen[arm.name].blocks,
            config=configs[arm.name],
            gates=gates,
            counters=seen[arm.name].counters,
        )
    return folded


def _label_of(arm: ArmSpec, running: TreeSetting | None, info: Mapping[str, Any]) -> str:
    """Return the setting; of a server that someone else runs what it tells of its speculation, else its URL."""
    if arm.setting is not None:
        return arm.label
    if running is not None:
        return running.label()
    told = speculation_label(info)
    return arm.label if told is None else f"{arm.label}: {told}"


def _certificate(
    reference: ArmSpec, arm: ArmSpec, folded: Mapping[str, Arm], servers: Servers, spec: SweepSpec
) -> Certificate | None:
    """Return the certificate against the reference; None where sampled text cannot be compared (another engine's noise).

    In float32 every difference is real. In bfloat16 the reference is asked for its top two at every difference: one that stays
    undecided withholds the verdict.
    """
    is_own_noise = reference.server.backend == arm.server.backend == "embedded"
    if spec.load.temperature > 0 and not is_own_noise:
        return None
    is_foreign = "attach" in (reference.server.backend, arm.server.backend)  # nobody vouches for its arithmetic
    if reference.server.dtype == "float32" and not is_foreign:
        return output_certificate(folded[reference.name], folded[arm.name])
    if spec.load.temperature > 0:
        return output_certificate(folded[reference.name], folded[arm.name], lambda *_: "undecided")
    differing = _differing_prompts(folded[reference.name], folded[arm.name])
    known = _ask_target(reference, differing, servers, spec) if differing else {}

    def classify(first: RequestRecord, second: RequestRecord) -> str:
        output = known.get(first.prompt_id)
        if output is None:
            return "undecided"
        verdicts = [divergence(output, record.reasoning + record.text) for record in (first, second)]
        apart = [verdict for verdict in verdicts if verdict is not None]
        if any(verdict["gap"] is None for verdict in apart):
            return "undecided"
        return "tie" if all(verdict["is_tie"] for verdict in apart) else "real"

    certificate = output_certificate(folded[reference.name], folded[arm.name], classify)
    is_assumed = any(output.top_logits is None for output in known.values())
    return dataclasses.replace(certificate, note=ASSUMPTION) if is_assumed else certificate


def _differing_prompts(first: Arm, second: Arm) -> list[str]:
    texts = [{(k, r.prompt_id): r.text for k, block in enumerate(arm.blocks) for r in block} for arm in (first, second)]
    return sorted({key[1] for key in texts[0].keys() & texts[1].keys() if texts[0][key] != texts[1][key]})


def _ask_target(reference: ArmSpec, prompt_ids: Sequence[str], servers: Servers, spec: SweepSpec) -> dict[str, PlainOutput]:
    """Return the reference's greedy outputs with its top two tokens; none for chat, whose template is the server's."""
    from ddtree_bench.load.workloads import workload_of

    if spec.load.endpoint == "chat":
        return {}
    prompts = [p for p in workload_of(spec.load).prompts if p.prompt_id in set(prompt_ids) and p.text is not None]
    asked = [GatePrompt(prompt_id=p.prompt_id, text=p.text or "", max_tokens=p.output_tokens) for p in prompts]
    running = servers.get(reference)
    outputs = collect_plain(
        running.url,
        running.model,
        asked,
        max_tokens=spec.load.max_tokens,
        timeout_s=spec.load.timeout_s,
        extra={"ignore_eos": True} if spec.load.ignore_eos else {},
    )
    return {output.prompt_id: output for output in outputs}
