"""Command line of training. Only the standard library is needed to parse it, so it starts on a bare GPU machine."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from ddtree_bench.models.training.settings import SCALES, Workdir

STAGES = ("corpus", "tokenizer", "target", "generate", "drafter", "export", "evaluate", "prompts")
BUNDLED_PROMPTS = Path(__file__).parents[1] / "bundled" / "prompts.jsonl"


def parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    options = argparse.ArgumentParser(prog="python -m ddtree_bench.models.training", description=__doc__)
    options.add_argument("stages", nargs="+", choices=(*STAGES, "all"), help="one or more, run in the given order")
    options.add_argument("--workdir", type=Path, required=True)
    options.add_argument("--scale", choices=sorted(SCALES), default="full")
    options.add_argument("--device", default=None, help="cpu or cuda; the default is cuda where there is one")
    options.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    options.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    options.add_argument("--target-seconds", type=float, default=330.0)
    options.add_argument("--generate-seconds", type=float, default=100.0)
    options.add_argument("--generate-tokens", type=float, default=30e6)
    options.add_argument("--drafter-seconds", type=float, default=270.0)
    options.add_argument(
        "--continue-exported", action="store_true", help="start a stage that has no state from the exported weights"
    )
    options.add_argument("--checkpoint-seconds", type=float, default=60.0)
    options.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS)
    options.add_argument("--bundled", action="store_true", help="evaluate the pair that ships, not the workdir's")
    options.add_argument("--results", type=Path, default=None, help="where evaluation.json goes; default the workdir")
    options.add_argument("--num-prompts", type=int, default=240)
    options.add_argument("--block-size", type=int, default=16)
    options.add_argument("--new-tokens", type=int, default=128)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the stages that were asked for."""
    options = parser().parse_args(arguments)
    stages = STAGES[:-1] if "all" in options.stages else options.stages
    options.workdir.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        start_s = time.monotonic()
        run_stage(stage, options, Workdir(options.workdir))
        print(f"{stage}: done in {time.monotonic() - start_s:.1f} s", flush=True)


def run_stage(stage: str, options: argparse.Namespace, workdir: Workdir) -> None:
    """Run one stage; torch is imported only by the stages that use it."""
    settings = SCALES[options.scale]
    if stage == "prompts":
        from ddtree_bench.models.training.prompts import cut_prompts

        cut_prompts(options.prompts, options.num_prompts)
    elif stage == "corpus":
        from ddtree_bench.models.training.corpus import gather

        gather(workdir, settings, options.prompts)
    elif stage == "tokenizer":
        from ddtree_bench.models.training.vocabulary import tokenise, train_tokenizer

        if not (workdir.target / "tokenizer.json").exists():
            train_tokenizer(workdir, settings)
        tokenise(workdir, workdir.target)
    elif stage == "export":
        from ddtree_bench.models.training.export import export

        export(workdir)
    else:
        run_torch_stage(stage, options, workdir)


def run_torch_stage(stage: str, options: argparse.Namespace, workdir: Workdir) -> None:
    """Run one of the stages that compute with torch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from ddtree_bench.models.training.common import Machine, Times

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    use_compile = device.type == "cuda" if options.compile is None else options.compile
    machine, settings = Machine(device, use_compile), SCALES[options.scale]
    if stage == "target":
        from ddtree_bench.models.training.generate import show_samples
        from ddtree_bench.models.training.target import train_target

        times = Times(options.target_seconds, options.checkpoint_seconds, options.continue_exported)
        train_target(workdir, settings, machine, times)
        show_samples(workdir, machine)
    elif stage == "generate":
        from ddtree_bench.models.training.generate import generate

        generate(workdir, settings, machine, options.generate_seconds, options.generate_tokens)
    elif stage == "drafter":
        from ddtree_bench.models.training.drafter import train_drafter

        times = Times(options.drafter_seconds, options.checkpoint_seconds, options.continue_exported)
        train_drafter(workdir, settings, machine, times)
    elif stage == "evaluate":
        from ddtree_bench.models.training.evaluate import evaluate

        bundled = BUNDLED_PROMPTS.parent
        evaluate(
            bundled / "tiny-dense" if options.bundled else workdir.target,
            bundled / "tiny-dense-dflash" if options.bundled else workdir.drafter,
            options.results or workdir.root,
            machine,
            prompts_path=options.prompts,
            num_prompts=options.num_prompts,
            block_size=options.block_size,
            new_tokens=options.new_tokens,
        )


if __name__ == "__main__":
    main()
