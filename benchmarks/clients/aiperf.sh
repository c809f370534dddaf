#!/usr/bin/env bash
# aiperf against a running server: streamed chats, four at once.
#
#   pip install aiperf==0.13.0                     # in an environment of its own
#   mamba-jax serve --model demo --port 8000 &
#   benchmarks/clients/aiperf.sh http://127.0.0.1:8000 results
set -euo pipefail
url=${1:-http://127.0.0.1:8000} output=${2:-aiperf} model=${MODEL:-demo} tokenizer=${TOKENIZER:-checkpoints/demo}
# The tokenizer is a folder here, and nothing is fetched. (With HF_HUB_OFFLINE set, aiperf 0.13 takes the folder's name for one
# of a hub's, and fails.)
exec aiperf profile --model "$model" --url "$url" --endpoint-type chat --streaming --tokenizer "$tokenizer" \
  --concurrency 4 --request-count 24 --synthetic-input-tokens-mean 64 --output-tokens-mean 16 \
  --shared-system-prompt-length 256 --extra-inputs ignore_eos:true --artifact-dir "$output" --ui simple
