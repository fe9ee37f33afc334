"""`ddtree-bench serve`: serve a model with plain, linear or tree decoding over HTTP."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

import click

from ddtree_bench.config import DEVICES, DTYPES, LOAD_FORMATS, MODES


@click.command(name="serve", context_settings={"show_default": True})
@click.option("--model", default="tiny-dense", help="Bundled name or checkpoint folder of the target.")
@click.option("--drafter", default=None, show_default="the model's bundled one", help="Bundled name or folder of the drafter.")
@click.option("--mode", type=click.Choice(MODES), default="tree", help="Plain decoding, a chain, or a tree.")
@click.option("--block-size", type=int, default=None, show_default="the drafter's", help="Drafter's block, root included.")
@click.option("--depth", type=int, default=None, show_default="no cap", help="Greatest depth of a draft node.")
@click.option("--top-k", type=int, default=8, help="Candidates of each depth.")
@click.option("--branching", type=int, default=None, show_default="no cap", help="Most children of a node below the root.")
@click.option("--node-budget", type=int, default=15, help="Most draft nodes of a tree, the root not counted.")
@click.option("--draft-temperature", type=float, default=1.0, help="Divides the drafter's logits; never the target's.")
@click.option("--tensor-parallel", type=int, default=1, help="Ranks, one process each.")
@click.option("--device", type=click.Choice(DEVICES), default="cpu", help="Where the models run.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", help="Number format of weights and caches.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 is any free one.")
@click.option("--max-running-requests", type=int, default=16, help="Requests that decode together.")
@click.option("--max-total-tokens", type=int, default=None, show_default="from memory", help="Slots of the KV cache.")
@click.option("--max-context", type=int, default=None, show_default="the model's", help="Most tokens of prompt and answer.")
@click.option("--max-prefill-tokens", type=int, default=1024, help="Prompt tokens of one prefill step.")
@click.option("--page-size", type=int, default=16, help="Cache slots of a page.")
@click.option("--load-format", type=click.Choice(LOAD_FORMATS), default="auto", help="Stored weights, or random ones (dummy).")
@click.option("--threads", type=int, default=None, show_default="a share of the cores", help="CPU threads of each rank.")
@click.option("--seed", type=int, default=0, help="Seed of random weights.")
@click.option("--served-model-name", default=None, show_default="--model", help="Name that clients use.")
@click.option("--api-key", default=None, envvar="DDTREE_API_KEY", show_envvar=True, help="Ask clients for this key.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning"]), default="info", help="What goes to stderr.")
def command(
    *,
    model: str,
    drafter: str | None,
    mode: str,
    block_size: int | None,
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    log_level: str,
    **options: Any,
) -> None:
    """Serve a model over HTTP. The last line on stdout is the URL, printed when the server is ready; logs go to stderr."""
    if api_key == "":  # e.g. of a variable that is not set: a server that every client may use
        raise click.BadParameter("must not be empty; leave it out for a server without a key", param_hint="--api-key")
    signal.signal(signal.SIGTERM, leave)  # until the server has its own handler: a stop while loading is a clean end too
    logging.basicConfig(stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    knobs = {name: options.pop(name) for name in ("depth", "top_k", "branching", "node_budget", "draft_temperature")}
    set_thread_environment(options["tensor_parallel"], options["threads"])

    from ddtree_bench.engine.handle import EngineHandle, launch
    from ddtree_bench.server.bridge import OnFailure, OnUpdates
    from ddtree_bench.server.prepare import prepare
    from ddtree_bench.server.run import ServePlan, run

    settings, served = prepare(
        model=model,
        drafter=drafter,
        mode=mode,
        block_size=block_size,
        knobs=knobs,
        engine=options,
        given=written_flags(),
        served_model_name=served_model_name,
    )

    def start(on_updates: OnUpdates, on_failure: OnFailure) -> EngineHandle:
        return launch(settings, on_updates, on_failure=on_failure)

    run(ServePlan(settings=settings, model=served, launch=start, host=host, port=port, api_key=api_key))


def leave(signum: int, frame: FrameType | None) -> None:
    """End at once: an exception raised here could be swallowed by an import that tries and fails quietly."""
    os._exit(0)  # nothing has been started or opened yet


def set_thread_environment(tensor_parallel: int, threads: int | None) -> None:
    """Set what torch reads when it is imported: threads that spin while they wait starve the other ranks."""
    from ddtree_bench.engine.settings import EngineSettings, thread_environment

    os.environ.update(thread_environment(EngineSettings(tensor_parallel=tensor_parallel, threads=threads)))


def written_flags() -> frozenset[str]:
    """Return the names of the options that the user wrote, not the defaults."""
    context = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    return frozenset(name for name in context.params if context.get_parameter_source(name) is source)
