"""What a state is worth compared with others of its kind."""

from serving.core.cache.content import Scope
from tests.serving.core.drive import Loop


def asked_again(loop: Loop, prompt: list[int], **options: int) -> int:
    """Tokens of a prompt that need not be computed."""
    return loop.run(prompt, **{"max_tokens": 1, **options}).num_cached_tokens


def test_a_prompt_end_that_a_conversation_went_on_from_goes_before_other_ends() -> None:
    loop = Loop(num_slots=6, max_num_seqs=1)
    other = [9] * 3
    loop.run(other, max_tokens=1)
    talk = [1] * 3
    for _ in range(3):
        request = loop.run(talk, max_tokens=1)
        talk = [*request.tokens, 5]
    # Ends at 3, 5 and 7 and the boundary 4; only the last end is of use, and the other prompt is older than all.
    loop.run([7] * 3, max_tokens=1)
    assert loop.positions()[-1] == 7
    assert asked_again(loop, other) == 3


def test_a_prompt_that_is_asked_again_and_again_is_not_passed() -> None:
    loop = Loop(num_slots=6, max_num_seqs=1)
    prompt = [1] * 3
    for _ in range(3):
        # Its answer crosses a boundary, so that there is a deeper state.
        loop.run(prompt, max_tokens=8)
    for token in range(4):
        loop.run([token + 4] * 2, max_tokens=1)
    assert asked_again(loop, prompt) == 3


def test_what_many_begin_with_outlives_how_they_end() -> None:
    loop = Loop(num_slots=7, max_num_seqs=1)
    system = [1] * 16
    for token in range(4):
        loop.run([*system, token + 2], max_tokens=1)
    for token in range(40):
        loop.run([token + 30] * 2, max_tokens=1)
        if token % 10 == 9:
            assert asked_again(loop, [*system, token + 30]) == 16


def test_nothing_stays_unused_for_ever() -> None:
    loop = Loop(num_slots=7, num_pages=0, max_num_seqs=1)
    system = [1] * 16
    for token in range(4):
        loop.run([*system, token + 2], max_tokens=1)
    assert asked_again(loop, [*system, 20]) == 16
    for token in range(150):
        loop.run([token + 30] * 12, max_tokens=1)
    assert asked_again(loop, [*system, 21]) == 0


def test_a_request_that_could_not_be_admitted_is_no_hit() -> None:
    loop = Loop(num_slots=20, num_pages=12, max_num_seqs=2)
    prompt = [1] * 8
    loop.run(prompt, max_tokens=1)
    index = loop.scheduler.index
    assert index is not None
    entry = index.find(prompt, Scope(None)).entry
    assert entry is not None
    first = loop.add([2] * 12, max_tokens=8)
    loop.step()
    loop.add([*prompt, *[3] * 10], max_tokens=1)
    while not first.finished:
        assert entry.hits == 0
        loop.step()
    loop.finish()
    assert entry.hits <= 1
