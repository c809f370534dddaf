#!/usr/bin/env bash
# The demo model from nothing: its corpus, the model, then its draft layer (one draft deep, then three).
#
#     bash benchmarks/demo.sh DIRECTORY
#
# About two hours on one core; what an interrupted run has done is not done again. The model is DIRECTORY/demo.
set -euo pipefail
out=${1:?usage: demo.sh DIRECTORY}
root=$(cd "$(dirname "$0")/.." && pwd)
recipe=$root/mamba_jax/train/recipes/demo.yaml
draft=(mamba-jax train-mtp --data "$out/corpus" --batch-size 4 --sequence-length 256 --rollouts 120000)
if [[ $(uname) == Linux ]]; then # memory that the allocator would give back after every step
  export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=68719476736
fi
mkdir -p "$out"
[[ -f $out/corpus/manifest.json ]] || PYTHONPATH=$root python3 -m benchmarks.demo_corpus "$out/corpus"
mamba-jax train --config "$recipe" --corpus "$out/corpus" --output "$out/run"
[[ -d $out/first ]] || "${draft[@]}" --model "$out/run/model" --output "$out/first" --run "$out/first-run" \
  --anew --depth 1 --steps 3000 --learning-rate 1e-2
[[ -d $out/demo ]] || "${draft[@]}" --model "$out/first" --output "$out/demo" --run "$out/demo-run" \
  --depth 3 --steps 1500 --learning-rate 5e-3
