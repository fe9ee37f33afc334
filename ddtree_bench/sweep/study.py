"""The Optuna side of a sweep: ask, tell, and bring the journal in line with the trial.json files, which are the truth.

One process writes. A canonical setting is launched once; what the sampler asks again is told PRUNED. A setting's own fault is
told COMPLETE with its constraints violated at the reference point, so that every sampler learns from it; the machine's fault
and an interrupt are told FAIL, and the setting comes again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.config import StudySpec, TreeSetting
from ddtree_bench.errors import DdtreeError, MissingPackageError
from ddtree_bench.records import TrialRecord
from ddtree_bench.sweep.objective import Reference, objective_values, setting_of
from ddtree_bench.sweep.space import Space, start_params

MAX_REASKS = 20
MAX_ATTEMPTS = 3  # the first launch and two more after failures of the machine
TRIAL = "trial"  # user attribute of an Optuna trial: the trial's own number, as in trial-NNN
MACHINE_FAULT = "machine_fault"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to launch next: indices, values, canonical setting; `optuna_trial` takes the result."""

    params: Mapping[str, int]
    values: Mapping[str, Any]
    setting: TreeSetting
    optuna_trial: Any


class Study:
    """Asks for settings and is told records. Holds nothing that is not in the storage or in the trial files."""

    def __init__(
        self, spec: StudySpec, space: Space, storage: Any, reference: Reference, constraint_names: Sequence[str]
    ) -> None:
        import optuna

        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._spec, self._space, self._reference = spec, space, reference
        self._constraint_names = ("launch_ok", *constraint_names)
        self._study = optuna.create_study(
            study_name=spec.name, storage=storage, directions=["maximize"] * len(spec.objectives), load_if_exists=True
        )
        self._refuse_other_objectives()
        seed = seed_of(spec.seed, len(self._study.get_trials(deepcopy=False)))
        self._study.sampler = make_sampler(spec.sampler, seed)
        self._rng = random.Random(seed)
        self._measured: dict[TreeSetting, int] = {}
        self._unsettled: list[Mapping[str, int]] = []
        self._settings = space.settings()
        if spec.sampler == "grid" and self._settings is None:
            raise ValueError(
                f"study.sampler grid must have a space that can be listed; given {space.num_combinations()} combinations"
            )

    def _refuse_other_objectives(self) -> None:
        kept = self._study.user_attrs.get("objectives")
        given = list(self._spec.objectives)
        maximize = self._optuna.study.StudyDirection.MAXIMIZE
        directions = list(self._study.directions)
        if directions != [maximize] * len(given) or (kept is not None and kept != given):
            raise DdtreeError(
                f"study.objectives must be those that the study {self._spec.name!r} was made with "
                f"({kept or [d.name for d in directions]}); given {given}; name another study or results folder"
            )
        if kept is None:
            self._study.set_user_attr("objectives", given)

    @property
    def distributions(self) -> dict[str, Any]:
        """Return fixed integer ranges of indices, one a knob with a choice."""
        integers = self._optuna.distributions.IntDistribution
        return {name: integers(0, count - 1) for name, count in self._space.ranges().items()}

    @property
    def num_repeats(self) -> int:
        """Return how many settings the sampler asked for that were measured already."""
        return len(self._trials(self._optuna.trial.TrialState.PRUNED))

    @property
    def num_legal(self) -> int | None:
        """Return how many canonical settings the space holds; None where it is too large to list."""
        return None if self._settings is None else len(self._settings)

    def _trials(self, *states: Any) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False, states=states))

    def reconcile(self, records: Sequence[TrialRecord]) -> list[str]:
        """Bring the storage in line with the settled records; return a line for each thing that was put right.

        Trials that a dead driver left RUNNING or WAITING are failed; records that the storage lacks are added; settings that
        were asked and have no record are asked again.
        """
        state = self._optuna.trial.TrialState
        lines = []
        while self._trials(state.WAITING):
            self._study.tell(self._study.ask(self.distributions), state=state.FAIL)
        for orphan in self._trials(state.RUNNING):
            self._study.tell(orphan.number, state=state.FAIL)
            lines.append(f"trial {orphan.user_attrs.get(TRIAL, '?')} was cut off by the end of its driver")
        settled = {record.number: record for record in records}
        told = {trial.user_attrs.get(TRIAL) for trial in self._trials(state.COMPLETE)}
        for number, record in settled.items():
            self._measured[setting_of(record)] = number
            if number not in told and not self._is_machine_fault(record):
                self._add(record)
                lines.append(f"trial {number} was on disk and not in the study: added")
        unsettled = {t.user_attrs[TRIAL]: t.params for t in self._trials(state.FAIL) if TRIAL in t.user_attrs}
        self._unsettled = [params for number, params in sorted(unsettled.items()) if number not in settled]
        return lines

    def attempts(self, number: int) -> int:
        """Return how often a trial has failed by the machine's fault."""
        failed = self._trials(self._optuna.trial.TrialState.FAIL)
        return sum(t.user_attrs.get(TRIAL) == number and t.user_attrs.get(MACHINE_FAULT, False) for t in failed)

    def ask(self, number: int) -> Asked | None:
        """Return what to launch as trial `number`; None once every legal setting is measured.

        Order: settings that were cut off, the designed start, the sampler, and after `MAX_REASKS` repeats any setting that
        is not measured yet.
        """
        while self._unsettled:
            params = self._unsettled.pop(0)
            if self._space.setting(params) not in self._measured:
                return self._enqueued(params, number)
        for params in start_params(self._space):
            if self._space.setting(params) not in self._measured:
                return self._enqueued(params, number)
        if self.is_exhausted():
            return None
        if self._spec.sampler != "grid":
            for _ in range(MAX_REASKS):
                asked = self._asked(self._study.ask(self.distributions))
                if asked.setting not in self._measured:
                    asked.optuna_trial.set_user_attr(TRIAL, number)
                    return asked
                asked.optuna_trial.set_user_attr("repeat_of", self._measured[asked.setting])
                self._study.tell(asked.optuna_trial, state=self._optuna.trial.TrialState.PRUNED)
        left = self._unmeasured()
        return None if left is None else self._enqueued(left, number)

    def is_exhausted(self) -> bool:
        """Return whether every canonical setting of the space is measured."""
        return self._settings is not None and self._settings.keys() <= self._measured.keys()

    def _unmeasured(self) -> Mapping[str, int] | None:
        if self._settings is not None:
            left = [params for setting, params in self._settings.items() if setting not in self._measured]
            return (left[0] if self._spec.sampler == "grid" else self._rng.choice(left)) if left else None
        draws = (self._space.random_params(self._rng) for _ in range(1000))
        return next((params for params in draws if self._space.setting(params) not in self._measured), None)

    def _enqueued(self, params: Mapping[str, int], number: int) -> Asked:
        self._study.enqueue_trial(dict(params), user_attrs={TRIAL: number})
        return self._asked(self._study.ask(self.distributions))

    def _asked(self, optuna_trial: Any) -> Asked:
        params = dict(optuna_trial.params)
        values, setting = self._space.asked(params), self._space.setting(params)
        return Asked(params=params, values=values, setting=setting, optuna_trial=optuna_trial)

    def tell(self, asked: Asked, record: TrialRecord) -> bool:
        """Tell a record; return whether the trial is settled (False: the machine failed, and the setting comes again)."""
        state = self._optuna.trial.TrialState
        trial = asked.optuna_trial
        trial.set_user_attr("label", record.label)
        if record.failure is not None:
            trial.set_user_attr("failure", record.failure.kind)
        if self._is_machine_fault(record):
            trial.set_user_attr(MACHINE_FAULT, True)
            self._study.tell(trial, state=state.FAIL)
            if record.attempt < MAX_ATTEMPTS:
                self._unsettled.insert(0, asked.params)
                return False
        else:
            for name, value in self._constraints(record).items():
                trial.set_constraint(name, value)
            self._study.tell(trial, objective_values(record, self._spec.objectives, self._reference))
        self._measured[asked.setting] = record.number
        return True

    def tell_interrupted(self, asked: Asked) -> None:
        """Close a trial that an interrupt cut off; its setting is asked again by the next run."""
        asked.optuna_trial.set_user_attr("failure", "interrupted")
        self._study.tell(asked.optuna_trial, state=self._optuna.trial.TrialState.FAIL)

    @staticmethod
    def _is_machine_fault(record: TrialRecord) -> bool:
        return record.failure is not None and not record.failure.is_own_fault

    def _constraints(self, record: TrialRecord) -> dict[str, float]:
        """Return every constraint of the study, in one order: a sampler needs the same ones on every trial."""
        return {name: float(record.constraints.get(name, 1.0)) for name in self._constraint_names}

    def _add(self, record: TrialRecord) -> None:
        params = {name: self._space.knobs[name].values.index(record.asked[name]) for name in self._space.ranges()}
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=self._optuna.trial.TrialState.COMPLETE,
                params=params,
                distributions=self.distributions,
                values=objective_values(record, self._spec.objectives, self._reference),
                constraints=self._constraints(record),
                user_attrs={TRIAL: record.number, "label": record.label},
            )
        )


def make_sampler(name: str, seed: int) -> Any:
    """Return Optuna's sampler of a name (`grid` walks the space itself and only needs one in name).

    Raises:
        MissingPackageError: gp without scipy.
    """
    import optuna.samplers as samplers

    if name == "gp":
        import importlib.util

        if importlib.util.find_spec("scipy") is None:
            raise MissingPackageError("scipy", "gp", "study.sampler gp")
        return samplers.GPSampler(seed=seed)
    if name == "tpe":
        return samplers.TPESampler(seed=seed, multivariate=True)
    if name == "nsga2":
        return samplers.NSGAIISampler(seed=seed, population_size=10)
    return samplers.RandomSampler(seed=seed)


def seed_of(seed: int, num_trials: int) -> int:
    """Return a sampler's seed (31 bits): with the study's seed alone a resumed study would ask the same settings again."""
    digest = hashlib.sha256(f"{seed}:{num_trials}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
