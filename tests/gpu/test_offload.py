"""KV cache in main memory (`kv_offloading_size`): a prompt that was evicted from the GPU's cache is loaded back."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu.conftest import RecordProperty, needs_gpu
from tests.live.server import Server, hosted, write_model
from tests.waiting import wait_until

BLOCKS = 80
"""The number of blocks of 16 tokens: a little more than one sequence of the maximum length needs."""
LONG = [" ".join(f"{word} {number}" for word in range(130)) for number in range(5)]
"""Prompts of at least 400 tokens. The cache holds at most three of them."""


def loaded_back(server: Server) -> int:
    """Return the number of tokens that were found in main memory."""
    metrics = server.client.get("/metrics").text
    found = re.findall(r"^vllm:external_prefix_cache_hits_total{.*} (\S+)$", metrics, re.M)
    return sum(int(float(value)) for value in found)


@needs_gpu
def test_a_prompt_that_has_left_the_gpus_cache_is_loaded_back_and_has_the_same_text(
    host: Server, gpu_options: dict[str, object], tmp_path: Path, record_property: RecordProperty
) -> None:
    options = gpu_options | {"rolling_batch": "vllm", "num_gpu_blocks_override": BLOCKS, "kv_offloading_size": 2}
    with hosted(host, write_model(tmp_path / "offload" / "model", **options)) as server:

        def text(prompt: str) -> str:
            answer = server.invoke(prompt, max_new_tokens=16)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["generated_text"])

        first = text(LONG[0])
        for prompt in LONG[1:]:
            text(prompt)
        before = loaded_back(server)
        assert text(LONG[0]) == first
        wait_until(lambda: loaded_back(server) > before)
        record_property("loaded back:", f"{loaded_back(server) - before} tokens")
