"""The search space: fixed ordered ranges, seen by a sampler as integer indices, mapped to canonical tree settings.

Ordinals are indices, never categories, and ranges never depend on other knobs: both cost a sampler much of its power. A
combination that cannot exist is mapped to its canonical form; what was asked and what is effective are both kept.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_bench.config import SPACE_KEYS, KnobRange, SweepSpec, TreeSetting
from ddtree_bench.sweep.drafter import drafter_block_size

MODE = "mode"
MAX_ENUMERATED = 50_000  # combinations; a larger space is never counted as exhausted
_DEFAULT = TreeSetting()
_USED_BY_LINEAR = ("block_size", "depth")


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One knob with its ordered values; the index into them is what a sampler chooses."""

    name: str
    values: tuple[Any, ...]

    def nearest(self, wanted: float) -> int:
        """Return the index whose value is nearest, by ratio; None (no cap) counts as endless."""
        return min(range(len(self.values)), key=lambda i: abs(math.log(_number(self.values[i])) - math.log(wanted)))


class Space:
    """Knobs of one study. `params` are {knob: index} of the knobs that have a choice."""

    def __init__(self, knobs: tuple[Knob, ...], *, main_block_size: int | None = None) -> None:
        self.knobs = {knob.name: knob for knob in knobs}
        sizes = self.knobs["block_size"].values
        wanted = max(sizes) if main_block_size is None else main_block_size
        self.main_block_size: int = sizes[self.knobs["block_size"].nearest(wanted)]

    @classmethod
    def of(cls, spec: SweepSpec) -> Space:
        """Build the space of a sweep file: knobs that it does not name have their default as the only value.

        In mode "tree" linear chains are part of the space, so that the best chain is found by the same search.

        Raises:
            ValueError: mode "plain", or no block size is given and the drafter's config cannot be read.
        """
        mode = spec.server.mode
        if mode == "plain":
            raise ValueError('server.mode must be tree or linear for a sweep; given "plain": there is nothing to search')
        given = {knob.name: _ordered(knob) for knob in spec.space}
        trained = drafter_block_size(spec.server)
        if "block_size" not in given:
            given["block_size"] = (_require_block_size(trained, spec),)
        if trained is not None and min(given["block_size"]) > trained:
            raise ValueError(
                f"space.block_size must hold a value of at most {trained}, what the drafter was trained for; "
                f"given {list(given['block_size'])}; lower it"
            )
        modes = ("linear", "tree") if mode == "tree" else ("linear",)
        names: tuple[str, ...] = SPACE_KEYS if mode == "tree" else _USED_BY_LINEAR
        knobs = [Knob(name=name, values=given.get(name, (getattr(_DEFAULT, name),))) for name in names]
        ignored = sorted(given.keys() - set(names))
        if ignored:
            raise ValueError(
                f"[space] must hold {', '.join(names)} in mode {mode!r}; given {', '.join(ignored)}, which it ignores"
            )
        space = cls((Knob(name=MODE, values=modes), *knobs), main_block_size=trained)
        for params in space.corners():
            space.setting(params)  # every value is checked by TreeSetting itself
        return space

    def ranges(self) -> dict[str, int]:
        """Return {knob: number of values} of the knobs with a choice: what a sampler sees."""
        return {name: len(knob.values) for name, knob in self.knobs.items() if len(knob.values) > 1}

    def asked(self, params: Mapping[str, int]) -> dict[str, Any]:
        """Return the values that indices stand for, of every knob."""
        return {name: knob.values[params.get(name, 0)] for name, knob in self.knobs.items()}

    def setting(self, params: Mapping[str, int]) -> TreeSetting:
        """Return the canonical setting of indices."""
        return TreeSetting(**self.asked(params)).canonical()

    def params(self, wanted: Mapping[str, Any]) -> dict[str, int]:
        """Return the indices nearest to wanted values; a knob that is not named takes its default's nearest."""
        chosen = {}
        for name, knob in self.knobs.items():
            if len(knob.values) == 1:
                continue
            if name == MODE:
                chosen[name] = knob.values.index(wanted.get(MODE, "tree"))
            else:
                chosen[name] = knob.nearest(_number(wanted.get(name, getattr(_DEFAULT, name))))
        return chosen

    def corners(self) -> Iterator[dict[str, int]]:
        """Yield, knob by knob, each of its values with the first of all others."""
        for name, count in self.ranges().items():
            yield from ({name: index} for index in range(count))
        yield {}

    def num_combinations(self) -> int:
        """Return how many index combinations there are; several may be one canonical setting."""
        return math.prod(self.ranges().values())

    def settings(self) -> dict[TreeSetting, dict[str, int]] | None:
        """Return every canonical setting with the first indices that give it; None where the space is too large to list."""
        if self.num_combinations() > MAX_ENUMERATED:
            return None
        ranges = self.ranges()
        found: dict[TreeSetting, dict[str, int]] = {}
        for indices in itertools.product(*(range(count) for count in ranges.values())):
            params = dict(zip(ranges, indices, strict=True))
            found.setdefault(self.setting(params), params)
        return found

    def random_params(self, rng: random.Random) -> dict[str, int]:
        """Return indices drawn evenly."""
        return {name: rng.randrange(count) for name, count in self.ranges().items()}


def start_params(space: Space, *, max_rungs: int = 6) -> list[dict[str, int]]:
    """Return the designed start: the chain at the drafter's block size, a ladder of budgets, the chain at other block sizes.

    The ladder has the default shape and up to `max_rungs` budgets spread over the range. Each canonical setting comes once.
    """
    block_sizes, main = space.knobs["block_size"].values, space.main_block_size
    wanted: list[dict[str, Any]] = [{MODE: "linear", "block_size": main}]
    if "tree" in space.knobs[MODE].values:
        shape = {MODE: "tree", "block_size": main, "depth": None, "branching": None}
        wanted += [{**shape, "node_budget": budget} for budget in _rungs(space.knobs["node_budget"].values, max_rungs)]
    wanted += [{MODE: "linear", "block_size": size} for size in block_sizes if size != main]
    unique: dict[TreeSetting, dict[str, int]] = {}
    for values in wanted:
        params = space.params(values)
        unique.setdefault(space.setting(params), params)
    return list(unique.values())


def _rungs(values: tuple[int, ...], max_rungs: int) -> list[int]:
    """Return up to `max_rungs` of the ordered values, ends included, spread evenly over their order."""
    if len(values) <= max_rungs:
        return list(values)
    return [values[round(i * (len(values) - 1) / (max_rungs - 1))] for i in range(max_rungs)]


def _number(value: float | None) -> float:
    return 1e9 if value is None else max(float(value), 0.5)


def _ordered(knob: KnobRange) -> tuple[Any, ...]:
    return tuple(sorted(knob.values, key=_number))


def _require_block_size(found: int | None, spec: SweepSpec) -> int:
    if found is None:
        raise ValueError(
            "space.block_size must be given where the drafter's config.json cannot be read on this machine; "
            f"given none, and the drafter {spec.server.drafter!r} of the model {spec.server.model!r}"
        )
    return found
