"""One trial = one launched server, its gates, its load, one TrialRecord (DESIGN sections 3 and 5)."""

from ddtree_bench.trial.interrupt import Interrupted, interruptible
from ddtree_bench.trial.run import TrialJob, run_trial

__all__ = ["Interrupted", "TrialJob", "interruptible", "run_trial"]
