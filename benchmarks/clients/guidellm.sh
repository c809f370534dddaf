#!/usr/bin/env bash
# guidellm against a running server: conversations of three turns that share two system prompts.
#
#   pip install torch==2.13.0 guidellm==0.8.1      # in an environment of its own
#   mamba-jax serve --model demo --port 8000 &
#   benchmarks/clients/guidellm.sh http://127.0.0.1:8000 results.json
set -euo pipefail
url=${1:-http://127.0.0.1:8000} output=${2:-guidellm.json} model=${MODEL:-demo} tokenizer=${TOKENIZER:-checkpoints/demo}
# The tokenizer is a folder here; nothing is fetched.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
exec guidellm run \
  --backend "kind=openai_http,target=$url,model=$model" \
  --tokenizer "kind=huggingface_auto,model=$tokenizer" \
  --data "kind=synthetic_text,prompt_tokens=64,output_tokens=16,turns=3,prefix_tokens=128,prefix_count=2" \
  --profile "kind=concurrent,streams=4" --constraint "kind=max_requests,count=24" \
  --output "kind=json,path=$output" --disable-progress
