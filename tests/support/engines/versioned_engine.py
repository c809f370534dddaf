"""A tiny engine whose weights change, and a judge that knows every version of them."""

import random
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.model import parameters
from serving import SamplingParams
from tests.support.engines.engines import finish
from tests.support.engines.shared_engines import MAX_LEN, TILE, SharedEngines
from tests.support.engines.step_programs import shared_programs
from tests.support.models.golden_case import whole_log_probs


@dataclass
class Explained:
    """How well the told versions explain the log-probabilities of tokens."""

    tokens: int = 0
    worst: float = 0.0
    """The largest difference from the told version's."""
    by_another: int = 0
    """Tokens that another version of the same output, or the one before, would explain as well."""


class VersionedEngine:
    """An engine with weights of its own; version n of the weights follows from n alone."""

    def __init__(self, seed: int, **flags) -> None:
        self.rng = random.Random(seed)
        shared = SharedEngines("nemotronh")
        shared.model = nnx.clone(shared.model)
        for leaf in parameters(shared.model).values():
            leaf.set_value(jnp.copy(leaf.get_value()))  # a clone's arrays are those of the model that others share
        self.config = shared.model.config
        self._first = {path: np.array(leaf.get_value()) for path, leaf in parameters(shared.model).items()}
        self._score = whole_log_probs(self.config)
        own = shared_programs(shared.model, tile_size=TILE)
        self.engine = shared.engine("all", programs=own, state_block_size=16, max_num_batched_tokens=64, **flags)

    def weights(self, version: int) -> dict[str, np.ndarray]:
        """All parameters of a version."""
        if not version:
            return self._first
        rng = np.random.default_rng(version)
        return {
            path: (value + 0.1 * value.std() * rng.standard_normal(value.shape)).astype(value.dtype)
            for path, value in self._first.items()
        }

    def update(self) -> None:
        """The next version."""
        control = self.engine.control
        control.update_weights(self.weights(control.weights.updates + 1))

    def compile(self, temperature: float = 0.0) -> int:
        """One request; returns how many programs there are now. Those that sample are others."""
        params = SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True)
        self.engine.add_request("compile", {"prompt_token_ids": [1, 2, 3]}, params)
        finish(self.engine)
        return self.engine.loop.programs.compilations

    def run(self, *, requests: int, update_every: int):
        """Requests with shared prefixes, and an update after every so many steps; their outputs."""
        rng, engine = self.rng, self.engine
        begun = [[rng.randrange(90) for _ in range(48)] for _ in range(4)]
        outputs = []
        steps = 0
        while len(outputs) < requests or engine.num_unfinished:
            while len(outputs) < requests and engine.num_unfinished < 8:
                prompt = rng.choice(begun)[: rng.randrange(8, 49)]
                prompt += [rng.randrange(90) for _ in range(rng.randrange(4))]
                drawn = {"max_tokens": rng.randrange(1, 16), "temperature": rng.choice([0.0, 1.0])}
                params = SamplingParams(logprobs=0, ignore_eos=True, **drawn)
                outputs.append(engine.add_request(f"r{len(outputs)}", {"prompt_token_ids": prompt}, params))
            engine.step()
            steps += 1
            if steps % update_every == 0:
                self.update()
        finish(engine)
        return outputs

    def explain(self, outputs) -> Explained:
        """Compare every token's log-probability with that of the version that it is said to come from."""
        found, cached = Explained(), {}
        for output in outputs:
            for choice in output.outputs:
                start, versions = len(output.prompt_token_ids) - 1, []
                for version, count in choice.weights_versions:
                    versions += [int(version)] * count
                assert len(versions) == len(choice.token_ids)
                row = np.zeros((1, MAX_LEN), np.int32)
                row[0, : start + 1 + len(versions)] = [*output.prompt_token_ids, *choice.token_ids]
                places = np.arange(start, start + len(versions))
                told = np.array([t[k].logprob for k, t in zip(choice.token_ids, choice.logprobs, strict=True)])
                known = dict.fromkeys({*versions, max(versions[0] - 1, 0)})
                for version in known:
                    if version not in cached:
                        cached[version] = jax.device_put(self.weights(version))
                    known[version] = np.asarray(self._score(cached[version], row))[0, places, choice.token_ids]
                chosen = np.choose([sorted(known).index(v) for v in versions], [known[v] for v in sorted(known)])
                off = np.abs(told - chosen)
                found.tokens += len(versions)
                found.worst = max(found.worst, float(off.max()))
                for version, scores in known.items():
                    found.by_another += int(((np.array(versions) != version) & (np.abs(told - scores) < 2e-3)).sum())
        return found
