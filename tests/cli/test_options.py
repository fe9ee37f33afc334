"""The full list of commands and options is pinned: a change of the command line is a change of options.txt.

Write it anew with `python tests/cli/test_options.py` and read the difference.
"""

from __future__ import annotations

from pathlib import Path

import click

from ddtree_bench.cli import COMMANDS, root

PINNED = Path(__file__).with_name("options.txt")


def describe() -> str:
    """Return one line for each argument and option, with type and default."""
    lines = []
    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        lines.append(name)
        lines += [f"    {_line(parameter)}" for parameter in command.params]
    return "\n".join(lines) + "\n"


def _line(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        count = "…" if parameter.nargs == -1 else ""
        return f"{(parameter.metavar or parameter.name or '').upper()}{count}"
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    kind = parameter.type.name if not isinstance(parameter.type, click.Choice) else "|".join(map(str, parameter.type.choices))
    default = parameter.to_info_dict()["default"]
    many = " repeatable" if getattr(parameter, "multiple", False) else ""
    return f"{names} {kind}{many}" + ("" if default is None or default == () else f" [{default}]")


def test_option_list_is_pinned() -> None:
    assert describe() == PINNED.read_text(encoding="utf-8"), "the command line changed: see the head of this file"


def test_every_command_has_help_for_every_option() -> None:
    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"


if __name__ == "__main__":
    PINNED.write_text(describe(), encoding="utf-8")
