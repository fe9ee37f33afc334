"""The files beside the weights: NOTICE with what was trained on, and a model card; and a check of sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree_bench.models.training.settings import Workdir
from ddtree_bench.models.weights import MAX_SHARD_BYTES

MAX_TOTAL_BYTES = 30_000_000
CARDS = {
    "target": """# tiny-dense

A small language model of Python code for tests and demonstrations of speculative decoding on one machine. Qwen3
architecture, trained from scratch by `python -m ddtree_bench.models.training`. It writes text that looks like
code; it is no assistant, and what it writes should not be relied on.

{facts}
Trained on Python files of permissively licensed packages, listed in NOTICE with versions, licences and hashes.
Files of the packages marked "held out" there were not trained on; the prompts that ship are cut from those.
""",
    "drafter": """# tiny-dense-dflash

The DFlash drafter of tiny-dense: it fills a block of up to 16 slots in one pass, conditioned on hidden states of
three target layers, and uses the target's embedding and head. Trained first on the same files as its target (see
the NOTICE there), then mostly on the target's own text.

{facts}
""",
}


def last_row(path: Path, key: str) -> dict[str, Any]:
    """Return the last row of a stage's log that has `key`, empty if there is none."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((row for row in reversed(rows) if key in row), {})


def notice_text(manifest: list[dict[str, Any]]) -> str:
    """Return NOTICE: one row a package."""
    head = (
        "The weights in this folder were trained on Python source files of the packages below, which are under the\n"
        "licences named, as stated by each package's own metadata. sha256 is over the hashes of the files used.\n"
        "Packages marked 'held out' were not trained on.\n\n"
        "package | version | licence | use | files | bytes | sha256\n"
    )
    columns = ("package", "version", "licence", "use", "num_files", "bytes", "sha256")
    return head + "".join(" | ".join(str(entry[name]) for name in columns) + "\n" for entry in manifest)


def export(workdir: Workdir) -> None:
    """Write NOTICE and cards, and check that files and total stay within what is shipped.

    Raises:
        ValueError: a file or the total is too large.
    """
    trained, drafted = last_row(workdir.log("target"), "validation_loss"), last_row(workdir.log("drafter"), "roots_m")
    target_facts = drafter_facts = ""
    if trained:
        target_facts = (
            f"Training tokens: {trained['tokens_m']:.0f} M. "
            f"Loss on held-out files of the same packages: {trained['validation_loss']:.3f} nats a token.\n\n"
        )
    if drafted:
        drafter_facts = f"Blocks trained on: {drafted['roots_m']:.1f} M.\n"
    if target_facts or not (workdir.target / "MODEL_CARD.md").exists():
        (workdir.target / "MODEL_CARD.md").write_text(CARDS["target"].format(facts=target_facts))
    if workdir.manifest.exists():
        (workdir.target / "NOTICE").write_text(notice_text(json.loads(workdir.manifest.read_text())))
    if (workdir.drafter / "config.json").exists():
        (workdir.drafter / "MODEL_CARD.md").write_text(CARDS["drafter"].format(facts=drafter_facts))
        (workdir.drafter / "NOTICE").write_text("See NOTICE in tiny-dense: the same files were used.\n")
    total = 0
    for path in sorted((workdir.root / "export").rglob("*")):
        if path.is_file():
            total += path.stat().st_size
            print(f"export: {path.stat().st_size:12,} {path.relative_to(workdir.root)}", flush=True)
            if path.stat().st_size > MAX_SHARD_BYTES:
                raise ValueError(f"a file must have at most {MAX_SHARD_BYTES} bytes; {path} has {path.stat().st_size}")
    if total > MAX_TOTAL_BYTES:
        raise ValueError(f"both models together must have at most {MAX_TOTAL_BYTES} bytes; they have {total}")
