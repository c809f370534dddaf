"""Compiles grammars on trial in a separate process: a grammar that is too expensive ends only this process.

`trials` runs this file by path; it imports only the standard library and llguidance. Messages are JSON. The first one
describes the vocabulary. Each later message is a grammar, which this process answers with one message.
"""

import contextlib
import ctypes
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

LONGEST = 1 << 20
"""Maximum number of characters of a grammar or schema, as JSON, and of its form for llguidance."""
SPACE = r"( |\r?\n[ \t]{0,20})?"
"""Whitespace between the parts of a JSON text: none, a space, or a new line and indentation. With unlimited whitespace,
a model could write it endlessly. A schema can change this: `"x-guidance": {"whitespace_pattern": ...}`."""
_PR_SET_PDEATHSIG = 1
"""Linux: the operating system sends the signal to this process when the thread that started it ends."""

WALKS, WALK_TOKENS = 4, 32
"""Number of random outputs with which a grammar is tested, and maximum number of tokens of each."""
MASK_SECONDS = 0.1
"""Maximum processor time in seconds for one mask of a random output."""


def limits() -> llguidance.LLParserLimits:
    """Returns the limits for following a grammar by one token: a fifth of the library's own.

    Ordinary grammars stay far below them. At the limits a mask takes about 20 ms. A state of a lexer takes 1 to 2 KB.
    """
    return llguidance.LLParserLimits(step_max_items=10_000, step_lexer_fuel=40_000, max_lexer_states=50_000)


def form_of(kind: str, value: Any) -> str:
    """Returns a grammar in llguidance's form. Raises the errors of its parsers."""
    matcher = llguidance.LLMatcher
    match kind:
        case "regex":
            form = matcher.grammar_from_regex(value)
        case "choice":
            form = matcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            )
        case "grammar":
            form = matcher.grammar_from_lark(gbnf_to_lark(value) if "::=" in value else value)
        case _:
            # Only schemas that are JSON objects accept options.
            options: Any = {"whitespace_pattern": SPACE, "coerce_one_of": True} if isinstance(value, dict) else None
            form = matcher.grammar_from_json_schema(json.dumps(value), defaults=options)
    if len(form) > LONGEST:
        raise ValueError(f"the grammar is longer than {LONGEST:,} characters")
    return form


def vocabulary_of(settings: dict[str, Any]) -> llguidance.LLTokenizer:
    """Returns the vocabulary that the first message describes."""
    return llguidance.LLTokenizer(
        settings["tokenizer"], n_vocab=settings["vocab_size"], eos_token=settings["eos_token_ids"]
    )


def compiled(vocabulary: llguidance.LLTokenizer, form: str) -> llguidance.LLMatcher:
    """Compiles a grammar and its first mask. Raises ValueError if the grammar is invalid or too complex."""
    matcher = llguidance.LLMatcher(vocabulary, form, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # some errors appear only here
    if matcher.is_error():
        raise ValueError(why_failed(matcher))
    return matcher


def why_failed(matcher: llguidance.LLMatcher) -> str:
    """Returns a matcher's error, without the parser's state that the library appends."""
    message = str(matcher.get_error()).partition("<")[0].strip()
    return "no output is possible" if message == "NoExtensionBias" else message


def follow(start: llguidance.LLMatcher) -> None:
    """Tests a grammar with random outputs. Raises ValueError if a mask takes too long, or if all outputs fail."""
    random_ = random.Random(0)  # the result is the same for the same grammar
    failures = []
    for _ in range(WALKS):
        matcher = start.deep_copy()
        for _ in range(WALK_TOKENS):
            begin = time.process_time()
            mask = matcher.compute_bitmask()
            if time.process_time() - begin > MASK_SECONDS:
                raise ValueError(f"following the grammar takes more than {MASK_SECONDS:g} seconds a token: simplify it")
            token = None if matcher.is_error() else _any_token(mask, random_)
            if token is None or not matcher.consume_token(token) or matcher.is_stopped():
                break
        if not matcher.is_error():
            return
        failures.append(why_failed(matcher))
    raise ValueError(f"following the grammar becomes too complex: {failures[0]}")


def _any_token(mask: bytes, random_: random.Random) -> int | None:
    begin = random_.randrange(len(mask))
    for at in itertools.chain(range(begin, len(mask)), range(begin)):
        if mask[at]:
            return 8 * at + random_.choice([bit for bit in range(8) if mask[at] >> bit & 1])
    return None


def one_line(error: Exception) -> str:
    """Returns an error in one line, for the client."""
    return " ".join(str(error).split())[:300]


def _pages() -> tuple[int, int]:
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(size) * os.sysconf("SC_PAGE_SIZE"), int(resident) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Answers requests until the parent closes the connection or ends."""
    parent = Connection(int(sys.argv[1]))
    # A compilation holds the interpreter lock, so no thread could detect that the parent has died.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = json.loads(parent.recv_bytes())
    os.nice(10)
    try:
        vocabulary = vocabulary_of(settings)
    except Exception as error:
        _send(parent, {"error": f"this model's tokenizer cannot be used: {one_line(error)}"})
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_pages()[0] + settings["memory"],) * 2)
    _send(parent, {})
    while True:
        kind, value = json.loads(parent.recv_bytes())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        until = math.ceil(usage.ru_utime + usage.ru_stime + settings["seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        before = _pages()[1]
        try:
            form = form_of(kind, value)
            matcher = compiled(vocabulary, form)
            follow(matcher)
            answer = {"form": form, "bytes": max(0, _pages()[1] - before)}
            del matcher
        except MemoryError:
            raise
        except Exception as error:  # llguidance raises many kinds of errors
            answer = {"error": one_line(error)}
        _send(parent, answer)


def _send(parent: Connection, value: dict[str, Any]) -> None:
    parent.send_bytes(json.dumps(value).encode())


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the connection
        main()
