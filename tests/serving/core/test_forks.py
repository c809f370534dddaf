"""Several answers to one prompt."""

from tests.serving.core.drive import Loop

PROMPT = list(range(50, 61))


def test_siblings_wait_for_the_first_ones_prompt_end() -> None:
    loop = Loop()
    first = loop.add(PROMPT, max_tokens=4, request_id="a")
    others = [loop.add(PROMPT, max_tokens=4, fork_of="a") for _ in range(2)]
    loop.finish()
    for request in (first, *others):
        loop.check_output(request)
    assert [request.num_cached_tokens for request in others] == [len(PROMPT)] * 2
    assert loop.scheduler.stats()["prefill_tokens"] == len(PROMPT)


def test_a_waiting_sibling_does_not_hold_up_others() -> None:
    loop = Loop(max_num_batched_tokens=6)
    loop.add(PROMPT, max_tokens=4, request_id="a")
    loop.add(PROMPT, max_tokens=4, fork_of="a")
    other = loop.add([1, 2], max_tokens=1)
    for _ in range(3):
        loop.step()
    assert other.progress.row_id or other.finished
    loop.finish()


def test_siblings_go_on_when_the_first_is_gone() -> None:
    loop = Loop(max_num_batched_tokens=4)
    loop.add(PROMPT, max_tokens=4, request_id="a")
    child = loop.add(PROMPT, max_tokens=4, fork_of="a")
    loop.step()
    loop.scheduler.abort("a")
    loop.finish()
    loop.check_output(child)


def test_siblings_compute_for_themselves_without_a_cache() -> None:
    loop = Loop(cache_mode="none")
    loop.add(PROMPT, max_tokens=4, request_id="a")
    child = loop.add(PROMPT, max_tokens=4, fork_of="a")
    loop.step()
    assert child.progress.row_id
    loop.finish()
