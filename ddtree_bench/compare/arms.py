"""What the names of a comparison mean: plain, linear, tree, a TOML file or a URL, and which study they are taken from."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_bench.config import MODES, SPACE_KEYS, ServerSpec, SweepSpec, TreeSetting, dataclass_from_dict, read_toml
from ddtree_bench.errors import unknown_name
from ddtree_bench.records import machine_name
from ddtree_bench.sweep.drafter import drafter_block_size

SETTING_TABLES = ("best", "linear", "tree")
DEFAULTS = {
    "plain": TreeSetting(mode="plain"),
    "linear": TreeSetting(mode="linear"),
    "tree": TreeSetting(mode="tree"),
}


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """One arm: its name in the comparison, its server and setting, and where they come from, in words."""

    name: str
    server: ServerSpec
    setting: TreeSetting | None
    source: str

    @property
    def label(self) -> str:
        """The setting, or the URL of a server that someone else runs."""
        return self.setting.label() if self.setting is not None else str(self.server.url)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the arms share: server, load and gates, settings by name, where they come from, and the folder for the result."""

    spec: SweepSpec
    settings: Mapping[str, TreeSetting] = field(default_factory=dict)
    source: str = "bundled defaults"
    study_dir: Path | None = None


def read_context(config: Path | None, results: Path) -> Context:
    """Return the context of a comparison.

    Args:
        config: a sweep file or a best.toml; None takes the newest sweep under `results`, else bundled defaults.
        results: a results folder: that of one study, or the root above several.
    Raises:
        FileNotFoundError: no such config. ValueError: an unknown table or key.
    """
    if config is None:
        best = newest_best(results)
        return _context_of(best, f"newest sweep {best.parent}", best.parent) if best else Context(spec=SweepSpec())
    context = _context_of(config, str(config), config.parent if config.name in ("best.toml", "study.toml") else None)
    if context.settings:
        return context
    best = newest_best(config.parent if config.name == "study.toml" else results, study=context.spec.study.name)
    if best is None:
        return dataclasses.replace(context, source=f"{config}, default settings")
    found = _context_of(best, f"{config}, settings from {best}", best.parent)
    return dataclasses.replace(found, spec=context.spec)


def newest_best(results: Path, study: str | None = None) -> Path | None:
    """Return this machine's newest best.toml at or below a folder (root, machine, study), of a study's name if one is given.

    Results of other machines may lie beside it, as in a fresh clone; they count only where the folder itself is their study.
    """
    files = [file for pattern in ("best.toml", "*/best.toml", "*/*/best.toml") for file in results.glob(pattern)]
    files = [file for file in files if study is None or _study_name(file.parent) == study]
    made = {file: read_toml(file).get("provenance", {}) for file in files}
    here = machine_name() if files else None
    files = [file for file in files if file.parent == results or made[file].get("machine", here) == here]
    return max(files, key=lambda file: str(made[file].get("when_utc") or _changed_utc(file)), default=None)


def _changed_utc(file: Path) -> str:
    return datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")


def _study_name(folder: Path) -> str:
    file = folder / "study.toml"
    tables = read_toml(file) if file.exists() else {}
    return str(tables.get("study", {}).get("name", folder.name))


def _context_of(file: Path, source: str, study_dir: Path | None) -> Context:
    tables = read_toml(file)
    known = {f.name for f in dataclasses.fields(SweepSpec)}
    study_file = file.parent / "study.toml"
    if file.name == "best.toml" and study_file.exists():  # the gates and the rest of the study; best.toml wins where both speak
        tables = {**read_toml(study_file), **tables}
    extra = {*SETTING_TABLES, "measured", "provenance"}
    for name in tables:
        if name not in known | extra:
            raise unknown_name(f"table of {file}", name, known | extra)
    spec = SweepSpec.from_dict({name: table for name, table in tables.items() if name in known})
    settings = {name: dataclass_from_dict(TreeSetting, tables[name], name) for name in SETTING_TABLES if name in tables}
    return Context(spec=spec, settings=settings, source=source, study_dir=study_dir)


def resolve_arm(given: str, context: Context) -> ArmSpec:
    """Return the arm that a name, a TOML file or a URL stands for.

    Raises:
        ValueError: none of these, or a TOML file that leaves a knob open.
    """
    if given in MODES:
        setting = context.settings.get(given) or default_setting(given, context.spec.server)
        is_found = given in context.settings or given == "plain"
        source = context.source if is_found else f"{context.source}; default {given} setting"
        return ArmSpec(name=given, server=dataclasses.replace(context.spec.server, mode=given), setting=setting, source=source)
    if given.startswith(("http://", "https://")):
        server = ServerSpec(backend="attach", url=given, dtype=context.spec.server.dtype)
        return ArmSpec(
            name=given.partition("://")[2].rstrip("/"), server=server, setting=None, source="a server that runs already"
        )
    file = Path(given)
    if file.suffix == ".toml":
        return _arm_of_file(file)
    raise ValueError(f"an arm must be {', '.join(MODES)}, a .toml file or an http:// URL; given {given!r}")


def default_setting(mode: str, server: ServerSpec) -> TreeSetting:
    """Return the default setting of a mode; the block is the one that the drafter was trained for."""
    block_size = drafter_block_size(server)
    if mode == "plain" or block_size is None:
        return DEFAULTS[mode]
    return dataclasses.replace(DEFAULTS[mode], block_size=block_size)


def _arm_of_file(file: Path) -> ArmSpec:
    context = _context_of(file, str(file), None)
    setting = next((context.settings[name] for name in SETTING_TABLES if name in context.settings), None)
    if setting is None:
        open_knobs = [knob.name for knob in context.spec.space if len(knob.values) != 1]
        if open_knobs:
            raise ValueError(
                f"{file} must give one value for every knob, or hold [best]; given several for {', '.join(open_knobs)}; "
                "name the best.toml of its results instead"
            )
        knobs: dict[str, Any] = {knob.name: knob.values[0] for knob in context.spec.space if knob.name in SPACE_KEYS}
        setting = TreeSetting(mode=context.spec.server.mode, **knobs)
    server = dataclasses.replace(context.spec.server, mode=setting.mode)
    return ArmSpec(name=file.stem, server=server, setting=setting, source=str(file))


def arms_of(first: str, second: str, context: Context) -> tuple[list[ArmSpec], ArmSpec | None]:
    """Return the two arms with distinct names, and the plain arm beside them (None: one of them is it, or there is none)."""
    arms = [resolve_arm(first, context), resolve_arm(second, context)]
    if arms[0].name == arms[1].name:
        arms = [dataclasses.replace(arm, name=f"{arm.name}-{mark}") for arm, mark in zip(arms, "AB", strict=True)]
    is_plain = [arm.setting is not None and arm.setting.mode == "plain" for arm in arms]
    launchable = [arm for arm in arms if arm.server.backend != "attach"]
    if any(is_plain) or not launchable:
        return arms, None
    server = dataclasses.replace(launchable[0].server, mode="plain")
    return arms, ArmSpec(name="plain", server=server, setting=DEFAULTS["plain"], source="plain decoding on the same server")
