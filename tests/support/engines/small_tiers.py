"""Small engines with tiers for tests of these: pools that evict at once, and fetching that is always worth it."""

from serving.core.tiers.tiers import FetchCosts
from serving.engine.engine import Engine
from serving.engine.requests.sampling_params import SamplingParams
from serving.tiers.mover import Mover
from tests.support.engines.engines import finish
from tests.support.fleets.split_pair import FLAGS, tokens

SMALL = FLAGS | {"debug_state": False, "max_num_seqs": 2, "num_slots": 8, "num_pages": 26, "max_num_batched_tokens": 40}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
HOST, DISK = {"host_cache_gib": 0.004}, {"disk_cache_gib": 0.1}


def tier_mover(engine: Engine) -> Mover:
    """The source that fetches from the tiers of an engine without a split."""
    (source,) = engine.loop.sources
    assert isinstance(source, Mover)
    return source


class Free(FetchCosts):
    """Computing nothing takes no time."""

    def worth_fetching(self, tier: str, num_bytes: int, tokens: int) -> bool:
        return True


def ask(engine: Engine, name: str, prompt, **more) -> int:
    """A request from beginning to end; prompt tokens that it found."""
    output = engine.add_request(name, {"prompt_token_ids": list(prompt)}, PARAMS, **more)
    finish(engine)
    return output.num_cached_tokens


def fill(engine: Engine, numbers=range(1, 7), **more) -> Engine:
    """So many prompts that the first are evicted. Returns the engine."""
    for number in numbers:
        assert ask(engine, f"first {number}", tokens(number, 61), **more) == 0
    return engine


def tiers(engine: Engine) -> dict:
    """The counters of an engine's tiers."""
    return engine.stats()["tiers"]
