"""`ddtree-bench mock`: run a server that answers like one, for tests of clients and sweeps."""

from __future__ import annotations

from typing import Any

import click

from ddtree_bench.config import MODES, TreeSetting


@click.command("mock")
@click.option("--host", default="127.0.0.1", help="Address to bind.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@click.option("--model", default="mock", help="Name in /v1/models.")
@click.option("--api-key", default=None, help="Bearer token that requests must carry.")
@click.option("--acceptance-length", default=None, type=float, help="Tokens a round, bonus counted; default from the setting.")
@click.option("--ms-per-round", default=5.0, help="Gap between chunks in ms (with a setting's own acceptance: of width 1).")
@click.option("--first-token-ms", default=10.0, help="Delay before the first chunk in ms.")
@click.option("--reply-tokens", default=None, type=int, help="Natural length of a reply; default up to max_tokens.")
@click.option("--usage", default="continuous", help="continuous, final or none.")
@click.option("--metrics", default="both", help="Names in /metrics: vllm, sglang, both or none.")
@click.option("--meta-info/--no-meta-info", "has_meta_info", default=True, help="Speculation counts in the last chunk.")
@click.option("--models/--no-models", "has_models", default=True, help="Whether /v1/models exists.")
@click.option("--server-info/--no-server-info", "has_server_info", default=True, help="Whether /server_info exists.")
@click.option("--fault", default="none", help="none, http_503, in_band_error, truncated, empty, html, broken_json or hang.")
@click.option("--fault-every", default=1, help="The fault strikes every n-th request.")
@click.option("--bends-text-every", default=0, help="Every n-th reply has another text, as from a lossy engine; 0: none.")
@click.option("--start-delay-s", default=0.0, help="How long /health answers 503; inf is never ready.")
@click.option("--exit-after", default=None, type=int, help="Exit when that many requests have come; 0 exits at the start.")
@click.option("--exit-code", default=1, help="Status of that exit.")
@click.option("--log-text", default="", help="Last words on stderr before that exit.")
@click.option("--ignore-sigterm", is_flag=True, help="Do not stop on SIGTERM.")
@click.option("--mode", default="tree", type=click.Choice(MODES), help="As of `serve`; shown in /server_info.")
@click.option("--block-size", default=16, help="As of `serve`.")
@click.option("--depth", default=None, type=int, help="As of `serve`.")
@click.option("--top-k", default=8, help="As of `serve`.")
@click.option("--branching", default=None, type=int, help="As of `serve`.")
@click.option("--node-budget", default=15, help="As of `serve`.")
@click.option("--draft-temperature", default=1.0, help="As of `serve`.")
def command(
    host: str, port: int, acceptance_length: float | None, ms_per_round: float, ignore_sigterm: bool, **knobs: Any
) -> None:
    """Run a server that replays scripted rounds over HTTP; its URL is the last line on stdout before it serves."""
    import asyncio

    from ddtree_bench.load import mock

    names = ("mode", "block_size", "depth", "top_k", "branching", "node_budget", "draft_temperature")
    setting = TreeSetting(**{name: knobs.pop(name) for name in names})
    if setting.mode == "plain":
        acceptance_length = None
    elif acceptance_length is None:
        acceptance_length = mock.acceptance_of_setting(setting)
        ms_per_round = mock.ms_per_round_of_setting(setting, ms_per_round)
    spec = mock.MockSpec(acceptance_length=acceptance_length, ms_per_round=ms_per_round, setting=setting, **knobs)
    if spec.exit_after == 0:
        mock.leave(spec)
    asyncio.run(_serve(spec, host, port, ignore_sigterm))


async def _serve(spec: Any, host: str, port: int, ignore_sigterm: bool) -> None:
    import asyncio
    import signal

    from ddtree_bench.load import mock

    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, over.set)
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if ignore_sigterm else over.set)
    runner, url = await mock.start(mock.MockServer(spec), host=host, port=port)
    print(url, flush=True)
    try:
        await over.wait()
    finally:
        await runner.cleanup()
