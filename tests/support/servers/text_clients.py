"""The three chat APIs, each asked by its SDK, with one form of question and of answer."""

import json
from dataclasses import dataclass, field

SCHEMA = {
    "type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], "additionalProperties": False,
}  # fmt: skip
LOOK = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
QUESTION = [{"role": "user", "content": "What is a state?"}]
REASONS = {"max_tokens": "length", "tool_use": "tool_calls", "end_turn": "stop", "stop_sequence": "stop"}


@dataclass
class ApiAnswer:
    """What a client gets, whole or put together from events."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""
    reason: str | None = None
    """The finish reason, in the words of `/v1/chat/completions`."""
    tokens: tuple[int, int, int] = (0, 0, 0)
    """Of the prompt, of these the cached ones, and of the output."""
    events: int = 1
    """Events with new output."""


def ask_chat(server, *, stream, limit, system, tools, force, schema, extra):
    body = {"messages": [*([{"role": "system", "content": system}] if system else ()), *QUESTION]}
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        body |= {"tool_choice": "required", "parallel_tool_calls": False} if force else {}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    sent = server.openai().chat.completions.create(
        model="demo", max_completion_tokens=limit, extra_body=extra, **body, **options
    )
    if not stream:
        (choice,) = sent.choices
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        assert message.content != "", "content is null if there is only reasoning or a call"
        assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
        thought = getattr(message, "reasoning", None) or ""
        return ApiAnswer(message.content or "", thought, calls, choice.finish_reason, _openai_tokens(sent.usage))
    answer = ApiAnswer(events=0)
    for chunk in sent:
        answer.tokens = _openai_tokens(chunk.usage) if chunk.usage is not None else answer.tokens
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            assert delta.get("reasoning") == delta.get("reasoning_content")
            assert not (answer.text and delta.get("reasoning"))
            answer.reasoning += delta.get("reasoning") or ""
            answer.text += delta.get("content") or ""
            answer.reason = choice.finish_reason or answer.reason
            answer.events += 1
            for call in choice.delta.tool_calls or ():
                if call.function.name is not None:
                    assert call.index == len(answer.calls)
                    answer.calls.append((call.function.name, ""))
                name, arguments = answer.calls[-1]
                answer.calls[-1] = name, arguments + (call.function.arguments or "")
    return answer


def _openai_tokens(usage):
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens


def ask_responses(server, *, stream, limit, system, tools, force, schema, extra):
    body = {"input": QUESTION, **({"instructions": system} if system else {})}
    if tools:
        body["tools"] = [{"type": "function", **tool} for tool in tools]
        body |= {"tool_choice": "required", "parallel_tool_calls": False} if force else {}
    if schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    sent = server.openai().responses.create(
        model="demo", max_output_tokens=limit, stream=stream, extra_body=extra, **body
    )
    events, whole = [], sent
    if stream:
        *events, last = sent
        whole = last.response
        assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))
        assert last.type == f"response.{whole.status}"
    answer = ApiAnswer(events=sum(event.type.endswith(".delta") for event in events) if stream else 1)
    for item in whole.output:
        deltas = "".join(event.delta for event in events if event.type.endswith(".delta") and event.item_id == item.id)
        match item.type:
            case "reasoning":
                answer.reasoning = told = item.content[0].text
            case "message":
                answer.text = told = item.content[0].text
            case "function_call":
                told = item.arguments
                answer.calls.append((item.name, told))
        assert not stream or deltas == told
    answer.reason = "length" if whole.status == "incomplete" else "tool_calls" if answer.calls else "stop"
    usage = whole.usage
    answer.tokens = usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens
    return answer


def ask_messages(server, *, stream, limit, system, tools, force, schema, extra):
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
    body = {"messages": QUESTION, **({"system": system} if system else {})}
    if tools:
        body["tools"] = [{"name": it["name"], "input_schema": it.get("parameters", {"type": "object"})} for it in tools]
        body |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}} if force else {}
    if schema is not None:  # older SDKs have no argument for it
        extra = extra | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    body |= {"model": "demo", "max_tokens": limit, "extra_body": extra}
    answer = ApiAnswer()
    if stream:
        with client.messages.stream(**body) as events:
            answer.events = sum(event.type == "content_block_delta" for event in events)
            whole = events.get_final_message()
    else:
        whole = client.messages.create(**body)
    for block in whole.content:
        match block.type:
            case "thinking":
                answer.reasoning = block.thinking
            case "text":
                answer.text = block.text
            case "tool_use":
                answer.calls.append((block.name, json.dumps(block.input)))
    answer.reason = REASONS[whole.stop_reason]
    usage = whole.usage
    cached = usage.cache_read_input_tokens
    answer.tokens = usage.input_tokens + cached, cached, usage.output_tokens
    return answer


def joined(chunks, text_of, tokens_of):
    """The text, the tokens with log-probabilities and the finish reason of each choice of a stream, by index."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, tokens, reason = choices.get(choice.index, ("", [], None))
            assert reason is None, "nothing comes after the finish reason"
            new = [] if choice.logprobs is None else [*tokens_of(choice.logprobs)]
            choices[choice.index] = text + text_of(choice), tokens + new, choice.finish_reason
    return choices


APIS = {"chat/completions": ask_chat, "responses": ask_responses, "messages": ask_messages}


def ask(api, server, *, stream=False, limit=12, system=None, tools=(), force=False, schema=None, **extra):
    """Asks `QUESTION`, greedily. `force`: the model must call one of `tools`; `extra`: fields with equal names."""
    settings = {"limit": limit, "system": system, "tools": tools, "force": force, "schema": schema}
    return APIS[api](server, stream=stream, **settings, extra={"temperature": 0} | extra)
