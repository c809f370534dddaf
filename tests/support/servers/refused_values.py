"""Values of fields that the text APIs refuse: what errors name, and what they say."""

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


def tool(parameters=None):
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **(parameters or {})}}}


WRONG_VALUES = (
    ("temperature", -1), ("temperature", "hot"), ("temperature", []), ("top_p", -1), ("top_p", 2), ("min_p", -0.1),
    ("max_tokens", -1), ("max_tokens", "many"), ("n", 0), ("n", 10**6), ("top_k", 2**40), ("min_tokens", 2**40),
    ("stop", 5), ("stop", [1]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("seed", 2**80),
    ("logit_bias", [1]), ("logit_bias", {"5": "much"}), ("presence_penalty", 3), ("repetition_penalty", 0),
    ("stream", "perhaps"), ("priority", 2**40), ("cache_salt", ""), ("model", 5), ("response_format", "json"),
    ("cache_salt", "x" * 2000), ("truncate_prompt_tokens", -2), ("bad_words", ["x"]), ("allowed_token_ids", [1]),
    ("use_beam_search", True), ("logits_processors", ["x"]), ("n", 1.5), ("stop", [None]),
)  # fmt: skip
"""Of both older APIs."""
DO_NOT_FIT = (
    ({"stop": ["x"] * 65}, "stop must be a string or a list of at most 64 strings"), ({"stop": [""]}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias has 5000 entries"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
    ({"guided_json": {}}, '{"structured_outputs": {"json": ...}}'),
)  # fmt: skip
OF_ONE_API = {
    "/v1/completions": (
        *(({"prompt": prompt}, "prompt", "") for prompt in
          (None, 5, {}, [], [[]], ["x", 5], [1, "x"], [1.5], [True], [-1], [10**9], [[5], [2**40]])),
        ({"suffix": "end"}, "suffix", "suffix is not supported"),
        ({"best_of": 3}, "best_of", "best_of is not supported"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        ({"prompt": ["x"] * 1025}, "n", "1025 choices"), ({"prompt": ["x"] * 600, "n": 2}, "n", "1200 choices"),
        *(({"structured_outputs": form}, ..., "") for form in (
            {}, {"regex": "(["}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": [""]},
            {"grammar": "start: nothing"}, {"grammar": "root ::= ("}, {"json": {"type": "nonsense"}}, {"json": "{"},
            {"invented": 1}, {"regex": "a", "self": 1})),
        ({"structured_outputs": {"regex": "a", "x" * 10**6: 1}}, "structured_outputs", "unknown"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, ..., ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", ""),
        ({"response_format": {"type": "xml"}}, "response_format", ""),
        *(({"prompt": [5, 6], "prompt_logprob_token_ids": ids}, ..., "prompt_logprob_token_ids")
          for ids in ([-1], [10**6], list(range(129)), ["a"], 3)),
    ),
    "/v1/chat/completions": (
        *(({"messages": messages}, ..., "") for messages in (
            None, [], "x", [5], [{}], [{"role": "", "content": "x"}], [{"role": "user", "content": 5}],
            [{"role": "user", "content": [5]}])),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs=true"),
        ({"tool_choice": "sometimes"}, "tool_choice", "tool_choice must be none, auto, required"),
        *(({"tool_choice": choice, "tools": [tool()]}, "tool_choice", "") for choice in (
            {"type": "function", "function": {"name": "sub"}}, {"type": "function"}, {"type": "allowed_tools"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                {"type": "function", "function": {"name": "sub"}}]}})),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tools": [tool()], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, ..., "combined"),
        *(({"tool_choice": choice, "tools": [tool(parameters)]}, "tools", "") for choice in ("required", "auto")
          for parameters in (
              {"required": 5}, {"required": [5]}, {"properties": 5}, {"properties": {"a": 5}},
              {"properties": {"a": {"type": "string", "enum": 5}}})),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
        ({"response_format": {"type": "json_object", "schema": {"type": "nonsense"}}}, "response_format", ""),
    ),
    "/v1/responses": (
        *(({"input": items}, "input", "") for items in (
            [], [{"type": "item_reference", "id": "x"}], [{"content": "x"}], [{"role": "user", "content": 5}],
            [{"role": "user", "content": True}], [{"type": "reasoning", "content": 5}],
            [{"type": "function_call_output", "call_id": "c", "output": 5}])),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"background": True}, "background", ""), ({"conversation": "c"}, "conversation", ""),
        ({"temperature": -1}, "temperature", ""), ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "custom", "name": "f"}]}}, "tool_choice", ""),
        ({"text": {"format": {"type": "json_schema"}}}, "text", ""), ({"input": "word " * 9000}, "input", "at most"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}}, "text", ""),
        ({"n": 3}, "n", "n is not supported"),
        ({"tools": [{"type": "function", "name": "f", "parameters": deep(300)}]}, None, "nested"),
        ({"tool_choice": "required", "tools": [{"type": "custom", "name": "c", "format": {
            "type": "grammar", "syntax": "regex", "definition": "((((("}}]}, ..., ""),
    ),
    "/v1/messages": (
        ({"n": 3}, "n", "n is not supported"),
        *(({"messages": [{"role": "user", "content": content}]}, ..., "")
          for content in ([], [{"type": "redacted_thinking", "data": "x"}])),
        *(({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": choice}, ..., says) for choice, says in (
            ({"type": "tool"}, "there is no tool ''"), ({"type": "tool", "name": None}, "there is no tool ''"),
            ({"type": "function", "name": "f"}, ""), ({"type": "auto", "disable_parallel_tool_use": "x"}, ""))),
    ),
}  # fmt: skip
"""Fields, the parameter that the error names (... for any), and what the message says."""
REFUSED = (
    *((path, {name: value}, name, name) for path in PATHS for name, value in WRONG_VALUES),
    *((path, fields, next(iter(fields)), says) for path in PATHS for fields, says in DO_NOT_FIT),
    *((path, *row) for path, rows in OF_ONE_API.items() for row in rows),
)
