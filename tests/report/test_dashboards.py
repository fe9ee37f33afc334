"""The Grafana board asks for counters that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_board_names_metrics_of_the_server() -> None:
    board = json.loads((REPOSITORY / "dashboards" / "grafana.json").read_text(encoding="utf-8"))
    server = (REPOSITORY / "ddtree_bench" / "server" / "metrics.py").read_text(encoding="utf-8")
    queries = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    names = set(re.findall(r"(?:vllm|sglang|ddtree):(\w+)", queries))
    assert len(names) > 5
    for name in names:
        assert name.removesuffix("_total") in server, name
