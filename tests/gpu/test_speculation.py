"""N-gram speculation changes no greedy text (in fp32, see conftest), and drafts tokens of a repetitive text."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.gpu.conftest import ON_CPU, TOKENS, RecordProperty
from tests.live.prompts import PROMPTS
from tests.live.server import Server, hosted, write_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
TEXTS = (*PROMPTS[: 1 if ON_CPU else None], "one two three four one two three four one two three four one two")


def texts(server: Server) -> list[str]:
    answers = [server.invoke(prompt, max_new_tokens=TOKENS) for prompt in TEXTS]
    assert [answer.status_code for answer in answers] == [200] * len(TEXTS), answers[0].text
    return [answer.json()["generated_text"] for answer in answers]


def counted(server: Server, name: str) -> int:
    found = re.findall(
        rf"^vllm:spec_decode_num_{name}_tokens_total{{.*}} (\S+)$", server.client.get("/metrics").text, re.M
    )
    return sum(int(float(value)) for value in found)


def test_guessed_tokens_are_accepted_and_change_no_text(
    host: Server,
    gpu_model: Path,
    gpu_options: dict[str, object],
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    """Only a trained model goes on with the repetition in a text."""
    options = gpu_options | {"model_id": gpu_model, "rolling_batch": "vllm"}
    with hosted(host, write_model(tmp_path / "alone" / "model", **options)) as plain:
        alone = texts(plain)
    guessing = write_model(tmp_path / "guessing" / "model", **options, speculative_config=json.dumps(NGRAM))
    with hosted(host, guessing) as server:
        assert texts(server) == alone
        drafted, accepted = counted(server, "draft"), counted(server, "accepted")
    record_property("guessed tokens:", f"{accepted} of {drafted} accepted")
    assert accepted > 0
