"""A script that compiles constraints before the engine does, in a separate process, and checks finished answers.

A constraint is a program that a client has sent. One that takes too long, takes too much memory or crashes the
compiler ends this process, and neither the server nor the engine. Imports little except llguidance, so that it starts
at once and stays small. `trials.GrammarTrials` writes to its standard input and reads its standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import llguidance

from engines.vllm.constraints import json_schema
from engines.vllm.constraints.expressions import ascii_expression, grammar_for_guidance

CPU_SECONDS = 2.0  # Limit for one constraint; ordinary constraints take a hundredth of it.
# Limit for one token's mask, which the engine makes between two steps of all requests; ordinary ones take 0.001.
STEP_CPU_SECONDS = 0.1
STEPS = 64  # Tokens that are tried out.
CHECK_CPU_SECONDS = 0.1  # Limit for the check of one answer, for which a trial may have to wait.
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 4 << 20  # Half of the stack of the engine's threads.
_PR_SET_PDEATHSIG = 1
TOO_MUCH = "it takes too much time or memory to compile"
_WRITTEN: Mapping[str, Callable[[str], str]] = {"regex": ascii_expression, "grammar": grammar_for_guidance}


class Trial(NamedTuple):
    """The result of a trial."""

    error: str = ""  # The fault of the constraint, as the end of a sentence. "" if it can be used.
    text: str = ""  # The constraint as the back end gets it.
    # The parts of a JSON schema that the text does not hold: their places, as JSON pointers.
    not_held: tuple[str, ...] = ()


def trial(tokenizer: Any, kind: str, text: str, *, compact: bool = True, drafts: bool = False) -> Trial:
    """Rewrite a constraint for the back end, and look for its faults.

    Args:
        tokenizer: llguidance's.
        kind: Its name in vLLM's `structured_outputs`.
        text: The constraint.
        compact: JSON has no white space.
        drafts: The engine takes back tokens that a draft has proposed.
    """
    matcher: Any = None

    def fault(text: str) -> str:
        nonlocal matcher
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": True})
        except ValueError as error:  # it is nested too deeply
            return str(error)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        return str(matcher.get_error())

    not_held: tuple[str, ...] = ()
    try:
        if kind == "json":
            text, not_held, complaint = json_schema.for_guidance(text, fault, compact=compact)
        else:
            text = _WRITTEN[kind](text) if kind in _WRITTEN else text
            grammar = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
            complaint = matcher.get_error()
    except (ValueError, RecursionError) as error:
        return Trial(str(error))
    if complaint:
        return Trial(complaint, text if not_held else "", not_held)
    if complaint := _walk(matcher, tokenizer.eos_token, drafts):
        return Trial(complaint)
    return Trial("", text, not_held)


def _walk(first: Any, end_token: int, drafts: bool) -> str:
    """Step the grammar for some tokens. A grammar that compiles may match no text, or be slow to step."""
    chance = random.Random(0)
    matcher = first.deep_copy()  # Some constraints cannot be reset.
    for _ in range(STEPS):
        begun = time.process_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        ends_early = mask >> end_token & 1 and _goes_on(matcher.deep_copy(), end_token)
        if not matcher.is_error() and mask:
            matcher.consume_token(_one_of(mask, chance))
        if matcher.is_error() or not mask:
            return _complaint(matcher.get_error())
        if ends_early:
            return 'something has to follow where it lets the answer end, by `stop=""` or the model\'s end token'
        if drafts and not matcher.deep_copy().rollback(1):
            return "`max_tokens` and `stop` of a rule need a model without a draft; `suffix` does not"
        if time.process_time() - begun > STEP_CPU_SECONDS:
            return "it is too ambiguous to be followed in time"
        if matcher.is_stopped():
            matcher = first.deep_copy()
    return ""


def _goes_on(matcher: Any, end_token: int) -> bool:
    """Return True if a text is not complete after the end token."""
    return not matcher.is_accepting() and matcher.consume_token(end_token) and not matcher.is_accepting()


def _one_of(mask: int, chance: random.Random) -> int:
    """Return one of the bits that are set: the first after a random place."""
    rest = mask >> (place := chance.randrange(mask.bit_length()))
    return place + (rest & -rest).bit_length() - 1


def _complaint(error: str) -> str:
    if "max is" in error or "too many" in error or "limit" in error:
        return "it allows too many alternatives at one place"
    return "no text satisfies it, or nothing can follow a part of it"


class _TooSlow(BaseException):
    """A check has taken its time. No handler of other exceptions stops it."""


def verdict(schema: str, answer: str) -> str:
    """Check an answer against its schema. Returns one of `engines.statistics.VERDICTS`.

    Patterns are searched by Python's `re`, which stops for signals.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY  # It fetches nothing, so that no other schema is found.

    try:
        document = json.loads(answer)
    except json.JSONDecodeError:
        return "incomplete"
    except (ValueError, RecursionError):  # a number with thousands of digits; thousands of brackets
        return "unchecked"
    checking = True

    def stop(*_: Any) -> None:
        if checking:
            raise _TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_SECONDS)
            rules = json.loads(schema)
            validator = validator_for(rules, default=Draft202012Validator)
            checked = validator(rules, registry=REGISTRY, format_checker=validator.FORMAT_CHECKER)
            found = "valid" if checked.is_valid(document) else "invalid"
        finally:
            checking = False
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # The parts that the back end does not hold may be wrong. rpds may panic.
        found = "unchecked"
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.signal(signal.SIGPROF, before)
    return found


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer each line until the standard input or the server ends, also in the middle of a constraint.

    The timer's signal is not handled, so it ends the process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not come between the answers
    first = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(first["tokenizer"], n_vocab=first["vocabulary_size"], eos_token=first["eos"])
    _limit()
    print(json.dumps(Trial()), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "answer" in message:
            print(json.dumps(verdict(**message)), file=answers, flush=True)
            continue
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            result = trial(tokenizer, **message, drafts=first["drafts"])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # There is no more memory, or the compiler has panicked. The next process is sound.
            print(json.dumps(Trial(TOO_MUCH)), file=answers, flush=True)
            return
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
