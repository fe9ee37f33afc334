"""One rank of a grid of runs: it builds an engine for each setting in turn and drives it in step with the other ranks.

    python lockstep_rank.py JOB.json RANK

The scheduler is deterministic, so ranks that submit the same and step the same stay together without commands between
them. Plain decoding goes first; its tokens are what the oracle drafter of the other settings knows. Every rank writes
what it saw to `rank<RANK>.json` beside the job.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_support import PLAIN, request_of, settings_of, use_oracle

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.engine import Engine
from ddtree_bench.engine.ranks import end_with_parent, join_group
from ddtree_bench.engine.request import GenerationRequest
from ddtree_bench.models.parallel import Parallel


def main() -> None:
    job_file, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(job_file.read_text())
    end_with_parent(job["parent_pid"])
    torch.set_num_threads(1)
    pair, degree = Path(job["pair"]), job["degree"]
    plain_settings = settings_of(pair, PLAIN, tensor_parallel=degree)
    if degree == 1:
        parallel = Parallel.single()
    else:
        parallel = join_group(plain_settings, rank, dist.FileStore(str(job_file.with_name("store")), degree))

    def requests(case: str, names: Sequence[str]) -> list[GenerationRequest]:
        return [request_of(name, job["prompts"][name], max_tokens=job["num_tokens"], **job["cases"][case]) for name in names]

    names = list(job["prompts"])
    engine = Engine(plain_settings, parallel)
    answers: dict[str, dict[str, list[int]]] = {}
    runs = []
    for case in job["cases"]:
        for batch in job["batches"]:
            run = drive(engine, requests(case, names[-batch:]))
            runs.append({"setting": PLAIN.label(), "case": case, "batch": batch, **run})
            if batch == len(names):
                answers[case] = run["tokens"]
    for values in job["settings"]:
        setting = TreeSetting(**values)
        engine = Engine(settings_of(pair, setting, tensor_parallel=degree), parallel)
        for case in job["cases"]:
            if setting.canonical().num_draft_tokens > 0:
                use_oracle(engine, job["prompts"], answers[case], hit_rate=job["hit_rate"], keeps_drafter=True)
            for batch in job["batches"]:
                run = drive(engine, requests(case, names[-batch:]))
                runs.append({"setting": setting.label(), "case": case, "batch": batch, **run})
    job_file.with_name(f"rank{rank}.json").write_text(json.dumps(runs))
    if degree > 1:
        dist.destroy_process_group()


def drive(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """Run requests to their ends and return their tokens and how many verify steps accepted at least d draft tokens."""
    before = engine.stats()
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for update in engine.step():
            assert update.finish_reason in (None, "length"), update
            tokens[update.request_id] += update.token_ids
    after = engine.stats()
    assert after.num_free_pages == after.num_total_pages, "every page must come back"
    old = [*before.accepted_per_depth, *[0] * len(after.accepted_per_depth)]
    return {
        "tokens": tokens,
        "num_verify_steps": after.num_verify_steps - before.num_verify_steps,
        "accepted_per_depth": [new - old[i] for i, new in enumerate(after.accepted_per_depth)],
    }


if __name__ == "__main__":
    main()
