"""Engines with different `hf_overrides` share neither states nor programs."""

import pytest

from checkpoints.random import write_random
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import build_engine
from serving.hosts.host import facts_of
from tests.support.engines.small_tiers import tier_mover
from tests.support.models.tiny_configs import CHECKPOINT

FLAGS = {
    "state_block_size": 16,
    "tile_size": 8,
    "page_size": 8,
    "num_slots": 8,
    "num_pages": 16,
    "max_num_seqs": 1,
    "compilation_cache": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_random(tmp_path_factory.mktemp("model") / "tiny", CHECKPOINT))


def identities(directory, cache, overrides):
    """The disk folder, the digest that the other side of a split compares, the programs, the facts of a host."""
    config = EngineConfig.create(model=directory, disk_cache=str(cache), hf_overrides=overrides, **FLAGS)
    built = build_engine(config, progress=False)
    loop = built.engine.loop
    facts = facts_of(config)
    folder = tier_mover(built.engine).disk.folder.path.name
    found = (folder, built.weights_digest, loop.programs.description, str(facts))
    built.engine.close()
    return found


def test_different_overrides_share_nothing(directory, tmp_path):
    plain, changed, same = (
        identities(directory, tmp_path, overrides)
        for overrides in (None, {"layer_norm_epsilon": 0.5}, '{"layer_norm_epsilon": 0.5}')
    )
    assert changed == same
    assert not set(plain) & set(changed)


def test_overrides_may_be_text():
    one, other = (EngineConfig.create(hf_overrides=each) for each in ({"a": {"b": 1}}, '{"a.b": 1}'))
    assert one == other
    for wrong in ("{", "3", 3):
        with pytest.raises(ConfigError, match=r"^hf_overrides: "):
            EngineConfig.create(hf_overrides=wrong)


def test_a_longer_context_needs_a_reason(directory):
    flags = {"model": directory, "max_model_len": 1 << 20, **FLAGS, "num_pages": None}
    limit = {"max_position_embeddings": 512}
    both_ways = r"exceeds the model's own 512 tokens.*--hf-overrides.*--allow-long-max-model-len"
    with pytest.raises(ConfigError, match=both_ways):
        build_engine(EngineConfig.create(hf_overrides=limit, **flags), progress=False)
    for given in ({"hf_overrides": {"max_position_embeddings": 1 << 20}},
                  {"hf_overrides": limit, "allow_long_max_model_len": True}):  # fmt: skip
        built = build_engine(EngineConfig.create(**flags, **given), progress=False)
        assert built.size.max_model_len == 1 << 20
        built.engine.close()
