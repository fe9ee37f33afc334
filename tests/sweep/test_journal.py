"""The journal survives torn writes; one sweep writes a folder at a time."""

from __future__ import annotations

import subprocess
import sys

import optuna
import pytest

from ddtree_bench.errors import DdtreeError
from ddtree_bench.sweep.journal import JOURNAL, open_storage, repair_journal
from ddtree_bench.sweep.lock import results_lock

GOOD = b'{"a":1}\n{"a":2}\n'


@pytest.mark.parametrize(
    "tail",
    [b'{"a":', b'{"a":3}', b"\n", b"\0\0\0\0", b"\xff\xfe\n", b'[1]\n{"a":4}\n', b'{"a":3{"a":4}\n'],
    ids=["half", "no-newline", "blank", "nul", "garbage", "not-an-object", "glued"],
)
def test_torn_tail_is_cut_and_kept(tmp_path, tail):
    path = tmp_path / JOURNAL
    path.write_bytes(GOOD + tail)
    assert repair_journal(path) == len(tail)
    assert path.read_bytes() == GOOD
    assert (tmp_path / f"{JOURNAL}.torn-1").read_bytes() == GOOD + tail
    assert repair_journal(path) == 0


def test_whole_empty_and_missing_journals_are_left_alone(tmp_path):
    path = tmp_path / JOURNAL
    assert repair_journal(path) == 0
    path.write_bytes(b"")
    assert repair_journal(path) == 0
    path.write_bytes(GOOD)
    assert repair_journal(path) == 0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_optuna_goes_on_with_a_torn_journal_and_a_stale_lock(tmp_path, cut):
    study = optuna.create_study(study_name="s", storage=open_storage(tmp_path, None))
    for value in range(3):
        study.tell(study.ask({"x": optuna.distributions.IntDistribution(0, 9)}), value)
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    (tmp_path / f"{JOURNAL}.lock").symlink_to(path)
    again = optuna.load_study(study_name="s", storage=open_storage(tmp_path, None))
    complete = optuna.trial.TrialState.COMPLETE
    assert len(again.get_trials(states=[complete])) == 2
    again.tell(again.ask(), 5.0)
    assert len(again.get_trials(states=[complete])) == 3


def test_database_url_is_honoured(tmp_path):
    storage = open_storage(tmp_path, f"sqlite:///{tmp_path}/study.db")
    optuna.create_study(study_name="s", storage=storage)
    assert (tmp_path / "study.db").exists()
    assert not (tmp_path / JOURNAL).exists()


@pytest.mark.parametrize("url", ["nosuch://name:secret@host", "no url", "sqlite:////none/study.db"], ids=lambda url: url[:6])
def test_database_that_cannot_be_had_is_named_without_its_password(tmp_path, url):
    with pytest.raises(DdtreeError, match=r"study\.storage must be the URL of a database") as error:
        open_storage(tmp_path, url)
    assert "secret" not in str(error.value)


HOLD = "import sys; from pathlib import Path; from ddtree_bench.sweep.lock import results_lock\n"
HOLD += "with results_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_second_sweep_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(DdtreeError, match=rf"one command at a time; process {holder.pid} is writing it"), results_lock(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with results_lock(tmp_path):
        pass
