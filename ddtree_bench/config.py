"""Configuration of a run: frozen, keyword-only dataclasses, checked when made, read from one TOML file.

Owns every default and the canonical form of a tree setting (DESIGN sections 2 and 4.5). Standard library only, so that
both halves (GPU and bench) and the command line can import it. What a value does is left to the part that uses it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_bench.errors import unknown_name

MODES = ("plain", "linear", "tree")
BACKENDS = ("embedded", "sglang", "attach")
ENDPOINTS = ("chat", "completions", "generate")
OBJECTIVES = ("output_tok_s", "acceptance_length")
SAMPLERS = ("tpe", "gp", "nsga2", "random", "grid")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
PROVENANCE = "provenance"  # a table that a study.toml has beside the spec: where it was written
MAX_KNOB_VALUES = 10_000  # of one range; more is a slip of the pen
SPACE_KEYS = ("block_size", "depth", "top_k", "branching", "node_budget", "draft_temperature")


def _require(condition: bool, must: str, given: object, do: str = "") -> None:
    if not condition:
        raise ValueError(f"{must}; given {given!r}" + (f"; {do}" if do else ""))


def _require_count(name: str, value: int | None, *, minimum: int = 1) -> None:
    """Raise unless `value` is None or an integer of at least `minimum`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer; given {value!r}")
    _require(value >= minimum, f"{name} must be at least {minimum}", value)


