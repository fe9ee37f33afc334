#!/usr/bin/env bash
# linear b16 d15: output_tok_s 229, ms_per_token 4.359, acceptance_length 2.97
# study kernels-check, machine h200-x1, 2026-11-30T01:23:12+00:00, commit 77127bb7320cd63022986adc6cda43d54dfd60cf
# options given to this script win over those below, e.g. --port 8001
set -euo pipefail
exec ddtree-bench serve --model tiny-dense --mode linear --block-size 16 --depth 15 --tensor-parallel 1 --device cuda --dtype float32 --max-running-requests 4 --page-size 16 --load-format auto --port 8000 "$@"
