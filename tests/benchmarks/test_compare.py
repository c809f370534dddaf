"""The comparison of configurations in alternating turns."""

import pytest

from benchmarks import compare, turns
from serving import ConfigError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "dtype"], "--vary dtype: expected FLAG=VALUE"),
        (["--vary", "dtype=float32"], "at least two values are needed"),
        (["--vary", "kernels=[xla"], "not values in YAML"),
        (["--vary", "max_num_seqs=1,2", "--vary", "max_num_seqs=3,4"], "given twice"),
        (["--vary", "max_num_seqs=1,2", "--engine", "max-num-seqs=3"], "also given as --engine max_num_seqs"),
        (["--vary", "max_num_seqs=1,0"], "max_num_seqs: must be greater than or equal to 1"),
    ],
)
def test_bad_comparisons_are_refused(words, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        compare.main(["demo", *words])


def test_combinations_and_shares_of_memory():
    combined = compare.combinations(["quantization=null,int8", "num-speculative-tokens=0,3"])
    assert combined[0] == {"quantization": None, "num_speculative_tokens": 0}
    assert combined[3] == {"quantization": "int8", "num_speculative_tokens": 3}
    flags = compare.configurations("demo", combined, {"gpu_memory_utilization": 0.8})
    assert [each["memory_utilization"] for each in flags] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert flags[2]["quantization"] == "int8"
    assert compare.combinations(['kernels="a,b",c'])[0] == {"kernels": "a,b"}


def test_turns_start_with_another_form_each_time():
    calls = []
    values = turns.in_turns({name: lambda turn, name=name: calls.append((turn, name)) or turn for name in "ab"}, 2)
    assert calls == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert values == {"a": [0, 1], "b": [0, 1]}
    assert turns.ratio([2, 6, 12], [1, 2, 3]) == {"ratio": 3, "least": 2, "most": 4}
