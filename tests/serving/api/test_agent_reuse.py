"""Prompt tokens that an agent's traffic gets from the cache, of those that an oracle would reuse."""

import pytest

from benchmarks.clients.agent_reuse import measured
from tests.support.fleets.split_pair import letter_engine
from tests.support.servers.live_server import in_process

TEMPLATE = (
    "{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content and loop.index > last.user %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}[end]{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
"""Thoughts of earlier turns are dropped, as Qwen's and Nemotron's templates do."""
CONVERSATIONS, ROWS = 8, 2


@pytest.mark.full
def test_an_agent_reuses_what_an_oracle_reuses():
    """With two slots for each conversation, and those that rows and the shared beginning need."""
    sizes = {
        "state_block_size": 256, "tile_size": 256, "page_size": 32, "max_model_len": 16384, "num_pages": 6000,
        "max_num_batched_tokens": 4096, "max_num_seqs": ROWS, "num_slots": 2 + 2 * ROWS + 2 * CONVERSATIONS,
    }  # fmt: skip
    with in_process(letter_engine(TEMPLATE, **sizes)) as client:

        def post(body):
            return client.post("/v1/chat/completions", json=body).raise_for_status().json()

        whole, first = measured(post, conversations=CONVERSATIONS)
    assert whole.cached >= 0.99 * whole.oracle, whole
    assert first.cached >= 0.95 * first.oracle, first
    assert whole.oracle > 0.7 * whole.prompt
