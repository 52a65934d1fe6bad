"""Weights that are quantized to fp8 when they are loaded: the answers make sense, and the weights take less memory."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu.conftest import RecordProperty, needs_gpu
from tests.live.prompts import PROMPTS
from tests.live.server import Server, hosted, write_model


@needs_gpu
def test_quantized_weights_take_less_memory_and_the_answer_makes_sense(
    host: Server,
    gpu_model: Path,
    gpu_options: dict[str, object],
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    """Quantization halves the size of a 16-bit weight. Embeddings, a fifth of the sample model, are not quantized."""
    options = gpu_options | {"dtype": "bf16", "quantize": "fp8"}
    with hosted(host, write_model(tmp_path / "fp8" / "model", rolling_batch="vllm", **options)) as quantized:
        answer = quantized.invoke(PROMPTS[0], max_new_tokens=16)
        assert answer.status_code == 200, answer.text
        found = re.search(r"Model loading took ([\d.]+) GiB", quantized.log_text())
    assert found is not None, "vLLM tells the memory of the weights in other words"
    files = sum(file.stat().st_size for file in gpu_model.glob("*.safetensors")) / 2**30
    record_property("weights:", f"{found[1]} GiB, of {files:.2f} GiB in 16 bits")
    assert float(found[1]) < 0.8 * files
    assert "Paris" in answer.json()["generated_text"]
