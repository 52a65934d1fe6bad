"""Measures how evenly calls are distributed over copies of a model, and the hits in the copies' prefix caches.

The engines are scripted. Slipway with two copies is compared with a single copy, and with two copies that get the calls
in turn.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.peers import MODEL, Engine, InTurn, Slipway, TwoCopies
from benchmarks.scripted_front_end import BLOCK

STREAMS, STREAM_TOKENS = 64, 128  # These streams start together.
CALLS, CALL_TOKENS = 200, 16
CALLERS = 8  # The number of concurrent calls.
SYSTEM_TOKENS, END_TOKENS = 512, 32  # The lengths of the prompts' two parts, in tokens.
MANY, FEW = 8, 4  # Calls are measured with these two numbers of system prompts.
CACHE_BLOCKS = 5 * SYSTEM_TOKENS // BLOCK  # Each cache holds `FEW` system prompts. Two caches together hold `MANY`.
PEERS: tuple[type[Slipway], ...] = (Slipway, TwoCopies, InTurn)

_TOKEN_IDS = range(1000, 20_000)  # The ids of words, in the vocabulary of every measured model.
_TIMEOUT_S = 60.0
_SEED = 1  # All servers get the same prompts.
_TOKENS, _HITS = "vllm:generation_tokens_total", "vllm:prefix_cache_hits_total"

Prompt = list[int]


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one server."""

    server: str
    # The number of tokens that the busiest copy generated, divided by the mean of all copies. `busiest` is measured
    # with streams that have short prompts, and `busiest_of_one_prompt` with streams that share one long prompt.
    # `busiest_of_calls` is measured with calls that have many system prompts.
    busiest: float
    busiest_of_one_prompt: float
    busiest_of_calls: float
    # The share of the tokens of system prompts that were in the cache of the chosen copy.
    hits_of_many: float
    hits_of_few: float


def measure(engine: Engine, report: Callable[[str], None]) -> Iterator[Shares]:
    """Start each server, and measure it.

    Raises:
        ServerError: A server did not start, or a call failed.
    """
    engine = replace(engine, arguments={**engine.arguments, "enable_prefix_caching": True}, cache_blocks=CACHE_BLOCKS)
    for kind in PEERS:
        peer = kind(("openai",))
        if reason := peer.missing(engine):
            report(f"{peer.name} is left out: {reason}")
            continue
        report(f"starting {peer.name} for its shares")
        with tempfile.TemporaryDirectory(prefix="slipway-shares-") as directory, peer.start(engine, Path(directory)):
            peer.wait_ready()
            yield _measure(peer)


def _measure(peer: Slipway) -> Shares:
    chance = random.Random(_SEED)
    long = _words(chance, SYSTEM_TOKENS)
    streams = _used(peer, [_words(chance, BLOCK) for _ in range(STREAMS)], STREAM_TOKENS, STREAMS)
    of_one_prompt = _used(peer, [long] * STREAMS, STREAM_TOKENS, STREAMS)
    many = _used(peer, calls(chance, MANY), CALL_TOKENS, CALLERS)
    few = _used(peer, calls(chance, FEW), CALL_TOKENS, CALLERS)
    return Shares(
        server=peer.name,
        busiest=busiest(streams[_TOKENS]),
        busiest_of_one_prompt=busiest(of_one_prompt[_TOKENS]),
        busiest_of_calls=busiest(many[_TOKENS]),
        hits_of_many=sum(many[_HITS].values()) / (CALLS * SYSTEM_TOKENS),
        hits_of_few=sum(few[_HITS].values()) / (CALLS * SYSTEM_TOKENS),
    )


def calls(chance: random.Random, system_prompts: int) -> list[Prompt]:
    """Create system prompts, and return the prompts of calls.

    Each call's prompt is a system prompt, followed by random tokens that only this call has. All system prompts are
    used equally often.
    """
    beginnings = [_words(chance, SYSTEM_TOKENS) for _ in range(system_prompts)]
    prompts = [beginnings[number % system_prompts] + _words(chance, END_TOKENS) for number in range(CALLS)]
    chance.shuffle(prompts)
    return prompts


def _words(chance: random.Random, count: int) -> Prompt:
    return chance.choices(_TOKEN_IDS, k=count)


def busiest(tokens: Mapping[str, float]) -> float:
    """Return the number of tokens that the busiest engine generated, divided by the mean of all engines."""
    return max(tokens.values()) / mean(tokens.values())


def _used(peer: Slipway, prompts: Sequence[Prompt], tokens: int, clients: int) -> dict[str, dict[str, float]]:
    """Make the calls, and return the growth of each engine's counters.

    Raises:
        ServerError: A call failed.
    """
    before = counters(_metrics(peer.port))
    with ThreadPoolExecutor(clients) as pool:
        for problem in pool.map(lambda prompt: _stream(peer.port, prompt, tokens), prompts):
            if problem:
                raise peer.server.error(problem)
    after = counters(_metrics(peer.port))
    return {
        name: {engine: after[name][engine] - before[name].get(engine, 0) for engine in after[name]} for name in after
    }


def _stream(port: int, prompt: Prompt, tokens: int) -> str:
    """Read a stream of completions. Return the problem, or an empty string."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return f"a call failed: {error}"
    finally:
        connection.close()
    return "" if answer.status == 200 and data.endswith(b"data: [DONE]\n\n") else f"a call got {data[-200:]!r}"


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_TIMEOUT_S) as answer:
        return str(answer.read(), "utf-8")


def counters(metrics: str) -> dict[str, dict[str, float]]:
    """Return the counters of tokens and of hits, by the number of the engine."""
    found: dict[str, dict[str, float]] = {_TOKENS: {}, _HITS: {}}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name][sample.labels["engine"]] = sample.value
    return found
