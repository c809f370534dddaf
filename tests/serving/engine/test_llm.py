"""`LLM` with the interface that vLLM's users know, and the start-up report."""

import itertools
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from checkpoints import load_tokenizer
from checkpoints.resolve import DEMO_DIRECTORY
from serving import LLM, ConfigError, RequestError, SamplingParams
from serving.engine.requests.sampling_params import recommended_sampling

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def test_outputs_are_in_the_order_of_the_prompts(llm):
    prompts = ["w5 w6 w7", {"prompt_token_ids": [5, 6, 7]}, {"prompt": "w8"}]
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), GREEDY]
    first, second, third = llm.generate(prompts, params, use_tqdm=False)
    assert first.prompt == "w5 w6 w7"
    assert first.prompt_token_ids == second.prompt_token_ids == [5, 6, 7]
    assert second.prompt is None
    assert first.outputs[0].token_ids[:2] == second.outputs[0].token_ids
    assert first.outputs[0].text == " ".join(f"w{t}" for t in first.outputs[0].token_ids)
    assert third.prompt_token_ids == [8]
    assert first.finished
    assert first.metrics.finished_time >= first.metrics.first_token_time >= first.metrics.first_scheduled_time


def test_prompts_may_be_token_ids(llm):
    expected = llm.generate(["w5 w6", "w8"], GREEDY)
    outputs = llm.generate([[5, 6], (8,)], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [each.outputs[0].token_ids for each in expected]
    for alone in ([5, 6], "w5 w6", np.array([5, 6]), [np.array([5, 6])], iter([5, 6])):
        (one,) = llm.generate(alone, GREEDY)
        assert one.prompt_token_ids == [5, 6]
    assert llm.generate([], GREEDY) == []
    for wrong in ([[5, "6"]], [[]], [[10**6]], [[True]], None, 5, b"w5", [b"w5"], 1.5, np.array([[5, 6]]) + 0.5):
        with pytest.raises(RequestError):
            llm.generate(wrong, GREEDY)


def test_one_of_each_kind_for_all_or_one_per_prompt(llm):
    for given in ((GREEDY, GREEDY), iter([GREEDY, GREEDY])):
        first, second = llm.generate(["w5", "w6"], given, priority=np.array([1, 2]))
        assert len(first.outputs[0].token_ids) == len(second.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling_params": {"temperature": 0}}, "sampling_params: give one for all prompts, or a list"),
        ({"sampling_params": [{"temperature": 0}]}, "sampling_params: give one for all prompts, or a list"),
        ({"sampling_params": 3}, "sampling_params: give one for all prompts, or a list"),
        ({"sampling_params": [GREEDY, GREEDY]}, "2 sampling_params for 1 prompts"),
        ({"priority": "high"}, "priorities: give one for all prompts, or a list with one per prompt, got 'high'"),
        ({"lora_request": "name"}, "lora_request: give one for all prompts"),
        ({"cache_salt": 5}, "cache_salt must be a text, got 5"),
    ],
)
def test_options_of_another_kind_get_one_line(llm, options, said):
    with pytest.raises(RequestError, match=said):
        llm.generate("w5", **options)
    with pytest.raises(RequestError, match="params must be SamplingParams, got 3"):
        list(llm.stream("w5", 3))
    assert llm.engine.num_unfinished == 0


def test_a_prompt_may_have_a_salt_of_its_own(llm):
    prompt = [3 + i % 9 for i in range(70)]
    prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
    found = [llm.generate(each, GREEDY, use_tqdm=False)[0].num_cached_tokens for each in prompts]
    assert found == [0, 0, 70]


def test_the_tokenizer_is_given(llm):
    """So are structured outputs: they need no flag."""
    assert llm.config.enable_structured_outputs
    assert llm.engine.grammars is not None
    assert llm.get_tokenizer() is llm.tokenizer


@pytest.mark.parametrize("messages", [{"role": "user", "content": "x"}, "x"])
def test_a_conversation_is_a_list(llm, messages):
    with pytest.raises(RequestError, match="messages must be a list of messages"):
        llm.chat(messages)


def test_one_bad_prompt_starts_nothing(llm):
    with pytest.raises(RequestError, match="not in the vocabulary"):
        llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": [10**6]}], GREEDY)
    assert llm.engine.num_unfinished == 0


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.loop, "step", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["w5"], GREEDY)
    assert llm.engine.num_unfinished == 0


def test_tables_have_the_texts_of_tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("w5 w6 w7", params, use_tqdm=False)
    for table in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert {token: entry.decoded_token for token, entry in table.items()} == {token: f"w{token}" for token in table}