def _require_name(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise unknown_name(name, value, known)


@dataclass(frozen=True, kw_only=True)
class TreeSetting:
    """One setting of the speculation: what a trial measures and `serve` takes as flags (DESIGN section 2).

    `node_budget` counts draft nodes, the root not counted. `depth` and `branching` of None mean no cap.
    In mode "plain" nothing else counts; in mode "linear" only block_size and depth do.
    """

    mode: str = "tree"
    block_size: int = 16
    depth: int | None = None
    top_k: int = 8
    branching: int | None = None
    node_budget: int = 15
    draft_temperature: float = 1.0

    def __post_init__(self) -> None:
        _require_name("mode", self.mode, MODES)
        _require_count("block_size", self.block_size, minimum=2)
        _require_count("depth", self.depth)
        _require_count("top_k", self.top_k)
        _require_count("branching", self.branching)
        _require_count("node_budget", self.node_budget, minimum=0)
        _require(
            math.isfinite(self.draft_temperature) and self.draft_temperature > 0,
            "draft_temperature must be finite and greater than 0",
            self.draft_temperature,
        )

    @property
    def max_depth(self) -> int:
        """Deepest draft node that this setting can give."""
        return self.block_size - 1 if self.depth is None else min(self.depth, self.block_size - 1)

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens one verify step can carry."""
        if self.mode == "plain":
            return 0
        return self.max_depth if self.mode == "linear" else self.node_budget

    @property
    def verify_width(self) -> int:
        """Rows of one verify step: the root and the draft nodes."""
        return self.num_draft_tokens + 1

    def canonical(self) -> TreeSetting:
        """Return the same setting with every cap that cannot bind lowered to where it does; one canonical form is one trial.

        block_size is never lowered: it changes the drafter's input. Caps that do not count in a mode are dropped.
        """
        if self.mode == "plain":
            return TreeSetting(mode="plain")
        if self.mode == "linear":
            return TreeSetting(
                mode="linear", block_size=self.block_size, depth=self.max_depth, node_budget=self.max_depth, top_k=1
            )
        budget = self.node_budget
        depth, top_k = self.max_depth, self.top_k
        branching = top_k if self.branching is None else self.branching
        while True:  # lowering one cap can let another stop binding: repeat until nothing moves
            depth = min(depth, max(budget, 1))
            top_k = min(top_k, max(budget, 1))
            branching = min(branching, top_k, max(budget - 1, 1))
            lowered = min(budget, most_draft_nodes(depth=depth, top_k=top_k, branching=branching, limit=budget))
            if lowered == budget:
                break
            budget = lowered
        has_children = depth > 1
        is_soft = depth > 1 and top_k > 1
        return TreeSetting(
            mode="tree",
            block_size=self.block_size,
            depth=depth,
            top_k=top_k,
            branching=branching if has_children else None,
            node_budget=budget,
            draft_temperature=self.draft_temperature if is_soft else 1.0,
        )

    def flags(self) -> list[str]:
        """Return the `ddtree-bench serve` flags that give this setting."""
        flags = ["--mode", self.mode]
        if self.mode == "plain":
            return flags
        flags += ["--block-size", str(self.block_size)]
        if self.depth is not None:
            flags += ["--depth", str(self.depth)]
        if self.mode == "linear":
            return flags
        flags += ["--top-k", str(self.top_k), "--node-budget", str(self.node_budget)]
        if self.branching is not None:
            flags += ["--branching", str(self.branching)]
        return flags + ["--draft-temperature", f"{self.draft_temperature:g}"]

    def label(self) -> str:
        """Return a short human name, e.g. `tree b16 d15 k8 br8 n63 t0.8`."""
        if self.mode == "plain":
            return "plain"
        parts = [self.mode, f"b{self.block_size}", f"d{self.max_depth}"]
        if self.mode == "tree":
            parts += [
                f"k{self.top_k}",
                f"br{self.branching or self.top_k}",
                f"n{self.node_budget}",
                f"t{self.draft_temperature:g}",
            ]
        return " ".join(parts)


def most_draft_nodes(*, depth: int, top_k: int, branching: int, limit: int) -> int:
    """Return how many draft nodes the caps allow, counted up to `limit`."""
    total, level = 0, top_k
    for _ in range(depth):
        total += level
        if total >= limit:
            return limit
        level *= branching
    return total


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How a trial's server is started; the tree setting comes on top of it."""

    backend: str = "embedded"
    model: str = "tiny-dense"
    drafter: str | None = None
    mode: str = "tree"
    tensor_parallel: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    max_running_requests: int = 16
    page_size: int = 16
    load_format: str = "auto"
    url: str | None = None
    ready_timeout_s: float = 300.0
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_name("server.backend", self.backend, BACKENDS)
        _require_name("server.mode", self.mode, MODES)
        _require_name("server.device", self.device, DEVICES)
        _require_name("server.dtype", self.dtype, DTYPES)
        _require_name("server.load_format", self.load_format, LOAD_FORMATS)
        _require_count("server.tensor_parallel", self.tensor_parallel)
        _require_count("server.max_running_requests", self.max_running_requests)
        _require_count("server.page_size", self.page_size)
        for name, value in self.env.items():
            ok = name != "" and "=" not in name and "\0" not in name + value
            _require(ok, "server.env must hold names without '=' and no NUL character", {name: value})
        _require(self.ready_timeout_s > 0, "server.ready_timeout_s must be greater than 0", self.ready_timeout_s)
        _require(
            (self.url is not None) == (self.backend == "attach"),
            'server.url must be given with backend "attach" and only with it',
            self.url,
        )


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """What is sent to a server: prompts, arrivals and sampling."""

    endpoint: str = "completions"
    dataset_name: str = "bundled"
    dataset_path: str | None = None
    num_prompts: int = 32
    num_warmups: int = 4
    max_concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _require_name("load.endpoint", self.endpoint, ENDPOINTS)
        _require_count("load.num_prompts", self.num_prompts)
        _require_count("load.num_warmups", self.num_warmups, minimum=0)
        _require_count("load.max_concurrency", self.max_concurrency)
        _require_count("load.max_tokens", self.max_tokens)
        _require_count("load.seed", self.seed, minimum=0)
        _require(
            self.request_rate is None or (math.isfinite(self.request_rate) and self.request_rate > 0),
            "load.request_rate must be finite and greater than 0 requests/s",
            self.request_rate,
        )
        _require(self.burstiness > 0, "load.burstiness must be greater than 0", self.burstiness)
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "load.temperature must be finite and at least 0",
            self.temperature,
        )
        _require(self.timeout_s > 0, "load.timeout_s must be greater than 0", self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """The search itself: how many trials, by which sampler, kept where."""

    name: str = "study"
    trials: int = 20
    seed: int = 0
    objectives: tuple[str, ...] = OBJECTIVES
    sampler: str = "tpe"
    storage: str | None = None
    replicates: int = 1
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        ok = self.name != "" and all(c.isalnum() or c in "-_." for c in self.name) and self.name[0] not in ".-"
        _require(ok, "study.name must be letters, digits, '-', '_' or '.' (it names a folder)", self.name)
        _require(len(self.name) <= 100, "study.name must be at most 100 characters (it names a folder)", self.name)
        _require_count("study.trials", self.trials)
        _require_count("study.seed", self.seed, minimum=0)
        _require_count("study.replicates", self.replicates)
        _require_name("study.sampler", self.sampler, SAMPLERS)
        _require(1 <= len(self.objectives) <= 2, "study.objectives must hold one or two names", list(self.objectives))
        for name in self.objectives:
            _require_name("study.objectives", name, OBJECTIVES)
        _require(len(set(self.objectives)) == len(self.objectives), "study.objectives must not repeat", list(self.objectives))
        _require(
            "output_tok_s" in self.objectives,
            "study.objectives must hold output_tok_s (a larger tree always accepts more and is not always faster)",
            list(self.objectives),
        )
        _require(self.timeout_s is None or self.timeout_s > 0, "study.timeout_s must be greater than 0", self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """What must hold before a trial's numbers count."""

    losslessness: bool = True
    num_gate_prompts: int = 3
    gate_max_tokens: int = 48
    min_acceptance: float | None = None
    drift: float | None = 0.05

    def __post_init__(self) -> None:
        _require_count("gates.num_gate_prompts", self.num_gate_prompts)
        _require_count("gates.gate_max_tokens", self.gate_max_tokens)
        _require(
            self.min_acceptance is None or self.min_acceptance >= 1,
            "gates.min_acceptance must be at least 1 (the bonus token is counted)",
            self.min_acceptance,
        )
        _require(self.drift is None or self.drift > 0, "gates.drift must be greater than 0 (a share)", self.drift)


@dataclass(frozen=True, kw_only=True)
class KnobRange:
    """The values of one knob, in order; a sampler sees the index into `values`."""

    name: str
    values: tuple[float | int | None, ...]

    def __post_init__(self) -> None:
        _require_name("space key", self.name, SPACE_KEYS)
        _require(len(self.values) > 0, f"space.{self.name} must hold at least one value", list(self.values))
        _require(len(set(self.values)) == len(self.values), f"space.{self.name} must not repeat a value", list(self.values))

    @classmethod
    def parse(cls, name: str, given: object) -> KnobRange:
        """Read a value, a list, or a table {min, max, step, log}.

        Raises:
            ValueError: unknown keys, min over max, or a step that is not positive.
        """
        if isinstance(given, Mapping):
            return cls(name=name, values=tuple(_range_values(name, given)))
        values: list[Any] = given if isinstance(given, list) else [given]
        none_allowed = name in ("depth", "branching")
        if none_allowed:
            values = [None if value == "none" else value for value in values]
        for value in values:
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                hint = ' (or "none" for no cap)' if none_allowed else ""
                raise TypeError(f"space.{name} must hold numbers{hint}; given {value!r}")
            _require(name == "draft_temperature" or isinstance(value, int), f"space.{name} must hold integers", value)
        return cls(name=name, values=tuple(values))


def _range_values(name: str, table: Mapping[str, object]) -> Iterator[float | int]:
    unknown = set(table) - {"min", "max", "step", "log"}
    _require(not unknown, f"space.{name} takes the keys min, max, step and log", sorted(unknown))
    _require("min" in table and "max" in table, f"space.{name} must give both min and max", dict(table))
    for key in ("min", "max", "step"):
        value = table.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(f"space.{name}.{key} must be a finite number; given {value!r}")
    low, high = typing.cast(float, table["min"]), typing.cast(float, table["max"])
    is_integer = isinstance(low, int) and isinstance(high, int)
    _require(low <= high, f"space.{name}.min must not be over max", [low, high])
    if table.get("log"):
        factor = typing.cast(float, table.get("step", 2))
        _require(factor > 1 and low > 0, f"space.{name} with log needs min > 0 and step (a factor) > 1", dict(table))
        steps: Iterator[float] = (low * factor**i for i in itertools.count())
    else:
        step = typing.cast(float, table.get("step", 1 if is_integer else (high - low) / 4 or 1))
        _require(step > 0, f"space.{name}.step must be greater than 0", step)
        steps = (low + i * step for i in itertools.count())
    seen: set[float | int] = set()
    for number, raw in enumerate(steps):
        if raw > high * (1 + 1e-9):
            return
        must = f"space.{name} must give at most {MAX_KNOB_VALUES} values"
        _require(number < MAX_KNOB_VALUES, must, dict(table), "give a larger step, or log = true")
        value = round(raw) if is_integer else round(raw, 6)
        if value not in seen:
            seen.add(value)
            yield value


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A whole sweep file (DESIGN section 4.5)."""

    study: StudySpec = field(default_factory=StudySpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    load: LoadSpec = field(default_factory=LoadSpec)
    space: tuple[KnobRange, ...] = ()
    constraints: Mapping[str, float] = field(default_factory=dict)
    gates: GateSpec = field(default_factory=GateSpec)

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> SweepSpec:
        """Read a sweep file, then apply `table.key=value` overrides (value read as TOML, else taken as text).

        Raises:
            ValueError: unknown table or key (the known ones are named), or a value that its table refuses.
            FileNotFoundError: no such file.
        """
        tables = read_toml(Path(path))
        for override in overrides:
            apply_override(tables, override)
        return cls.from_dict(tables)

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> SweepSpec:
        """Build the spec from nested tables as TOML gives them."""
        known = [f.name for f in dataclasses.fields(cls)]
        tables = {name: table for name, table in tables.items() if name != PROVENANCE}
        for name, table in tables.items():
            if name not in known:
                raise unknown_name("table of a sweep file", name, known)
            if not isinstance(table, Mapping):
                raise TypeError(f"[{name}] must be a table; given {table!r}")
        for key in tables.get("space", {}):
            if key not in SPACE_KEYS:
                raise unknown_name("key of [space]", key, SPACE_KEYS)
        constraints = tables.get("constraints", {})
        return cls(
            study=dataclass_from_dict(StudySpec, tables.get("study", {}), "study"),
            server=dataclass_from_dict(ServerSpec, tables.get("server", {}), "server"),
            load=dataclass_from_dict(LoadSpec, tables.get("load", {}), "load"),
            space=tuple(KnobRange.parse(key, value) for key, value in tables.get("space", {}).items()),
            constraints={key: _coerce(f"constraints.{key}", value, float) for key, value in constraints.items()},
            gates=dataclass_from_dict(GateSpec, tables.get("gates", {}), "gates"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return nested tables that `from_dict` reads back to an equal spec."""
        tables = {
            name: {key: value for key, value in dataclasses.asdict(getattr(self, name)).items() if value is not None}
            for name in ("study", "server", "load", "gates")
        }
        tables["space"] = {knob.name: ["none" if v is None else v for v in knob.values] for knob in self.space}
        tables["constraints"] = dict(self.constraints)
        if self.gates.drift is None:
            tables["gates"]["drift"] = "none"
        return tables


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file; a byte-order mark, as some editors write it, is skipped.

    Raises:
        ValueError: it is no TOML; names the file. FileNotFoundError: no such file.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be valid TOML in UTF-8; {error}") from error


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Set `table.key=value` in nested tables; the value is read as TOML and falls back to plain text."""
    path, separator, text = override.partition("=")
    table, dot, key = path.strip().partition(".")
    _require(bool(separator and dot and table and key), "--set must look like table.key=value", override)
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    inner = tables.setdefault(table, {})
    if not isinstance(inner, dict):
        raise TypeError(f"[{table}] must be a table; given {inner!r}")
    inner[key] = value


def dataclass_from_dict(cls: type, table: Mapping[str, Any], where: str) -> Any:
    """Build a config dataclass from a table.

    Raises:
        ValueError: unknown key (the known ones are named). TypeError: a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise unknown_name(f"key of [{where}]", key, known)
        values[key] = _coerce(f"{where}.{key}", value, hints[key])
    return cls(**values)


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type; TOML has no None ("none" is), and writes 1 where 1.0 is meant."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and value == "none":
        return None
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is tuple and isinstance(value, list | tuple):
            if not all(isinstance(item, str) for item in value):  # every list of a sweep file but [space]'s holds strings
                raise TypeError(f"{name} must hold strings; given {list(value)!r}")
            return tuple(value)
        if (origin is Mapping and isinstance(value, Mapping)) or (origin in (str, bool) and isinstance(value, origin)):
            return _string_values(name, value) if isinstance(value, Mapping) else value
        if origin in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            if origin is float:
                return float(value)
            if isinstance(value, int):
                return value
    expected = " or ".join(_TOML_WORDS.get(typing.get_origin(option) or option, str(option)) for option in options)
    raise TypeError(f"{name} must be of type {expected}; given {value!r}")


_TOML_WORDS = {int: "int", float: "float", str: "str", bool: "bool", tuple: "list", Mapping: "table", type(None): "none"}


def _string_values(name: str, table: Mapping[str, Any]) -> dict[str, str]:
    for key, value in table.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}.{key} must be a string; given {value!r}")
    return dict(table)
