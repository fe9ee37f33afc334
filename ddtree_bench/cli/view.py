"""`ddtree-bench view RESULTS`: serve a study's report on this machine."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("view")
@click.argument("results", type=click.Path(file_okay=False, path_type=Path), metavar="RESULTS")
@click.option("--host", default="127.0.0.1", help="Address to bind.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
def command(results: Path, host: str, port: int) -> None:
    """Draw the report of a results folder and serve it; prints the URL, ends with Ctrl-C."""
    import asyncio

    from ddtree_bench.report.html import write_report

    write_report(results)
    asyncio.run(_serve(results, host, port))


async def _serve(results: Path, host: str, port: int) -> None:
    import asyncio
    import signal

    from ddtree_bench.report.view import serve

    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    runner, url = await serve(results, host=host, port=port)
    print(url, flush=True)
    try:
        await over.wait()
    finally:
        await runner.cleanup()
