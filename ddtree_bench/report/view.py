"""Serves a report's folder on this machine: the page, its plots and the study's files; nothing outside the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddtree_bench.errors import DdtreeError
from ddtree_bench.report.html import write_report

HIDDEN = (".log", ".zst", ".jsonl")  # raw records and logs are not served


def make_app(results_dir: Path) -> Any:
    """Return the aiohttp application: `/` is the page, `/refresh` draws it again from the records, other paths are files.

    Where a record is broken by then, `/refresh` answers 500 with the reason in words.
    """
    from aiohttp import web

    folder = Path(results_dir).resolve()

    async def page(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(folder / "report.html", headers={"Cache-Control": "no-store"})

    async def refresh(_: web.Request) -> web.StreamResponse:
        try:
            write_report(folder)
        except (DdtreeError, ValueError, TypeError, AttributeError, LookupError, OSError) as error:
            text = f"the report cannot be drawn again: {error}\nthe page at / is the last one that was drawn\n"
            return web.Response(status=500, text=text)
        raise web.HTTPFound("/")

    async def file(request: web.Request) -> web.StreamResponse:
        path = (folder / request.match_info["path"]).resolve()
        if not path.is_relative_to(folder) or not path.is_file() or path.suffix in HIDDEN or path.name.startswith("."):
            raise web.HTTPNotFound
        return web.FileResponse(path)

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/refresh", refresh)
    app.router.add_get("/{path:.+}", file)
    return app


async def serve(results_dir: Path, *, host: str, port: int) -> tuple[Any, str]:
    """Start serving; return the runner (clean it up to stop) and the URL."""
    from aiohttp import web

    runner = web.AppRunner(make_app(results_dir))
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound = runner.addresses[0][1]
    return runner, f"http://{host}:{bound}/"
