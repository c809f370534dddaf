"""`/v1/completions` and `/v1/chat/completions`, asked by the openai SDK, and the tokens of texts."""

import json
import math

import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.choices import CompletionWriter
from serving.api.http.context import ResponseContext
from serving.api.http.generation import whole
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.text import TextCodec
from serving.engine.requests.output import CompletionOutput, Logprob, RequestOutput
from tests.support.servers.text_clients import joined

TEXT = "The state of a recurrent model"


def test_sixteen_tokens_unless_told_otherwise(server):
    answer = server.complete(max_tokens=None, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_all_forms_of_prompts_say_the_same(server):
    client = server.openai()
    ids = server.http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    other = server.http.post("/tokenize", json={"prompt": "Another"}).json()["tokens"]
    ask = {"model": "demo", "max_tokens": 5, "temperature": 0}
    text = client.completions.create(prompt=TEXT, **ask).choices[0].text
    assert client.completions.create(prompt=ids, **ask).choices[0].text == text
    several = client.completions.create(prompt=[ids, other, ids], **ask)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].text == several.choices[2].text == text
    assert several.usage.prompt_tokens == 2 * len(ids) + len(other)
    texts = client.completions.create(prompt=[TEXT, "Another"], **ask)
    assert [choice.text for choice in texts.choices] == [text, several.choices[1].text]