def test_threads_take_turns(llm):
    """Each gets its own outputs; before, both steps met in one engine and all calls failed."""
    prompts = [f"w{5 + i} w{6 + i}" for i in range(4)]
    expected = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in prompts]
    calls = {
        "generate": lambda prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0],
        "chat": lambda prompt: llm.chat([{"role": "user", "content": prompt}], GREEDY, use_tqdm=False)[0],
        "stream": lambda prompt: list(llm.stream(prompt, GREEDY))[-1],
        "update": lambda prompt: llm.update_weights(dict(llm.engine.loop.programs.weights.items())),
        "reset": lambda prompt: llm.reset_prefix_cache(),
    }
    with ThreadPoolExecutor(8) as threads:
        futures = [
            (name, prompt, text, threads.submit(call, prompt))
            for prompt, text in zip(prompts, expected, strict=True)
            for name, call in calls.items()
        ]
        for name, prompt, text, future in futures:
            output = future.result(timeout=120)
            if name in ("generate", "stream"):
                assert output.prompt == prompt
                assert output.outputs[0].text == text
    assert llm.engine.num_unfinished == 0


def test_a_paused_stream_lets_other_threads_resume(llm):
    stream = llm.stream("w5 w6", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    next(stream)
    llm.pause("keep")
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(list, stream)
        assert not wait([rest], timeout=0.2).done
        llm.resume()
        assert rest.result(timeout=120)[-1].finished


@pytest.mark.parametrize("name", ["beam_search", "get_metrics", "embed"])
def test_methods_of_vllm_name_the_nearest(llm, name):
    with pytest.raises(AttributeError, match=f"LLM has no attribute '{name}' .*use "):
        getattr(llm, name)
    assert not hasattr(llm, "nothing")


def test_recommended_parameters_are_those_of_the_checkpoint(tmp_path):
    shutil.copytree(DEMO_DIRECTORY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    assert recommended_sampling(str(tmp_path / "model")) == {"temperature": 0.6, "top_k": 20}


def test_chat_uses_the_template(llm):
    messages = [{"role": "user", "content": "w5 w6"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == [5, 6, 9]
    both = llm.chat([messages, [*messages, {"role": "user", "content": [{"type": "text", "text": "w7"}]}]], GREEDY)
    assert [o.prompt_token_ids for o in both] == [[5, 6, 9], [5, 6, 7, 9]]
    earlier = [*output.prompt_token_ids, *output.outputs[0].token_ids]  # goes on without rendering these again
    for new, previous in ((messages, earlier), ([messages], [earlier])):
        (then,) = llm.chat(new, GREEDY, previous_token_ids=previous)
        assert then.prompt_token_ids == [*earlier, 5, 6, 9]
    with pytest.raises(RequestError, match="previous_token_ids must be 2 lists"):
        llm.chat([messages, messages], GREEDY, previous_token_ids=[earlier])


def test_a_stream_grows_and_closing_it_aborts(llm):
    lengths = [len(output.outputs[0].token_ids) for output in llm.stream("w5 w6", GREEDY)]
    assert lengths == [1, 2, 3, 4, 5]
    stream = llm.stream("w5 w6", GREEDY)
    next(stream)
    stream.close()
    assert llm.engine.num_unfinished == 0


def test_streams_end_when_other_calls_run_their_steps(llm, monkeypatch):
    """Two side by side, one around a call that runs it to its end, and one that is aborted from outside."""
    left, step = iter(range(100)), llm.engine.step

    def few_steps():
        next(left)
        return step()

    monkeypatch.setattr(llm.engine, "step", few_steps)
    longer = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    both = list(itertools.zip_longest(llm.stream("w5 w6", GREEDY), llm.stream("w7", longer)))
    assert all(output.finished for output in both[0])  # each stream yields one object, again and again
    around = llm.stream("w5 w6", GREEDY)
    next(around)
    llm.generate("w5 w6", longer, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in around] == ["length"]
    aborted = llm.stream("w5 w6", GREEDY)
    llm.engine.abort(next(aborted).request_id)
    assert [output.outputs[0].finish_reason for output in aborted] == ["abort"]
    assert llm.engine.num_unfinished == 0


def test_flags_are_checked_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="did you mean 'page_size'"):
        LLM("/does/not/exist", pagesize=3)
    with pytest.raises(ConfigError, match="golden/nemotronh has no multi-token-prediction layer; try 'ngram'"):
        LLM(Path(__file__).parents[2] / "golden" / "nemotronh", speculative_method="mtp")


def test_start_up_explains_itself(harness, caplog):
    caplog.set_level(logging.INFO, logger="serving")
    engine = harness.engine("align", max_num_seqs=64, enable_chunked_prefill=False)
    assert "smallest reusable prefix is 32 tokens" in caplog.text
    assert "chunked prefill is switched on" in caplog.text
    assert "max_num_seqs is 10 instead of 64" in caplog.text
    assert engine.loop.scheduler.config.num_rows == 10


def test_the_tokenizers_end_of_sequence_counts_as_well(tmp_path):
    """Chat checkpoints often name the end of a turn in the tokenizer only."""
    for path in DEMO_DIRECTORY.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    llm = LLM(str(tmp_path), load_format="dummy", max_num_seqs=1, max_model_len=64, warmup=False)
    assert set(llm.engine.eos_token_ids) == {5, load_tokenizer(tmp_path).eos_token_id}
