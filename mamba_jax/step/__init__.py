"""One step of the model over the store: a pure function, to be jitted with store and rows donated.

    store', rows', output = step(model, store, rows, batch)

Each row reads the state S(c) in one slot, absorbs its tokens and writes the states after them to other slots (or to the
same one). Rejecting drafts only changes the slot that the row reads next.
"""

from mamba_jax.step.run import step
from mamba_jax.step.seats import mask, seat, set_page_table