def test_logprobs(server):
    answer = server.openai().completions.create(model="demo", prompt=TEXT, max_tokens=4, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert "".join(found.tokens) == answer.choices[0].text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 4
    assert found.text_offset[0] == 0
    assert found.text_offset[1] == len(found.tokens[0])
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert value == max(top.values())  # greedy


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_as_evaluation_harnesses_do(server, max_tokens):
    """Batched token ids, echo and log-probabilities: those of the prompt are what the harness sums up."""
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    body = {
        "model": "demo", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True,
        "seed": 1234, "stop": ["\n\n"],
    }  # fmt: skip
    answer = server.http.post("/v1/completions", json=body).json()
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(prompt) + max_tokens
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        for value, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
            assert value <= 0
            assert math.isfinite(value)
            assert max(top.values()) >= value - 1e-6
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
    # The prompt's log-probabilities are those that generating gives.
    generated = server.complete(prompt=[5, 6], logprobs=1, max_tokens=1, logit_bias={"7": 100}).json()
    assert generated["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(
        answer["choices"][0]["logprobs"]["token_logprobs"][2], abs=1e-4
    )


def test_prompt_logprobs_of_given_ids(server):
    prompts, ids = [[5, 6, 7, 8, 9], [10, 11, 12]], [7, 300, 7]
    answer = server.complete(prompts, prompt_logprob_token_ids=ids, max_tokens=0, n=2).json()
    assert answer["usage"]["completion_tokens"] == 0
    first, repeated, second, _ = answer["choices"]
    assert "prompt_logprobs" not in repeated or repeated["prompt_logprobs"] is None
    for prompt, choice in zip(prompts, (first, second), strict=True):
        found = choice["prompt_logprobs"]
        assert found[0] is None
        assert [list(map(int, table)) for table in found[1:]] == [list(dict.fromkeys([t, *ids])) for t in prompt[1:]]
        scored = server.complete(prompt, echo=True, logprobs=0, max_tokens=0).json()["choices"][0]["logprobs"]
        own = [table[str(token)]["logprob"] for token, table in zip(prompt[1:], found[1:], strict=True)]
        assert own == scored["token_logprobs"][1:]
    other = server.complete([5, 300], echo=True, logprobs=0, max_tokens=0).json()["choices"][0]["logprobs"]
    assert first["prompt_logprobs"][1]["300"]["logprob"] == pytest.approx(other["token_logprobs"][1], abs=1e-4)
    (choice,) = server.complete(prompts[0], prompt_logprobs=2, max_tokens=0).json()["choices"]
    likeliest = [sorted(it["rank"] for it in each.values() if it["rank"])[:2] for each in choice["prompt_logprobs"][1:]]
    assert likeliest == [[1, 2]] * (len(prompts[0]) - 1)
    assert server.complete(prompts[0], prompt_logprobs=21).json()["error"]["param"] == "prompt_logprobs"
    lines = server.complete(prompts[0], prompt_logprob_token_ids=ids, stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    shown = [event["choices"][0].get("prompt_logprobs") for event in events]
    assert len(shown) > 1
    assert shown[0] == first["prompt_logprobs"]
    assert not any(shown[1:])


BOS, EOS = "<|bos|>", "<|eos|>"


def written_offsets(prompt, token_ids, **fields):
    """Tokens of a completion, and their parts of its text by `text_offset`."""
    tokenizer = load_tokenizer("demo")
    body = CompletionRequest.model_validate({"prompt": prompt, "echo": True, "logprobs": 0} | fields)
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    writer = CompletionWriter(ResponseContext(TextCodec(tokenizer, 512), "demo"), body, body, [ids])
    tables = [{token: Logprob(-1.0, None)} for token in token_ids]
    text = tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens is not False)
    choice = CompletionOutput(0, text, token_ids, logprobs=tables, finish_reason="stop")
    known = [None, *({token: Logprob(-1.0, None)} for token in ids[1:])]
    output = RequestOutput("r", None, ids, [choice], finished=True, prompt_logprobs=known)
    (choice,) = writer.response(whole([output], writer.job)).choices
    begin = choice.logprobs.text_offset
    parts = [choice.text[a:b] for a, b in zip(begin, [*begin[1:], len(choice.text)], strict=True)]
    return list(zip(choice.logprobs.tokens, parts, strict=True))


def test_text_offsets_leave_out_tokens_that_are_not_in_the_text():
    tokenizer = load_tokenizer("demo")
    bos, eos = (tokenizer.token_to_id(token) for token in (BOS, EOS))
    word = tokenizer.encode("one", add_special_tokens=False)
    text = "One two"
    plain = [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    told = [(part, part) for part in (*plain, *map(tokenizer.token_text, word))]
    assert written_offsets(text, word) == [(BOS, ""), *told]
    assert written_offsets(text, [*word, eos]) == [(BOS, ""), *told, (EOS, "")]
    assert written_offsets([bos, *tokenizer.encode(text, add_special_tokens=False)], word) == [(BOS, BOS), *told]
    shown = written_offsets(text, [*word, eos], skip_special_tokens=False)
    assert shown == [(BOS, ""), *told, (EOS, EOS)]


def test_stops(server):
    whole = server.complete(TEXT, max_tokens=12, return_token_ids=True, ignore_eos=True).json()["choices"][0]
    stop = whole["text"][5:8]
    cut = server.complete(TEXT, max_tokens=12, stop=stop).json()["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = server.complete(TEXT, max_tokens=12, stop=[stop], include_stop_str_in_output=True).json()["choices"][0]
    assert kept["text"] == cut["text"] + stop
    token = whole["token_ids"][3]
    by_token = server.complete(TEXT, max_tokens=12, stop_token_ids=[token]).json()
    assert by_token["choices"][0]["stop_reason"] == token
    assert by_token["usage"]["completion_tokens"] == whole["token_ids"].index(token) + 1


def test_sampling_parameters_reach_the_engine(server):
    greedy = server.complete(TEXT).json()["choices"][0]["text"]
    for fields in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert server.complete(TEXT, temperature=1.0, **fields).json()["choices"][0]["text"] == greedy
    biased = server.complete(TEXT, max_tokens=3, logit_bias={"70": 100}, return_token_ids=True).json()
    assert biased["choices"][0]["token_ids"] == [70] * 3
    fields = {"logit_bias": {"70": 20}, "repetition_penalty": 50.0, "return_token_ids": True, "max_tokens": 3}
    assert server.complete(TEXT, **fields).json()["choices"][0]["token_ids"] != [70] * 3


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": [TEXT, "Another"], "n": 2, "best_of": 2, "temperature": 1.0, "seed": 7}]
)
def test_streams_say_the_same(server, fields):
    ask = {"model": "demo", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "logprobs": 1, "echo": True} | fields
    whole = server.openai().completions.create(**ask)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.openai().completions.create(**ask, stream=True, stream_options=options))
    streamed = joined(chunks, lambda choice: choice.text, lambda it: zip(it.tokens, it.text_offset, strict=True))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (counts, counts[-1]) == (sorted(counts), whole.usage.completion_tokens)
    assert [choice.index for choice in whole.choices] == list(range(4 if "n" in fields else 1))
    assert len({choice.text for choice in whole.choices}) == len(whole.choices)
    for choice in whole.choices:
        tokens = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
        assert streamed[choice.index] == (choice.text, tokens, choice.finish_reason)


def test_prompts_wait_for_priority_and_a_full_queue_refuses(server):
    # 8 seats and 200 places to wait: of 300 choices some cannot be taken. All or nothing.
    answer = server.complete(["x"] * 300, max_tokens=1)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "1"
    server.assert_idle()
    assert server.complete(max_tokens=1, priority=-5).status_code == 200


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a state?"}]


def ask(server, **fields):
    body = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0} | fields
    return server.openai().chat.completions.create(**body)


