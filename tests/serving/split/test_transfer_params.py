"""`kv_transfer_params`: what a prefill worker answers, and which tickets a decode worker accepts."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest

from serving.api.http.errors import ApiError
from serving.api.http.protocol.completions import CompletionRequest
from serving.split.http.transfer_params import NAME, decoding, prefilling, signed, ticket_of
from serving.split.seal import Seal
from serving.split.wire import Ticket

SEAL = Seal("the secret of a fleet")
TICKET = Ticket(id="1", worker="http://p", handoff="full", prompt_token_ids=[3, 4], position=2, cached_tokens=1)
REQUEST = SimpleNamespace(state=SimpleNamespace(request_id="7"))
CODE, TEXT = signed(SEAL, TICKET)[NAME]


@pytest.mark.parametrize(
    "wrong",
    [
        [CODE, TEXT.replace("http://p", "http://q")],
        [Seal("another secret").code("", "v1/kv_transfer_params", TEXT.encode()), TEXT],
        [SEAL.code("", "split/expect", TEXT.encode()), TEXT],
        [SEAL.code("", "v1/kv_transfer_params", b"{"), "{"],
        ["\u00e9", TEXT], [CODE], TEXT, 5, {}, [CODE, "\ud800"],
    ],
)  # fmt: skip
def test_other_tickets_are_refused(wrong):
    with pytest.raises(ApiError, match="not signed") as refused:
        ticket_of(SEAL, {NAME: wrong})
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("more", "number"),
    [
        ({}, 1), ({"prompt": ["a", "b"]}, 2), ({"prompt": [[1], [2]]}, 2),
        ({"prompt": [1, 2]}, 1), ({"prompt": [[1, 2]]}, 1), ({"logprobs": 1}, 1), ({"echo": True}, 1),
        ({"echo": True, "logprobs": 1}, 0), ({"prompt_logprobs": 0}, 0), ({"prompt_logprob_token_ids": [1]}, 0),
    ],
)  # fmt: skip
def test_only_prompts_without_scores_can_be_handed_over(more, number):
    assert CompletionRequest(**({"prompt": "a"} | more)).num_continued == number


async def test_a_prefill_worker_answers_with_a_ticket():
    full, late, broken = (ApiError(503, "no room", code=code) for code in ("too_many_states", "too_late", None))
    compute = mock.AsyncMock(side_effect=[TICKET, full, late, broken])
    transfer, asked = prefilling(SEAL, compute), {"do_remote_decode": True}
    assert await transfer("completions", 1, {"do_remote_decode": False}, REQUEST) is None
    assert await transfer("completions", 1, "", REQUEST) is None
    answer = json.loads((await transfer("completions", 1, asked, REQUEST)).body)
    assert ticket_of(SEAL, answer["kv_transfer_params"]) == TICKET
    assert answer["usage"]["prompt_tokens"] == 2
    several = json.loads((await transfer("completions", 2, asked, REQUEST)).body)
    assert several["kv_transfer_params"] == {}
    compute.assert_awaited_once_with("completions", REQUEST)
    for _ in (full, late):
        assert json.loads((await transfer("completions", 1, asked, REQUEST)).body)["kv_transfer_params"] == {}
    with pytest.raises(ApiError, match="no room"):
        await transfer("completions", 1, asked, REQUEST)


async def test_a_decode_worker_without_the_state_computes_or_fails():
    gone = ApiError(503, "gone", code="peer_unreachable")
    expect = mock.AsyncMock(side_effect=[True, gone, gone])
    recompute, fail = (decoding(SEAL, expect, policy) for policy in ("recompute", "fail"))
    of_no_position = signed(SEAL, TICKET.model_copy(update={"position": 0}))
    none = {}, {"do_remote_prefill": True}, "none"
    for prompts, given in ((2, signed(SEAL, TICKET)), *((1, each) for each in none), (1, of_no_position)):
        assert await fail("completions", prompts, given, REQUEST) is None
    expect.assert_not_awaited()
    for _ in range(2):
        assert await recompute("completions", 1, signed(SEAL, TICKET), REQUEST) is None
    assert expect.await_args_list == [mock.call(TICKET, REQUEST)] * 2
    with pytest.raises(ApiError, match="gone"):
        await fail("completions", 1, signed(SEAL, TICKET), REQUEST)
