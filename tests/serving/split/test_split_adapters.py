"""Requests with adapters whose prompts another engine computes: a state is used only with the adapter that made it."""

import pytest

from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.sampling_params import SamplingParams
from serving.split.decode_side import DecodeSide
from serving.split.prefill_side import PrefillSide
from serving.split.wire import AdapterMismatch, ShareRequest, SplitError
from tests.serving.differential.splitting import worker_of
from tests.support.engines.engines import Continuation
from tests.support.engines.shared_engines import LONGEST, SMALLEST, engines_of
from tests.support.fleets.split_pair import Pair, output_of
from tests.support.models.adapter_contents import content

PROMPT = tuple(range(3, 40))
LORA, OTHER, STATE = "0", "1", "3"
"""Contents: two LoRA adapters and a learned initial state."""
ADAPTER = LoRARequest(LORA, 0, LORA)


class AdapterPair(Pair):
    """A prefill engine and a decode engine with adapters. An adapter's path is the number of its content."""

    def __init__(self) -> None:
        self.on = engines_of(f"{SMALLEST}, adapters")
        there, here = (worker_of(self.on, self.on.engine("all", side=side), {}) for side in (1, 0))
        self.connect(PrefillSide(there), DecodeSide(here))

    def answer(self, adapter, remote=None, salt=None, scores=None):
        params = SamplingParams(temperature=0, max_tokens=LONGEST, logprobs=2, ignore_eos=True, prompt_logprobs=scores)
        output = output_of(self.decode, PROMPT, params, cache_salt=salt, remote=remote, lora_request=adapter)
        return Continuation.of(output.outputs[0])

    def assert_right(self, adapter, answer) -> None:
        expected = self.on.alone(PROMPT, adapter=adapter)[0]
        assert answer.tokens == expected.tokens
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.fixture
def pair():
    pair = AdapterPair()
    pair.on.alone(PROMPT)
    for number in (LORA, OTHER, STATE):  # first alone: that engine has the same programs, and so the same entries
        pair.on.alone(PROMPT, adapter=LoRARequest(number, 0, number))
    table = pair.decode.adapters
    for number in (LORA, OTHER, STATE):
        table.commit(table.reserve(number, number, table.read(number, number)))
    yield pair
    pair.assert_idle()


def test_other_content_under_the_same_name_is_refused(pair) -> None:
    """The prefill worker has another adapter under the name; a request that computes its prompt here is right."""
    table = pair.prefill.adapters
    table.read = lambda name, path: table.checked(name, path, content(pair.on.model, int(OTHER)))
    ticket = pair.compute(PROMPT, lora=ADAPTER)
    with pytest.raises(AdapterMismatch, match="adapter '0' has other content on the prefill worker") as refused:
        pair.remote(ticket)
    assert "\n" not in str(refused.value)
    # A ticket without the name, as of a shared state, passes this check. The request still does not use the state.
    remote = pair.remote(ticket.model_copy(update={"adapter_name": None}))
    pair.assert_right(ADAPTER, pair.answer(ADAPTER, remote))
    assert (pair.decode_side.stats.arrived, pair.decode_side.stats.spared) == (0, 1)


def test_an_adapter_that_is_not_loaded_is_refused(pair) -> None:
    ticket = pair.compute(PROMPT, lora=LoRARequest("new", 0, LORA))
    with pytest.raises(AdapterMismatch, match="adapter 'new' is not loaded on the decode worker"):
        pair.remote(ticket)
    pair.prefill_side.release(ticket.id, wanted=False)


@pytest.mark.parametrize("mine", [None, OTHER, STATE])
def test_an_announced_state_waits_for_a_request_with_its_adapter(pair, mine) -> None:
    other = None if mine is None else LoRARequest(mine, 0, mine)
    ticket = pair.compute(PROMPT, lora=ADAPTER)
    for _ in range(2):  # a ticket that is sent again announces nothing more
        pair.decode_side.expect(ticket.prompt_token_ids, pair.remote(ticket), 60.0)
    assert [len(each) for each in pair.decode_side._expected.values()] == [1]
    pair.assert_right(other, pair.answer(other))
    assert pair.decode_side.stats.arrived == 0
    pair.assert_right(ADAPTER, pair.answer(ADAPTER))
    assert pair.decode_side.stats.arrived == 1


def test_a_request_with_scores_of_its_prompt_releases_the_state(pair) -> None:
    pair.assert_right(ADAPTER, pair.answer(ADAPTER, pair.remote(pair.compute(PROMPT, lora=ADAPTER)), scores=0))
    assert (pair.decode_side.stats.arrived, pair.decode_side.stats.spared) == (0, 1)


def test_a_state_of_another_salt_or_of_replaced_weights_is_not_used(pair) -> None:
    ticket = pair.compute(PROMPT, salt="one", lora=ADAPTER)
    assert (ticket.salt, ticket.adapter) == ("one", f"content {LORA}")
    pair.assert_right(ADAPTER, pair.answer(ADAPTER, pair.remote(ticket), salt="two"))
    ticket = pair.compute(PROMPT, lora=ADAPTER)
    pair.decode.loop.scheduler.change_weights()
    pair.assert_right(ADAPTER, pair.answer(ADAPTER, pair.remote(ticket)))
    assert (pair.decode_side.stats.arrived, pair.decode_side.stats.spared) == (0, 2)


def test_a_shared_state_is_that_of_the_adapter(pair) -> None:
    """Any worker can lend a cached state; it is found by the adapter's digest."""
    digest = pair.decode.adapters.names.digest(ADAPTER)
    pair.prefill_side.release(pair.compute(PROMPT, lora=ADAPTER).id, wanted=False)
    wanted = ShareRequest(tokens=list(PROMPT), adapter=digest)
    for wrong in (None, f"content {OTHER}"):
        with pytest.raises(SplitError, match="no cached state"):
            pair.prefill_side.share(wanted.model_copy(update={"adapter": wrong}))
    ticket = pair.prefill_side.share(wanted)
    assert pair.decode_side.worth_fetching(ticket)
    pair.assert_right(ADAPTER, pair.answer(ADAPTER, pair.remote(ticket)))
    assert pair.decode_side.stats.arrived == 1
