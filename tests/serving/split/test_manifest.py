"""What two workers must agree on."""

import pytest

from serving.split.wire import Manifest, ManifestMismatch, check

BASE = Manifest(
    protocol=1, layout="l", model="abc", dtype="float32", kv_dtype="float32", ssm_dtype="float32",
    state={"ssm": (2, 4, 8, 16), "hidden": (32,)}, attention_layers=1, draft_layers=1, page_size=8, state_block_size=16,
    shards=1, max_model_len=96, versions={"jax": "0.10"}, transports={"jax": "here:1", "tcp": "here:2"},
)  # fmt: skip


def other(**fields):
    return BASE.model_copy(update=fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"protocol": 2}, "protocol"), ({"layout": "m"}, "layout"), ({"model": "abd"}, "--model"),
        ({"dtype": "bfloat16"}, "--dtype"), ({"ssm_dtype": "bfloat16"}, "--ssm-dtype"), ({"draft_layers": 2}, "draft"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_cache_dtype differs.*--kv-cache-dtype"),
        ({"state": {"ssm": (3, 4, 8, 16), "hidden": (32,)}}, "state differs"),
        ({"rounding": "int8 every 256 tokens"}, "--checkpoint-dtype"),
        ({"attention_layers": 0}, "attention layers"), ({"transports": {"direct": ""}}, "--transport"),
    ],
)  # fmt: skip
def test_what_may_not(fields, says):
    with pytest.raises(ManifestMismatch, match=says) as caught:
        check(BASE, other(**fields))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("fields", "notice"),
    [
        ({"page_size": 16}, None), ({"state_block_size": 64}, None), ({"shards": 2}, None),
        ({"max_model_len": 50}, None), ({"draft_layers": 0}, None), ({"transports": {"tcp": "there:5"}}, None),
        ({"ssm_dtype": "bfloat16", "converts_state": True}, "states are converted from float32 to bfloat16"),
        ({"versions": {"jax": "0.11"}}, "jax differs: prefill has 0.10, decode has 0.11"),
    ],
)  # fmt: skip
def test_what_may_differ_if_it_is_said(fields, notice):
    """`notice`: how the only line begins that says so; None: there is none."""
    lines = check(BASE, other(**fields))
    assert len(lines) == (notice is not None)
    assert all(line.startswith(notice) for line in lines)


def test_a_worker_with_other_addresses_is_the_same_and_one_with_other_transports_is_not():
    assert BASE.digest == other(transports={"tcp": "there:1", "jax": "there:2"}).digest
    assert len({BASE.digest, other(transports={"tcp": "here:2"}).digest, other(ssm_dtype="bfloat16").digest}) == 3
