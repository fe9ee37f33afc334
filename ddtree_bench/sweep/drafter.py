"""Reads the block size that a drafter was trained for from its config.json; no tensor library is needed for that."""

from __future__ import annotations

from pathlib import Path

import ddtree_bench
from ddtree_bench.config import ServerSpec
from ddtree_bench.records import read_json

BUNDLED = Path(ddtree_bench.__file__).parent / "models" / "bundled"


def drafter_block_size(server: ServerSpec) -> int | None:
    """Return the block size in the config of a server's drafter, root's slot included; None where it cannot be read here.

    A drafter is a folder, the name of a bundled one, or (none given) the bundled one of the model.
    """
    for folder in _folders(server):
        file = folder / "config.json"
        if file.is_file():
            config = read_json(file)
            if not isinstance(config, dict):
                raise ValueError(f"{file} must hold a JSON object; given {type(config).__name__}; take the drafter's own")
            found = config.get("block_size", (config.get("dflash_config") or {}).get("block_size"))
            return found if isinstance(found, int) else None
    return None


def _folders(server: ServerSpec) -> list[Path]:
    if server.drafter is not None:
        return [Path(server.drafter).expanduser(), BUNDLED / server.drafter]
    return [BUNDLED / f"{server.model}-dflash"]
