"""The page of a study: complete, self-contained, right about failures; and the folder that `view` serves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from study_records import failed, full_trials, trial, write_study

from ddtree_bench.cli.report import command
from ddtree_bench.config import TreeSetting
from ddtree_bench.records import GateResult, write_json
from ddtree_bench.report.html import headline, render, write_report
from ddtree_bench.report.study import StudyResults, read_study
from ddtree_bench.report.tables import failure_rows, gate_rows, provenance_rows, serving_command, setting_rows
from ddtree_bench.report.view import make_app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = write_study(tmp_path_factory.mktemp("results") / "quickstart", full_trials())
    write_report(results)
    return results


def test_page_needs_nothing_from_outside(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "<script" not in page
    assert "@import" not in page
    assert page.count("data:image/svg+xml;base64,") == 6


def test_page_tells_result_gates_failures_and_command(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    for text in (
        "quickstart",
        "Fastest: tree",
        "losslessness",
        "out_of_memory",
        "ddtree-bench serve --model tiny-dense",
        "0" * 40,
    ):
        assert text in page
    assert "CUDA &lt;out of memory&gt;" in page
    assert len(list((folder / "plots").glob("*.png"))) == 6


def test_report_command_prints_the_answer(folder: Path) -> None:
    done = CliRunner().invoke(command, [str(folder), "--json"], catch_exceptions=False)
    told = json.loads(done.output.splitlines()[-1])
    assert told["report"].endswith("report.html")
    assert told["headline"].startswith("Fastest: tree")


def test_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold"):
        read_study(tmp_path)
    with pytest.raises(FileNotFoundError, match="must exist"):
        read_study(tmp_path / "none")


def test_thin_studies_have_a_page(thin_study: StudyResults) -> None:
    page = render(thin_study, {})
    assert "</html>" in page
    assert headline(thin_study) in page.replace("&#39;", "'")


def test_settings_are_ranked_by_time_and_not_by_acceptance(full_study: StudyResults) -> None:
    rows = setting_rows(full_study)
    times = [row.ms_per_token for row in rows]
    assert times == sorted(times)
    assert rows[0].is_best
    assert rows[0].acceptance_length < max(row.acceptance_length or 0 for row in rows)
    assert next(row for row in rows if row.mode == "plain").times_plain == pytest.approx(1.0)


def test_setting_over_a_constraint_is_not_the_answer(tmp_path: Path) -> None:
    over = trial(0, TreeSetting(node_budget=63), 900.0, 9.0, constraints={"launch_ok": 0.0, "ttft_p99_ms": 0.2})
    within = trial(1, TreeSetting(node_budget=7), 100.0, 2.0, constraints={"launch_ok": 0.0, "ttft_p99_ms": -0.1})
    study = read_study(write_study(tmp_path / "s", [over, within]))
    assert headline(study).startswith(f"Fastest: {within.label}")
    assert [(row.is_best, row.is_within_constraints) for row in setting_rows(study)] == [(False, False), (True, True)]


def test_baseline_of_a_sweep_is_the_plain_arm(tmp_path: Path) -> None:
    results = write_study(tmp_path / "s", [trial(0, TreeSetting(), 200.0, 2.0)])
    write_json(results / "baseline-plain" / "trial.json", trial(-1, TreeSetting(mode="plain"), 100.0, None).to_dict())
    assert [row.times_plain for row in setting_rows(read_study(results))] == pytest.approx([2.0, 1.0])


def test_plain_is_pooled_over_its_launches_and_its_drift_decides_on_the_factors(tmp_path: Path) -> None:
    results = write_study(tmp_path / "s", [trial(0, TreeSetting(), 200.0, 2.0)])
    with (results / "study.toml").open("a") as file:
        file.write("\n[gates]\ndrift = 0.05\n")
    plain = TreeSetting(mode="plain")
    write_json(results / "baseline-plain" / "trial.json", trial(-1, plain, 100.0, None).to_dict())
    assert "measured once" in read_study(results).drift.text
    assert setting_rows(read_study(results))[0].times_plain is None, "a drift that nobody measured allows no factor"
    write_json(results / "baseline-plain-2" / "trial.json", trial(-2, plain, 104.0, None).to_dict())
    study = read_study(results)
    rows = setting_rows(study)
    assert [row.times_plain for row in rows] == pytest.approx([1.02 * 200 / 104, 1.0])
    assert next(row.num_trials for row in rows if row.mode == "plain") == 2
    assert "lain decoding drifted by 3.85 % over 2 launches, limit 5 %" in render(study, {})
    write_json(results / "baseline-plain-10" / "trial.json", trial(-10, plain, 80.0, None).to_dict())
    assert "drifted by 25 % during the sweep, limit 5 %" in render(read_study(results), {})


def test_failed_gate_has_no_row_and_is_told(tmp_path: Path) -> None:
    gate = GateResult(name="losslessness", passed=False, detail="2 of 3 differ")
    unknown = GateResult(name="setting", passed=None, detail="the server does not tell its setting")
    trials = [
        trial(0, TreeSetting(), 900.0, 9.0, gates=(gate, unknown)),
        trial(1, TreeSetting(node_budget=3), 100.0, 2.0),
        failed(2, TreeSetting()),
    ]
    study = read_study(write_study(tmp_path / "s", trials))
    assert [row.trials for row in setting_rows(study)] == [[1]]
    assert [(row.number, row.kind) for row in failure_rows(study)] == [(0, "gate"), (2, "out_of_memory")]
    gates = {row.name: row for row in gate_rows(study)}
    assert (gates["losslessness"].num_passed, gates["losslessness"].num_failed) == (1, 1)
    assert gates["setting"].num_unknown == 1


def test_provenance_that_differs_is_shown_as_both() -> None:
    trials = [trial(i, TreeSetting(node_budget=3 + i), 100.0, 2.0, provenance={"commit": f"commit-{i}"}) for i in range(2)]
    study = StudyResults(folder=Path("s"), trials=trials)
    assert ("commit", "commit-0 and commit-1") in provenance_rows(study)


def test_serving_command_is_that_of_best_sh(folder: Path) -> None:
    assert serving_command(read_study(folder)) == "ddtree-bench serve --model tiny-dense --mode tree --node-budget 31"


async def test_view_serves_the_page_and_nothing_beyond(folder: Path) -> None:
    (folder / "server.log").write_text("secret")
    (folder.parent / "outside.txt").write_text("secret")
    async with TestClient(TestServer(make_app(folder))) as client:
        assert "quickstart" in await (await client.get("/")).text()
        assert (await client.get("/plots/pareto.png")).status == 200
        assert (await client.get("/server.log")).status == 404
        assert (await client.get("/%2e%2e/outside.txt")).status == 404
        assert (await client.get("/none")).status == 404
        assert (await client.get("/refresh")).status == 200


@pytest.mark.parametrize("content", ["[]", "{", json.dumps({"asked": {}, "metrics": None})], ids=["list", "torn", "no-metrics"])
async def test_refresh_tells_which_record_is_broken(tmp_path: Path, content: str) -> None:
    results = write_study(tmp_path / "study", full_trials())
    write_report(results)
    async with TestClient(TestServer(make_app(results))) as client:
        (results / "trial-000" / "trial.json").write_text(content, encoding="utf-8")
        reply = await client.get("/refresh")
        assert reply.status == 500
        assert "trial-000/trial.json must hold" in await reply.text()
        assert (await client.get("/")).status == 200


def test_headline_says_where_no_setting_meets_the_constraints() -> None:
    over = trial(0, TreeSetting(node_budget=31), 900.0, 9.0, constraints={"launch_ok": 0.0, "ttft_p50_ms": 0.2})
    text = headline(StudyResults(folder=Path("study"), trials=[over]))
    assert text.startswith("No setting meets the constraints. Without them the fastest: tree")


@pytest.mark.parametrize(
    ("name", "content"),
    [("study.toml", "[[["), ("study.toml", "study = 5"), ("trial-000/trial.json", "[]"), ("compare-a/comparison.json", "{}")],
    ids=["no-toml", "no-table", "no-trial", "no-comparison"],
)
def test_broken_file_of_a_study_is_named(tmp_path: Path, name: str, content: str) -> None:
    results = write_study(tmp_path / "study", full_trials())
    (results / name).parent.mkdir(exist_ok=True)
    (results / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} must"):
        read_study(results)
