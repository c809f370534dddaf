"""Models by their name on a hub, such as `ibm-granite/granite-4.0-h-small`: downloaded once, by `huggingface_hub`.

Its cache, its variables (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`) and its progress bars are as usual.
"""

from __future__ import annotations

import re
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.presets import preset_names

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WITHOUT_WEIGHTS = ("*.json", "*.jinja", "tiktoken.model", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_LEFT_OUT = ("*/*.json", "*/*.safetensors")
"""What lies in folders is the same in other forms; except for further chat templates."""


def is_hub_name(ref: str) -> bool:
    """Returns whether a reference can only be a name on a hub: there is nothing of that name here."""
    return bool(_NAME.fullmatch(ref)) and not Path(ref).exists() and ref not in preset_names()


def local(ref: str, *, revision: str | None = None, download_dir: str | None = None, weights: bool = True) -> str:
    """Returns a reference that `resolve` takes: the same one, or the folder to which a hub's model has been downloaded.

    What is there already is not fetched again; offline, what is there is taken.

    Args:
        ref: anything that `resolve` takes, or a hub's name.
        revision: a branch, a tag or a commit of the hub's; None for its main branch.
        download_dir: the cache; None for the usual one.
        weights: False fetches the small files only.

    Raises:
        CheckpointError: the hub cannot be reached and has not been before, or does not have it, or does not give it.
    """
    if not is_hub_name(ref):
        return ref
    from huggingface_hub import constants, errors, snapshot_download  # only those who need it wait for it

    try:
        return snapshot_download(
            ref,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*_WITHOUT_WEIGHTS, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(_LEFT_OUT),
        )
    except errors.GatedRepoError:
        raise CheckpointError(f"{ref}: the hub asks for consent first: accept on its page, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{ref}: no such directory, and no such model on the hub (or HF_TOKEN is needed)"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{ref}: the hub has no revision {revision!r} of it") from None
    except errors.LocalEntryNotFoundError:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} cannot be reached"
        raise CheckpointError(f"{ref}: no such directory, not in the cache, and {why}") from None
    except (OSError, ValueError, errors.RevisionResolutionError) as error:
        raise CheckpointError(f"{ref}: cannot be downloaded: {' '.join(str(error).split())[:300]}") from None
