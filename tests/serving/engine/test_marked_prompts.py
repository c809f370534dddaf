"""Marks of prompts and conversations, from `LLM` to the states that later prompts continue from; missed prefixes."""

import pytest

from serving import RequestError, SamplingParams
from serving.core.cache.retention import Mark
from serving.engine.requests.conversations import ChangedPrefixes, marks_at, message_digests
from serving.engine.requests.request import read_marks

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TEMPLATE = (
    "{% for each in messages %}{{ 'w4' if each.role == 'assistant' else 'w3' }} {{ each.content }} {% endfor %}"
    "{% if add_generation_prompt %}w4 w8{% endif %}"
)
"""The model's turn begins with thoughts (w8), which later turns do not show."""
SYSTEM = {"role": "system", "content": " ".join(f"w{10 + i % 9}" for i in range(40))}
FIRST = {"role": "user", "content": "w5 w6 w7 w5 w5"}


def test_conversations_continue_where_their_templates_show_the_same(llm):
    """The next turn from the end of the history, another conversation from the end of the system text."""

    def ask(*messages):
        (output,) = llm.chat([SYSTEM, *messages], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
        (alone,) = llm.generate(output.prompt_token_ids, GREEDY, use_tqdm=False, cache_salt=str(len(messages)))
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        return output.num_cached_tokens, output.cache_write_tokens

    assert ask(FIRST) == (0, {300.0: 42, 600.0: 5})
    answer = {"role": "assistant", "content": "w20"}
    assert ask(FIRST, answer, FIRST) == (47, {600.0: 8})
    assert ask({"role": "user", "content": "w20"}) == (42, {600.0: 1})


def test_variables_of_templates_may_have_any_name(llm):
    names = dict.fromkeys(("messages", "tokenizer", "text", "places", "marks"), "w9")
    outputs = [
        llm.chat([SYSTEM, FIRST], GREEDY, use_tqdm=False, chat_template=TEMPLATE, chat_template_kwargs=given)[0]
        for given in (None, names)
    ]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids


def test_prompts_have_marks_of_their_own(llm):
    prompt = [3 + i % 11 for i in range(70)]
    given = {"prompt_token_ids": prompt, "cache_marks": [37, {"position": 50, "ttl": 60}]}
    assert llm.generate(given, GREEDY, use_tqdm=False)[0].cache_write_tokens == {None: 37, 60: 13}
    cached = [llm.generate([*prompt[:n], 2], GREEDY, use_tqdm=False)[0].num_cached_tokens for n in (37, 40, 55)]
    assert cached == [37, 37, 50]
    with pytest.raises(RequestError, match=r"position 71 is not in the prompt \(1 to 70\)"):
        llm.generate(given | {"cache_marks": [71]}, GREEDY)


def test_marks_are_positions_and_times():
    assert read_marks([5, {"position": 7, "ttl": 60}, Mark(9)]) == (Mark(5), Mark(7, 60), Mark(9))
    assert read_marks(None) == ()
    tables = {"ttl": 5}, {"position": 5, "ttl": 0}, {"position": 5, "kind": 1}, {"position": 5, "ttl": "5"}
    for wrong in ("5", True, 0, [5], *tables):
        with pytest.raises(RequestError, match=r"a mark has a position|cache_marks: a table with some of"):
            read_marks([wrong])


def test_marks_are_left_out_at_the_beginning_and_the_end_of_a_text():
    """A conversation without system text may begin with the words of its user, and its text may be empty."""
    assert marks_at({0: 300.0, 40: 300.0, 80: None, 200: 600.0}, range(2, 102, 2)) == (Mark(40),)
    assert marks_at({0: 600.0}, ()) == ()


def test_the_first_message_that_differs_is_named():
    seen, history = ChangedPrefixes(), list("sabcdef")

    def note(texts, client="a", tools=None):
        return seen.note(message_digests([{"role": "user", "content": text} for text in texts], tools), client)

    assert note(history) is None
    assert note([*history, "g"]) is None, "it continues"
    assert note(["x", *history[1:], "h"]) == "message 0"
    assert note([*history[:6], "y"]) is None, "only its last message differs"
    assert note(history, tools=["t"]) == "the tools"
    assert note(["z", *history[1:]], client="b") is None
