"""With LMI's options for a draft model, vLLM drafts tokens with this model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.live.server import Server, hosted, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "Once upon a time"
TOKENS = 24


def text(server: Server) -> str:
    answer = server.invoke(PROMPT, max_new_tokens=TOKENS)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["generated_text"]
    return found


def test_a_draft_model_in_the_model_directory_drafts_and_changes_no_text(
    host: Server, small_options: dict[str, object], tmp_path: Path
) -> None:
    options = {**small_options, "max_model_len": 1024}  # the KV cache is for two models
    with hosted(host, write_model(tmp_path / "alone" / "model", **options)) as server:
        alone = text(server)
    model_dir = write_model(
        tmp_path / "drafted" / "model", **options, speculative_draft_model="draft", speculative_length=3
    )
    shutil.copytree(str(options["model_id"]), model_dir / "draft")
    with hosted(host, model_dir) as server:
        server.wait_for_log(f"SpeculativeConfig(method='draft_model', model='{model_dir}/draft', num_spec_tokens=3)")
        assert text(server) == alone
