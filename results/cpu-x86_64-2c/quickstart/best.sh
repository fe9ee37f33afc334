#!/usr/bin/env bash
# tree b16 d15 k8 br8 n15 t1: output_tok_s 49.2, ms_per_token 20.31, acceptance_length 3.642
# study quickstart, machine cpu-x86_64-2c, 2026-11-30T01:25:34+00:00, commit c4eb1c0119078ee564245b4d42db25181c9c7c6b
# options given to this script win over those below, e.g. --port 8001
set -euo pipefail
exec ddtree-bench serve --model tiny-dense --mode tree --block-size 16 --depth 15 --top-k 8 --node-budget 15 --branching 8 --draft-temperature 1 --tensor-parallel 2 --device cpu --dtype float32 --max-running-requests 4 --page-size 16 --load-format auto --port 8000 "$@"
