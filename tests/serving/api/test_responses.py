"""`/v1/responses`, asked by the openai SDK: answers, events, calls, conversations that go on, and what is kept."""

import asyncio
import json

import openai
import pytest
from pydantic import ValidationError

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.responses import ResponseWriter, as_chat
from serving.api.http.context import ResponseContext, ResponseStore, StoredResponse, owner_of
from serving.api.http.errors import ApiError
from serving.api.http.generation import ChoiceDelta
from serving.api.http.logprobs import TextLogprobs
from serving.api.http.protocol.responses import ResponsesRequest
from serving.api.http.text import TextCodec
from serving.engine.requests.output import CompletionOutput, Logprob, RequestOutput
from tests.support.servers import text_clients
from tests.support.servers.fake_workers import pieces as arriving
from tests.support.servers.written_calls import written

LOOK = {"type": "function", "strict": True, **text_clients.LOOK}


def ask(server, **fields):
    body = {"model": "demo", "input": "What is a state?", "max_output_tokens": 12, "temperature": 0} | fields
    return server.openai().responses.create(**body)


def test_fields_of_a_chat():
    body = ResponsesRequest.model_validate(
        {"input": "x", "tools": [LOOK], "tool_choice": {"type": "function", "name": "look"}, "top_k": 3, "user": "me",
         "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}
    )  # fmt: skip
    chat = as_chat(body, None)
    assert chat.tool_choice.function.name == "look"
    assert chat.tools[0].function.name == "look"
    assert chat.response_format.schema_ == {}
    assert (chat.top_k, chat.reasoning.effort) == (3, "low")
    assert "user" not in chat.model_extra


def test_events(server):
    events = list(ask(server, stream=True))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    last = events[-1].response
    assert events[0].response.id == last.id
    assert [events[-2].item] == last.output
    assert last.incomplete_details.reason == "max_output_tokens"
    assert last.usage.total_tokens == last.usage.input_tokens + 12


def test_the_sdks_own_stream(server):
    form = {"structured_outputs": {"choice": ["two words"]}}  # it wants an answer that comes to its end
    fields = {"model": "demo", "input": "Hello", "max_output_tokens": 20, "extra_body": form}
    with server.openai().responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == "two words"


@pytest.mark.smoke
@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_and_what_it_gave(server, streamed):
    fields = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    answer = list(ask(server, stream=True, **fields))[-1].response if streamed else ask(server, **fields)
    (call,) = answer.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "nothing"}
    after = ask(server, tools=[LOOK], previous_response_id=answer.id, input=[result])
    assert after.output_text
    by_hand = [{"role": "user", "content": "What is a state?"}, call.model_dump(), result]
    assert ask(server, tools=[LOOK], input=by_hand).usage.input_tokens == after.usage.input_tokens


