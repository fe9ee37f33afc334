"""What a comparison leaves: comparison.json, comparison.md, comparison.png and the compressed request records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_bench.compare.runner import Outcome
from ddtree_bench.compare.servers import safe_name
from ddtree_bench.records import provenance, write_json, write_text
from ddtree_bench.report.tables import figure

ARM_COLUMNS = ("arm", "setting", "ms/token", "tok/s", "acceptance length")
PAIR_COLUMNS = ("compared", "ratio of ms/token [95 %]", "speedup", "verdict")


def folder_name(first: str, second: str) -> str:
    """Return the folder of a comparison under a study's results."""
    return f"compare-{safe_name(first)}-vs-{safe_name(second)}"


def result_dict(outcome: Outcome, source: str) -> dict[str, Any]:
    """Return the content of comparison.json."""
    return {
        **outcome.comparison.to_dict(),
        "source": source,
        "setup": {name: dict(about) for name, about in outcome.arms.items()},
        "order": [list(names) for names in outcome.order],
        "load": dataclasses.asdict(outcome.load),
        "wall_s": round(outcome.wall_s, 1),
        "provenance": provenance(),
    }


def write_comparison(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the files of a comparison and compress its records."""
    from ddtree_bench.report.plots import comparison as plot
    from ddtree_bench.report.plots import style
    from ddtree_bench.trial.run import compress

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", dict(result))
    write_text(folder / "comparison.md", markdown(result))
    style.render("Ratio of ms per token", plot.data(result), plot.draw, folder / "comparison.png")
    for log in folder.glob("requests-*.jsonl"):
        compress(log)


def arm_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return what each arm measured, by ms per token; acceptance is the pooled acceptance length."""
    rank = {name: i for i, name in enumerate(result["ranking"])}
    arms = sorted(result["arms"], key=lambda arm: rank.get(arm["name"], len(rank)))
    figures = (("ms_per_token", 3), ("output_tok_s", 1), ("acceptance_length", 3))
    return [[arm["name"], arm["label"], *(figure(arm[key], digits) for key, digits in figures)] for arm in arms]


def pair_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return each pair; a verdict that is withheld leaves ratio and speedup empty."""
    rows = []
    for pair in result["pairs"]:
        ratio, verdict = pair["ratio"], pair["verdict"]
        is_shown = ratio is not None and verdict != "withheld"
        shown = f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if is_shown else ""
        speedup = "" if pair["speedup"] is None else f"{pair['speedup']:.3f}×"
        scope = f" ({pair['scope']})" if pair["scope"] and verdict not in ("withheld", "confounded") else ""
        rows.append([f"{pair['arm']} / {pair['baseline']}", shown, speedup, verdict + scope])
    return rows


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Return what belongs under the table: verdict, reasons, drift, certificates, notes."""
    main = result["pairs"][0]
    lines = [main["sentence"], *(reason for reason in main["reasons"] if reason not in main["sentence"])]
    if result["drift"] is None:
        lines.append("drift between blocks is unknown: one block was run")
    else:
        limit = "" if result["drift_limit"] is None else f" (limit {result['drift_limit']:.1%})"
        lines.append(f"{result['drift_arm']} drifted {result['drift']:.1%} between blocks{limit}")
    for certificate in result["certificates"]:
        lines.append(f"output of {certificate['arm']} against {certificate['baseline']}: {_certificate_text(certificate)}")
    if not result["certificates"]:
        lines.append("outputs were not compared: sampled text of two engines differs; a distribution test is needed")
    unknown = [f"{arm['name']}: {gate['name']}" for arm in result["arms"] for gate in arm["gates"] if gate["passed"] is None]
    if unknown:
        lines.append(f"gates that could not be checked: {'; '.join(unknown)}")
    return [*lines, *result["notes"]]


def _certificate_text(certificate: Mapping[str, Any]) -> str:
    text = f"{certificate['num_exact']} of {certificate['num_prompts']} prompts exact, {certificate['tokens_compared']:,} tokens"
    for key, word in (
        ("num_numeric_ties", "numeric ties"),
        ("num_real_differences", "real differences"),
        ("num_undecided", "differences not traced to a tie or a fault"),
    ):
        text += f", {certificate[key]} {word}" if certificate[key] else ""
    note = certificate.get("note") if certificate["num_numeric_ties"] else None
    return f"{text} ({note})" if note else text


def markdown(result: Mapping[str, Any]) -> str:
    """Return comparison.md."""
    first, second = result["pairs"][0]["baseline"], result["pairs"][0]["arm"]
    lines = [f"# {first} vs {second}", "", f"Settings from: {result['source']}.", ""]
    for columns, rows in ((ARM_COLUMNS, arm_rows(result)), (PAIR_COLUMNS, pair_rows(result))):
        lines += [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows), ""]
    lines += [f"- {text}" for text in remarks(result)]
    lines += ["", "## Arms", ""]
    lines += [f"- {name}: `{about['label']}` ({about['source']})" for name, about in result["setup"].items()]
    made = result["provenance"]
    lines += ["", f"Machine {made['machine']}, commit {made['commit']}, dirty {made['is_dirty']}, {made['when_utc']}.", ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
