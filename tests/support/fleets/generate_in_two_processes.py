"""One of two processes that run a model together; prints what it generates.

Run it as `python -m tests.support.fleets.generate_in_two_processes PORT NUMBER DIRECTORY`.
"""

import json
import sys

import jax

SIZES = {"tile_size": 16, "state_block_size": 32, "page_size": 8, "max_model_len": 96, "num_slots": 8, "num_pages": 20}
PROMPT = {"prompt_token_ids": [7, 8, 9] * 14}
SAMPLING = {"max_tokens": 10, "temperature": 0.0, "ignore_eos": True}


def main(port, number, directory):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))
    from serving import LLM, SamplingParams

    llm = LLM(
        directory,
        tensor_parallel_size=2,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        num_speculative_tokens=2,
        speculative_method="ngram",
        warmup=False,
        **SIZES,
    )
    held = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(llm.engine.loop.store)]
    assert sum(held) == llm.size.total_bytes
    outputs = [llm.generate(PROMPT, SamplingParams(**SAMPLING), use_tqdm=False)[0] for _ in range(2)]
    print(json.dumps([[output.outputs[0].token_ids, output.num_cached_tokens] for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
