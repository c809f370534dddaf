"""Who gets which argument of the Ray Serve application, and what a worker makes of it; Ray is not needed."""

import pytest

from serving.api.http.settings import ServerSettings, resolve_settings
from serving.config import ConfigError
from serving.split.ray.arguments import Arguments
from serving.split.settings import RouterSettings, SplitSettings


def test_settings_go_to_all_who_have_them():
    found = Arguments.of(
        {
            "model": "demo", "prefill": "1-4", "decode": 2, "resources": {"TPU": 4}, "lease": 7.0, "on_failure": "fail",
            "handoff": "recompute-last", "api_key": "for-clients", "max_body_bytes": 2048, "max_num_seqs": 3,
            "drain_timeout": 4.0,
        }
    )  # fmt: skip
    both = {"api_key": "for-clients", "max_body_bytes": 2048, "drain_timeout": 4.0}
    secret = found.split["split_secret"]
    assert len(secret) >= 32
    assert found.split == {"lease": 7.0, "on_failure": "fail", "split_secret": secret}
    assert found.server == both
    assert found.routing == both | {"handoff": "recompute-last", "on_failure": "fail", "split_secret": secret}
    assert found.engine == {"model": "demo", "max_num_seqs": 3}
    assert RouterSettings.create(**found.routing).api_key == ("for-clients",)
    assert SplitSettings.create(role="prefill", **found.split).lease == 7.0
    assert Arguments.of({}).split["split_secret"] != secret, "another application is another fleet"


def test_workers_are_set_up_as_servers_are():
    found = Arguments.of({"model": "demo", "api_key": "k", "transport": "tcp"})
    role = SplitSettings.create(role="prefill", **found.split)
    settings, config = resolve_settings(role.engine_flags | found.server | found.engine, {"host": "127.0.0.1"})
    served, usual = resolve_settings({"model": "demo"}, {})
    assert settings.api_key == ("k",)
    assert settings.default_sampling == served.default_sampling
    assert settings.served_model_name == served.served_model_name
    assert config == usual.model_copy(update={"keep_draft_kv": True, "reserved_bytes": role.max_transfer_bytes})
    assert (config.enable_structured_outputs, config.max_num_waiting) == (True, 4096)
    assert role.transport == ("tcp",)


@pytest.mark.parametrize("wrong", [{"leese": 3}, {"lease": -1}, {"max_body_bytes": 1}, {"handoff": "half"}])
def test_mistakes_show_before_anything_starts(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Arguments.of(wrong)


def test_a_router_has_the_bounds_of_a_server():
    names = {*RouterSettings.model_fields} & {*ServerSettings.model_fields}
    assert {"max_connections", "header_timeout", "read_timeout", "max_buffered_bytes", "max_body_values"} <= names
