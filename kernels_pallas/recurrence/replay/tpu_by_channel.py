"""One row and block of a replay on TPU that erases, where every channel of a key decays on its own.

Decays scale the operands. The weight between two tokens is a sum over channels of products, which would overflow if one
factor were the inverse of a decay (see `kernels_pallas.recurrence.scan.by_channel`). But every token of the tail
precedes every new one, so the decay between the two is the decay to the end of the tail times the decay from there on.
Neither factor is above 1, and both are sums of only the log decays in between; a difference of long sums would lose the
digits of recent decays. Decays between the few new tokens are sums of those in between.
"""

import jax.numpy as jnp

from kernels_pallas.recurrence.replay.tpu_rows import Row
from kernels_pallas.tpu_blocks import F32, accurate_dot, dot


def reads(row: Row, product, asked, keys, logs, new, of_tokens, state_in):
    """Returns what `pallas_tpu._reads` does, by the log decays of entries and of new tokens, [.., heads * state]."""
    (step, is_k), is_old, steps = of_tokens, row.position(0) < row.start, row.steps
    old_logs = jnp.where(is_old, logs, 0)
    after = jnp.exp(_until_end(row, old_logs))
    whole = jnp.exp(jnp.sum(old_logs, axis=0, keepdims=True))

    def of_head(here, head, sign):
        state = here.stop - here.start
        channels = slice(head * state, (head + 1) * state)
        # Sums of log decays from after token t up to and with the token of each row: of t = steps - 1, ..., -1.
        between = [jnp.zeros((asked.shape[0], state), F32)]
        for t in reversed(range(steps)):
            between.append(between[-1] + jnp.where(step >= t, new[t : t + 1, channels], 0))
        between = between[::-1]
        decayed = asked[:, here] * jnp.exp(between[0])
        old_keys = jnp.where(is_old, keys[:, here], 0) * after[:, channels]
        read = product(decayed * whole[:, channels], state_in[0, head], (1, 1))

        def weight_of(t):
            pairs = asked[:, here] * asked[t : t + 1, here] * jnp.exp(between[t + 1])
            # What a token reads by its k excludes itself.
            seen = step >= t + is_k.astype(jnp.int32)
            return sign * jnp.where(seen, jnp.sum(pairs, axis=1, keepdims=True), 0)

        return read, product(decayed, old_keys, (1, 1)), weight_of

    return of_head


def _until_end(row: Row, logs):
    """Sums log decays from after each entry's token to the end of the tail."""
    return dot((row.position(1) > row.position(0)).astype(F32), logs, (1, 0), F32)


def write_due(row: Row, head_dim: int, u, keys, logs, state_in, state_out, dtype) -> None:
    """Writes the state at the boundary."""
    blocks, state, absorbed = row.blocks, state_out.shape[3], row.position(0) < row.boundary
    due_logs = jnp.where(absorbed, logs, 0)
    until, total = _until_end(row, due_logs), jnp.sum(due_logs, axis=0, keepdims=True)
    for group in range(blocks.groups):
        here = slice(group * state, (group + 1) * state)
        for head in range(blocks.heads)[blocks.heads_of(group)]:
            lanes, channels = slice(head * head_dim, (head + 1) * head_dim), slice(head * state, (head + 1) * state)
            decayed = jnp.where(absorbed, keys[:, here], 0) * jnp.exp(until[:, channels])
            old = jnp.where(row.has_anchor, state_in[0, head].astype(F32), 0) * jnp.exp(total[:, channels])
            state_out[0, head] = (old + accurate_dot(u[:, lanes].T, decayed, dtype)).astype(state_out.dtype)
