"""Values of fields that the text APIs refuse: what errors name, and what they say."""

from pathlib import Path

import yaml

PATHS = ["/v1/completions", "/v1/chat/completions"]
MESSAGES = [{"role": "user", "content": "x"}]
BODY = {
    "/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x", "max_output_tokens": 1}, "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
}  # fmt: skip


def deep(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


LARGE = {
    "older APIs": (
        ({"cache_salt": "x" * 2000}, "cache_salt", "cache_salt"),
        ({"stop": ["x"] * 65}, "stop", "stop must be a string or a list of at most 64 strings"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias", "logit_bias has 5000 entries"),
    ),
    "/v1/completions": (
        ({"prompt": ["x"] * 1025}, "n", "1025 choices"),
        ({"prompt": ["x"] * 600, "n": 2}, "n", "1200 choices"),
        ({"structured_outputs": {"regex": "a", "x" * 10**6: 1}}, "structured_outputs", "unknown"),
        ({"prompt": [5, 6], "prompt_logprob_token_ids": list(range(129))}, "any", "prompt_logprob_token_ids"),
    ),
    "/v1/responses": (
        ({"input": "word " * 9000}, "input", "at most"),
        ({"tools": [{"type": "function", "name": "f", "parameters": deep(300)}]}, None, "nested"),
    ),
}
"""More rows for `refused_values.yaml`."""
REFUSED = [
    (path, fields, ... if param == "any" else param, says)
    for api, rows in [*yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items(), *LARGE.items()]
    for path in (PATHS if api == "older APIs" else [api])
    for fields, param, says in rows
]
"""The path, fields, the parameter that the error names (... for any), and what the message says."""
