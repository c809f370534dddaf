"""What members exchange in a divided prefill step, by the table of decision 0042."""

import math

from mamba_jax.config import AttentionConfig, HybridConfig, StateArray, StateUnit
from mamba_jax.config.linear_recurrence import GroupedRecurrence
from mamba_jax.sharding import Partition
from mamba_jax.sharding.axis import shares_of


def exchanged_bytes(
    config: HybridConfig,
    partition: Partition,
    tokens: int,
    *,
    item: int = 2,
    state_item: int = 4,
    tiles: int = 0,
    slow: bool = False,
) -> tuple[int, int]:
    """Bytes that all-to-alls, and gathers, give each device; its own part included, and what lies in loops left out.

    Args:
        item, state_item: bytes of an activation, and of a number of a recurrent state.
        tiles: of which the ends are gathered at once; 0: one by one, in a loop.
        slow: recurrences work by pairs although heads divide.
    """
    members, shards = partition.members, partition.shards
    to_all, gathered = 0, 0
    for kind in config.pattern:
        match config.mixer(kind):
            case GroupedRecurrence() as mixer if slow:
                assert not mixer.erases, "of pairs: a decay for each head; states at the ends of tiles are added up"
                state, *windows = (_size(array, shards) for array in mixer.state()[:3])
                gathered += members * (4 * (mixer.num_heads // shards + state) + item * sum(windows))
            case GroupedRecurrence() as mixer if mixer.num_heads % (members * shards):
                assert mixer.erases, "of pairs: a matrix for each head; states at the ends of tiles are added up"
                state, *windows = (array.on_each(shards).shape for array in mixer.state()[:3])
                to_all += 2 * item * tokens // members * sum(channels for _, channels in windows)
                gathered += 4 * members * (state[0] * state[2] ** 2 + math.prod(state))
                gathered += item * tiles * sum(map(math.prod, windows))
            case GroupedRecurrence() as mixer:
                divides = mixer.num_groups % (members * shards) == 0
                of_device = mixer.num_groups if mixer.num_groups % shards else mixer.num_groups // shards
                vectors = 2 * mixer.state_size * of_device * item
                steering = mixer.num_heads + (mixer.num_decays if mixer.erases else 0)
                share = (2 * mixer.inner_size * item + 4 * steering) // shards + divides * vectors
                state, *windows = mixer.state()[: 2 + divides]
                ends = state_item * _size(state, shards) + sum(item * _size(each, shards) for each in windows)
                to_all += tokens // members * share
                gathered += (not divides) * tokens * vectors + tiles * ends
            case AttentionConfig() as mixer:
                heads, keys = mixer.num_heads // shards, 2 * max(1, mixer.num_kv_heads // shards)
                to_all += 4 * tokens * heads * (mixer.head_dim + 1)
                gathered += item * tokens * (heads + keys) * mixer.head_dim
    # Hidden states: of a member's tokens before each mixer but the first, and of all tokens at the end.
    scattered = shares_of(tokens // members, shards) > 1
    of_members = scattered * (len(config.pattern) - 1) * tokens // members
    return to_all, gathered + item * (of_members + tokens) * config.hidden_size


def _size(array: StateArray, shards: int) -> int:
    assert array.per is StateUnit.SLOT
    return math.prod(array.on_each(shards).shape)
