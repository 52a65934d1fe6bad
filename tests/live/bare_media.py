"""The texts of bare vLLM, without Slipway, for prompts with images or sounds.

Run as a program, the module generates them.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from container.sources.sample_model import make_once
from engines.cache_dir import cache_dir
from engines.vllm import RELEASE
from tests.live.preloaded import answer_order, result_of


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with the placeholders of its media, and the media as files in base64."""

    prompt: str
    images: tuple[str, ...] = ()
    sounds: tuple[str, ...] = ()
    transcribes: bool = False  # The sound goes to the encoder, and the prompt to the decoder.
    max_tokens: int = 6


def bare_texts(model: Path, prompts: list[MediaPrompt], **arguments: Any) -> list[str]:
    """Return the greedy text for each prompt from a new process. The texts are cached, because they do not vary.

    Args:
        model: The directory of the model.
        prompts: The prompts.
        arguments: Further engine arguments of vLLM.
    """
    order = {"arguments": {"model": str(model), **arguments}, "prompts": [asdict(prompt) for prompt in prompts]}
    made_by = json.dumps([order, Path(__file__).read_text(), version("torch"), RELEASE])

    def write(directory: Path) -> None:
        made = result_of(__name__, order, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        (directory / "texts.json").write_text(json.dumps(made))

    kept = make_once(cache_dir() / f"bare-media-{sha256(made_by.encode()).hexdigest()[:16]}", write)
    texts: list[str] = json.loads((kept / "texts.json").read_text())
    return texts


def _texts(order: dict[str, Any]) -> list[str]:
    from PIL import Image
    from vllm import LLM, SamplingParams

    def file(text: str) -> io.BytesIO:
        return io.BytesIO(base64.b64decode(text))

    engine = LLM(**order["arguments"], dtype="float32", enforce_eager=True, distributed_executor_backend="uni")
    prompts: list[Any] = []
    for each in order["prompts"]:
        media: dict[str, Any] = {"image": [Image.open(file(image)).convert("RGB") for image in each["images"]]}
        if each["sounds"]:
            import soundfile

            media = {"audio": [soundfile.read(file(sound), dtype="float32") for sound in each["sounds"]]}
        prompt = {"prompt": each["prompt"], "multi_modal_data": media}
        if each["transcribes"]:
            prompt = {"encoder_prompt": {**prompt, "prompt": ""}, "decoder_prompt": each["prompt"]}
        prompts.append(prompt)
    params = [SamplingParams(temperature=0.0, max_tokens=each["max_tokens"]) for each in order["prompts"]]
    return [output.outputs[0].text for output in engine.generate(prompts, params)]


if __name__ == "__main__":
    answer_order(_texts)
