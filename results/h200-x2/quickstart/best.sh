#!/usr/bin/env bash
# tree b16 d7 k7 br6 n7 t1: output_tok_s 110.3, ms_per_token 9.062, acceptance_length 3.261
# options given to this script win over those below, e.g. --port 8001
set -euo pipefail
exec ddtree-bench serve --model tiny-dense --mode tree --block-size 16 --depth 7 --top-k 7 --node-budget 7 --branching 6 --draft-temperature 1 --tensor-parallel 2 --device cuda --dtype float32 --max-running-requests 4 --page-size 16 --load-format auto --port 8000 "$@"