def test_conversations_go_on(server):
    client = server.openai()
    first = ask(server, instructions="Only for this turn, not for the next one.")
    second = ask(server, input="And then?", previous_response_id=first.id)
    turns = [
        {"role": "user", "content": "What is a state?"},
        {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And then?"},
    ]  # fmt: skip
    assert ask(server, input=turns).output_text == second.output_text
    third = ask(server, input="So?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        ask(server, previous_response_id=first.id)
    assert ask(server, input="So?", previous_response_id=second.id).output_text == third.output_text
    unstored = ask(server, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_other_keys_find_nothing(server):
    made = server.openai(api_key="mine").responses.create(model="demo", input="x", max_output_tokens=1)
    assert server.openai(api_key="mine").responses.retrieve(made.id).id == made.id
    for call in (
        lambda client: client.responses.retrieve(made.id),
        lambda client: client.responses.delete(made.id),
        lambda client: client.responses.create(model="demo", input="y", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call(server.openai(api_key="theirs"))


def test_the_input_of_a_stored_response_is_listed(server):
    given = [
        {"id": None, "role": "user", "content": "One"}, {"role": "assistant", "content": "Two"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Three"}]},
    ]  # fmt: skip
    client = server.openai()
    made = client.responses.create(model="demo", input=given, max_output_tokens=2)
    assert made.usage.input_tokens_details.cache_write_tokens >= 0
    assert client.responses.input_tokens.count(model="demo", input=given).input_tokens == made.usage.input_tokens
    items = list(client.responses.input_items.list(made.id, order="asc", limit=2))  # two pages
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "One"), ("assistant", "Two"), ("user", "Three")
    ]  # fmt: skip
    assert len({item.id for item in items}) == 3
    assert next(iter(client.responses.input_items.list(made.id))).content[0].text == "Three"
    short = client.responses.create(model="demo", input="Four", previous_response_id=made.id, max_output_tokens=2)
    assert [item.content[0].text for item in client.responses.input_items.list(short.id)] == ["Four"]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_unknown")


def test_anthropics_clients_list_models_in_their_form(server):
    headers = {"anthropic-version": "2023-06-01"}
    found = server.http.get("/v1/models", headers=headers).json()
    assert (found["first_id"], found["has_more"]) == (found["data"][0]["id"], False)
    assert found["data"][0]["type"] == "model"
    assert server.http.get(f"/v1/models/{found['first_id']}", headers=headers).json() == found["data"][0]


def test_what_is_kept_is_bounded_for_each_key():
    store = ResponseStore(6, 10_000)
    for i in range(50):
        for key, size in (("theirs", 1), ("mine", 1_500)):
            kept = StoredResponse([{"role": "user", "content": "x" * size}], b"{}", owner_of(key))
            store.put(f"{key} {min(i, 1) if key == 'theirs' else i}", kept)
    assert store.find("theirs 0", "theirs")
    assert (len(store.stored) <= 6, store.stored.num_bytes <= 10_000) == (True, True)
    store.delete("mine 49", "mine")
    for name in ("theirs 0", "mine 0", "mine 49"):
        with pytest.raises(ApiError, match="no stored response"):
            store.delete(name, "mine")


def written_with_logprobs(text, step, **fields):
    """An answer of this text, `step` tokens at a time, whole and as events: its item of text."""
    tokenizer = load_tokenizer("demo")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    tables = [{token: Logprob(-float(i), 1), 7: Logprob(-99.0, 2)} for i, token in enumerate(ids)]
    body = ResponsesRequest.model_validate({"input": "Why?", "store": False} | fields)
    context = ResponseContext(TextCodec(tokenizer, 512), "demo", tool_calls="hermes")
    chat = as_chat(body, None)
    assert (chat.logprobs, chat.top_logprobs) == (True, body.top_logprobs or 0)
    output, pieces = RequestOutput("r", None, [1], [], finished=True), []
    for begin in range(0, len(ids), step):
        end = begin + step
        new = tokenizer.decode(ids[:end])[len(tokenizer.decode(ids[:begin])) :]
        reason = "stop" if end >= len(ids) else None
        choice = CompletionOutput(0, new, ids[begin:end], tables[begin:end], finish_reason=reason)
        pieces.append(ChoiceDelta(0, output, choice))

    async def events():
        streamed = ResponseWriter(context, body, chat, [tokenizer.encode("Why?")])
        return [json.loads(event.partition(b"data: ")[2]) async for event in streamed.events(arriving(*pieces))]

    whole = ResponseWriter(context, body, chat, [tokenizer.encode("Why?")]).response(pieces)
    told = asyncio.run(events())
    (said,) = (part for item in told[-1]["response"]["output"] if item["type"] == "message" for part in item["content"])
    (part,) = (part for item in whole.output if item.type == "message" for part in item.content)
    assert part.model_dump() == said
    deltas = [entry for each in told if each["type"] == "response.output_text.delta" for entry in each["logprobs"]]
    assert deltas == said["logprobs"][: len(deltas)]
    assert [each["logprobs"] for each in told if each["type"] == "response.output_text.done"] == [said["logprobs"]]
    assert whole.top_logprobs == (body.top_logprobs or 0)
    return said


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_log_probabilities_of_the_text(step, fields):
    said = written_with_logprobs("Because of two states.", step, **fields)
    assert "".join(entry["token"] for entry in said["logprobs"]) == said["text"] == "Because of two states."
    assert [entry["logprob"] for entry in said["logprobs"]] == [-float(i) for i in range(len(said["logprobs"]))]
    assert {len(entry["top_logprobs"]) for entry in said["logprobs"]} == {fields.get("top_logprobs", 0)}


def test_log_probabilities_leave_out_reasoning():
    codec = TextCodec(load_tokenizer("demo"), 512)
    ids = codec.tokenizer.encode("Hm. Because.", add_special_tokens=False)
    thought = codec.tokenizer.encode("Hm.", add_special_tokens=False)
    assert ids[: len(thought)] == thought
    found = TextLogprobs(codec, top=0, reasoning=lambda tokens: len(thought))
    for token in ids:
        found.push([token], [{token: Logprob(-1.0, 1)}])
    assert "".join(entry.token for entry in found.take(4) + found.rest()) == " Because."


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_log_probabilities_leave_out_calls(step):
    call = written("hermes", ("look", {"deep": True}))
    said = written_with_logprobs(f"I look.\n{call}", step, top_logprobs=1, tools=[LOOK])
    shown = "".join(entry["token"] for entry in said["logprobs"])
    assert said["text"] == "I look."
    assert shown.startswith("I look.")
    assert not any(part in shown for part in ("tool_call", "name"))


def test_log_probabilities_have_bounds():
    for fields in ({"top_logprobs": 21}, {"top_logprobs": -1}, {"include": [5]}):
        with pytest.raises(ValidationError):
            ResponsesRequest.model_validate({"input": "x"} | fields)
    assert not as_chat(ResponsesRequest.model_validate({"input": "x", "include": ["other"]}), None).logprobs
