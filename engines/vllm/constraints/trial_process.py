"""A script that compiles constraints before the engine does, in a separate process. It also checks finished answers.

A constraint is a program that a client has sent. If a constraint takes too long, takes too much memory or crashes the
compiler, only this process ends: the server and the engine continue. The script imports little except llguidance, so
that it starts fast and stays small. `trials.GrammarTrials` writes to its standard input and reads its standard output.
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

CPU_SECONDS = 2.0  # The limit for one constraint. Ordinary constraints take a hundredth of it.
# The limit for one token's mask. The engine computes masks between two steps, while all requests wait. Ordinary masks
# take 0.001 s.
STEP_CPU_SECONDS = 0.1
STEPS = 64  # The number of tokens in a trial.
CHECK_CPU_SECONDS = 0.1  # The limit for the check of one answer. A trial may have to wait for one check.
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 4 << 20  # Half of the stack that the engine's threads have.
_PR_SET_PDEATHSIG = 1
TOO_MUCH = "it takes too much time or memory to compile"
_WRITTEN: Mapping[str, Callable[[str], str]] = {"regex": ascii_expression, "grammar": grammar_for_guidance}


class Trial(NamedTuple):
    """The result of a trial."""

    error: str = ""  # Why the constraint cannot be used, as the end of a sentence. "" if it can be used.
    text: str = ""  # The constraint for the back end.
    # The places of a JSON schema that the text does not enforce, as URI fragments.
    not_held: tuple[str, ...] = ()


def trial(tokenizer: Any, kind: str, text: str, *, compact: bool = True, drafts: bool = False) -> Trial:
    """Rewrite a constraint for the back end, and test it.

    Args:
        tokenizer: llguidance's tokenizer.
        kind: The kind of constraint, by its name in vLLM's `structured_outputs`.
        text: The constraint.
        compact: Whether JSON has no white space.
        drafts: Whether the engine uses speculative decoding, and so may reject tokens of a draft.
    """
    matcher: Any = None

    def fault(text: str) -> str:
        nonlocal matcher
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": True})
        except ValueError as error:  # The schema is nested too deeply.
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
    """Generate some tokens with the grammar, and return an error or "".

    A grammar that compiles may still match no text, or be slow for one token.
    """
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
    """Return True if the grammar requires more text after the end token."""
    return not matcher.is_accepting() and matcher.consume_token(end_token) and not matcher.is_accepting()


def _one_of(mask: int, chance: random.Random) -> int:
    """Return the position of a set bit: the first one at or after a random position."""
    rest = mask >> (place := chance.randrange(mask.bit_length()))
    return place + (rest & -rest).bit_length() - 1


def _complaint(error: str) -> str:
    if "max is" in error or "too many" in error or "limit" in error:
        return "it allows too many alternatives at one place"
    return "no text satisfies it, or nothing can follow a part of it"


class _TooSlow(BaseException):
    """A check has exceeded its time limit. `except Exception` does not catch this error."""


def verdict(schema: str, answer: str) -> str:
    """Check an answer against its schema. Returns one of `engines.statistics.VERDICTS`.

    The patterns of the schema are matched with Python's `re`, which a signal can interrupt.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY  # This registry never fetches a schema.

    try:
        document = json.loads(answer)
    except json.JSONDecodeError:
        return "incomplete"
    except (ValueError, RecursionError):  # For example, a number has thousands of digits.
        return "unchecked"
    checking = True

    def stop(*_: Any) -> None:
        if checking:
            raise _TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    try:
        try:
            # The timer repeats, because Python drops an error that is raised in a finalizer.
            signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_SECONDS, CHECK_CPU_SECONDS)
            rules = json.loads(schema)
            validator = validator_for(rules, default=Draft202012Validator)
            checked = validator(rules, registry=REGISTRY, format_checker=validator.FORMAT_CHECKER)
            found = "valid" if checked.is_valid(document) else "invalid"
        finally:
            checking = False
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # Keywords that are not enforced may have invalid values, and rpds may panic.
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
    """Answer each line of the standard input. The process ends at once if the server ends.

    A timer limits each trial. Its signal has no handler, so it ends the process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries must not write between the answers.
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
        except BaseException:  # The memory is exhausted, or the compiler has panicked. A new process takes over.
            print(json.dumps(Trial(TOO_MUCH)), file=answers, flush=True)
            return
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
