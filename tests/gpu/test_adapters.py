"""LoRA adapters: calls with different adapters run in one batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

from tests.gpu.conftest import TOKENS
from tests.live.prompts import PROMPTS
from tests.live.server import Server


def text(server: Server, prompt: str, adapter: str = "") -> str:
    document: dict[str, Any] = {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS}}
    if adapter:
        document["adapters"] = adapter
    response = server.client.post("/invocations", json=document)
    assert response.status_code == 200, response.text
    answer: str = response.json()["generated_text"]
    return answer


def test_in_a_batch_each_adapter_has_its_own_answer_and_the_model_without_one_has_its_own(server: Server) -> None:
    """Fill every slot, because on a CPU vLLM applies the weights of the last slot to a prompt without an adapter.

    In 16-bit types, two tokens may be equally likely, so the end of a text may differ between a batch and a batch of
    one. Each text from the batch is compared with the texts from batches of one. The longest common beginning is still
    with the text of the same adapter.
    """
    alone = {name: text(server, PROMPTS[0], name) for name in ("", "red", "blue")}
    assert len(set(alone.values())) == 3
    names = ["", "red", "blue"] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: text(server, PROMPTS[0], name), names))
    assert [max(alone, key=lambda name: _common(alone[name], answer)) for answer in together] == names


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
