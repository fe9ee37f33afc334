"""The command line: one click command a file, found by name and imported only when it is used.

Importing this module brings in click and nothing else of weight: `ddtree-bench --help` must answer at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys

import click

from ddtree_bench import __version__
from ddtree_bench.errors import DdtreeError

COMMANDS = {
    "serve": "Serve a model with plain, linear or tree decoding.",
    "load": "Send a load to a server and record every request.",
    "sweep": "Search the tree settings; every trial launches a server.",
    "compare": "Compare two settings with interleaved blocks and an interval.",
    "kernels": "Check every kernel on this machine's GPU, then time it.",
    "report": "Draw the plots and the page of a study's results.",
    "view": "Serve a study's report on a local port.",
    "doctor": "Tell what this machine has and what would stop a run.",
    "mock": "Run a server that answers like one, for tests of clients.",
}


class LazyGroup(click.Group):
    """A click group whose commands are modules of this package, named in COMMANDS and imported when invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"ddtree_bench.cli.{cmd_name}").command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"command must be one of {', '.join(COMMANDS)}; given {args[0]!r}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="ddtree-bench")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def root(debug: bool) -> None:
    """Find the fastest DDTree speculative-decoding setting for your hardware, prove it, and serve it."""


WHAT_TO_DO = {
    errno.ENOENT: "check the path",
    errno.EACCES: "give a path that this user may use",
    errno.EPERM: "give a path that this user may use",
    errno.EROFS: "give a folder that can be written",
    errno.ENOSPC: "free space, then give the same command again",
    errno.EDQUOT: "free space, then give the same command again",
    errno.EADDRINUSE: "choose another port, or 0 for a free one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def text_of(error: Exception) -> str:
    """Return the message of an error; the system's own refusals name the path and what to do."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    must = "the system must allow this" if error.filename is None else f"{error.filename} must be usable"
    do = WHAT_TO_DO.get(error.errno)
    return f"{must}; {error.strerror}" + (f"; {do}" if do else "")


def main() -> None:
    """Entry point: bad values and failed servers end with their message and exit status, not with a traceback."""
    try:
        status = root.main(standalone_mode=False)  # click returns the code of ctx.exit() in this mode
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader has left, as in `… | head`: nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would complain
        sys.exit(1)
    except (DdtreeError, ValueError, TypeError, OverflowError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"error: {text_of(error)}", err=True)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