def test_the_old_name_of_the_limit(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert server.http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_logprobs_of_chats(server):
    content = ask(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 8
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
    text = b"".join(bytes(entry.bytes) for entry in content)  # also of tokens that are parts of characters
    assert text.decode(errors="replace") == ask(server).choices[0].message.content
    assert ask(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(server).choices[0].logprobs is None


@pytest.mark.parametrize("n", [1, 3])
def test_streams_of_chats_say_the_same(server, n):
    fields = {"n": n, "temperature": 1.0, "seed": 5, "logprobs": True}
    whole = ask(server, **fields)
    chunks = list(ask(server, **fields, stream=True, stream_options={"include_usage": True}))
    streamed = joined(chunks, lambda choice: choice.delta.content or "", lambda found: (e.token for e in found.content))
    assert [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role] == ["assistant"] * n
    usage = chunks[-1].usage
    assert usage == whole.usage.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details})
    assert not any(chunk.usage for chunk in chunks[:-1])
    for choice in whole.choices:
        tokens = [entry.token for entry in choice.logprobs.content]
        assert streamed[choice.index] == (choice.message.content, tokens, choice.finish_reason)


def test_tokens_and_back(server):
    prompt = server.http.post("/tokenize", json={"prompt": "A state", "return_token_strs": True}).json()
    assert prompt["count"] == len(prompt["tokens"]) == len(prompt["token_strs"])
    assert prompt["max_model_len"] == 512
    long = server.http.post("/tokenize", json={"prompt": "1 a 2 b " * 400, "return_token_strs": True}).json()
    assert "".join(long["token_strs"][-long["count"] + 1 :]) == "1 a 2 b " * 400, "it is made in parts"
    assert long["count"] == len(long["tokens"]) == len(long["token_strs"]) > 512
    back = server.http.post("/detokenize", json={"tokens": long["tokens"][1:] * 40}).json()
    assert back == {"prompt": "1 a 2 b " * 16_000}
    bare = server.http.post("/tokenize", json={"prompt": "A state", "add_special_tokens": False}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": bare}).json() == {"prompt": "A state"}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    chat = server.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["count"] == ask(server).usage.prompt_tokens
    assert server.http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert server.http.post("/tokenize", json={}).status_code == 400


def test_routers_get_the_tokens_that_the_engine_would_get(server):
    def rendered(path, **fields):
        answer = server.http.post(f"/v1/{path}/render", json=fields)
        assert answer.status_code in (200, 400), answer.text
        return answer.json()

    (text,) = rendered("completions", prompt="A state")
    assert text["token_ids"] == server.http.post("/tokenize", json={"prompt": "A state"}).json()["tokens"]
    first, second = rendered("completions", prompt=[[5, 6], [7]], cache_salt="mine", priority=3)
    assert first.pop("request_id") != second.pop("request_id")
    assert first == second | {"token_ids": [5, 6]}
    fields = {"model": "demo", "stream": False, "priority": 3, "cache_salt": "mine"}
    assert second == {"token_ids": [7], **fields}
    chat = rendered("chat/completions", messages=MESSAGES, stream=True)
    assert chat["token_ids"] == server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat["stream"]
    too_much = [("completions", {"prompt": prompt}) for prompt in ([1] * 600, [10**6])]
    for path, wrong in (*too_much, ("chat/completions", {})):
        assert "error" in rendered(path, **wrong)
