"""`slipway ray --prefix-bytes`: requests that begin alike find their prompt in the cache of one replica."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live.ray_cluster import Cluster, ray_cluster
from tests.live.server import write_model

pytest.importorskip("ray.serve", reason="Ray is not installed")
pytestmark = pytest.mark.long

TENANTS, USERS, TURNS, TOGETHER = 8, 4, 3, 4
PREFIX = 256


def system_prompt(tenant: int) -> str:
    """Return a prompt of several blocks of the KV cache. The prompts of two tenants differ in their first block."""
    return f"You answer the customers of shop number {tenant}. " + "Be brief, be polite, and name your sources. " * 40


def conversation(cluster: Cluster, tenant: int, user: int) -> None:
    """Hold a conversation in which each turn repeats all earlier turns, in TGI's, LMI's or OpenAI's contract."""
    text = system_prompt(tenant)
    for turn in range(TURNS):
        text += f"\nUser {user}: question {turn}? " + f"It is about order {user}{turn}. " * 20
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1}}),
            ("/invocations", {"inputs": text, "parameters": {"max_new_tokens": 1}}),
            ("/v1/completions", {"prompt": text, "model": "model", "max_tokens": 1}),
        ]
        path, body = bodies[tenant % len(bodies)]
        assert cluster.client.post(path, json=body).status_code == 200


def hit_rate(cluster: Cluster) -> tuple[float, dict[str, float]]:
    """Return the share of the prompts' tokens that were in a cache, and the number of requests that each replica
    answered.
    """

    def counts() -> tuple[float, float]:
        hits, queries = (cluster.each(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
        return sum(hits.values()), sum(queries.values())

    hits, queries = counts()
    with ThreadPoolExecutor(TOGETHER) as pool:
        pairs = [(tenant, user) for user in range(USERS) for tenant in range(TENANTS)]
        list(pool.map(lambda pair: conversation(cluster, *pair), pairs))
    more_hits, more_queries = counts()
    tokens = cluster.each("vllm:prompt_tokens_total")
    return (more_hits - hits) / (more_queries - queries), tokens


def test_the_hit_rate_is_higher_than_with_replicas_by_the_fewest_requests(
    tmp_path: Path, small_options: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", **small_options)
    rates = {}
    for name, arguments in {"fewest": (), "prefix": ("--prefix-bytes", str(PREFIX))}.items():
        with ray_cluster(model, tmp_path / f"{name}.log", *arguments) as cluster:
            rates[name], tokens = hit_rate(cluster)
            assert len([count for count in tokens.values() if count]) == 2, "both replicas have a part"
    print(f"prefix cache hits, share of the prompts' tokens: {rates}")
    assert rates["prefix"] > rates["fewest"]
