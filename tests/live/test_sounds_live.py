"""Sounds in chats over HTTP, with a small Qwen2-Audio."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.bare_media import MediaPrompt, bare_texts
from tests.live.server import Server, hosted, records, write_model
from tests.live.small_audio_model import MARK, prepare_small_audio_model
from tests.live.sounds import silence, tone

pytestmark = pytest.mark.slow

SOUNDS = [tone(300), tone(900)]
LENGTH = 6
ARGUMENTS: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def audio(host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, object] = {
        "model_id": prepare_small_audio_model(),
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "max_rolling_batch_size": 8,
        "max_media_memory_mb": 16,
        **ARGUMENTS,
    }
    with hosted(host, write_model(tmp_path_factory.mktemp("audio") / "model", **options)) as model:
        yield model


@pytest.fixture(scope="module")
def bare() -> dict[int, str]:
    """The texts of bare vLLM for a chat with the first sound, and for a chat with both sounds."""
    files = tuple(base64.b64encode(sound).decode() for sound in SOUNDS)
    prompts = [
        MediaPrompt(
            f"<|im_start|>user\n{MARK * count}What is this?<|im_end|>\n<|im_start|>assistant\n",
            sounds=files[:count],
            max_tokens=LENGTH,
        )
        for count in (1, 2)
    ]
    texts = bare_texts(prepare_small_audio_model(), prompts, max_num_seqs=8, **ARGUMENTS)
    assert texts[0] != texts[1]
    return dict(enumerate(texts, 1))


def input_audio(sound: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": kind}}


def audio_url(sound: bytes) -> dict[str, Any]:
    url = "data:audio/wav;base64," + base64.b64encode(sound).decode()
    return {"type": "audio_url", "audio_url": {"url": url}}


def ask(audio: Server, *parts: dict[str, Any], path: str = "/v1/chat/completions", **fields: Any) -> Any:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": LENGTH, "temperature": 0} | fields
    if path.startswith("/v1/"):
        body["model"] = audio.name
    return audio.client.post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("part", [input_audio, audio_url])
def test_sounds_answer_as_bare_vllm(audio: Server, bare: dict[int, str], part: Any, path: str) -> None:
    for count in (1, 2):
        answer = ask(audio, *map(part, SOUNDS[:count]), path=path)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == bare[count]
    streamed = ask(audio, part(SOUNDS[0]), path=path, stream=True)
    events = records(streamed.text.replace("data: [DONE]", ""))
    deltas = [choice["delta"] for record in events for choice in record["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == bare[1]


def test_sounds_of_another_rate_are_resampled(audio: Server) -> None:
    counts = [ask(audio, input_audio(tone(300, 1.0, rate))).json()["usage"]["prompt_tokens"] for rate in (8000, 44100)]
    assert counts == [ask(audio, input_audio(SOUNDS[0])).json()["usage"]["prompt_tokens"]] * 2


@pytest.mark.parametrize(
    ("parts", "status", "param", "message"),
    [
        ([input_audio(b"no sound")], 400, "audio_url", "`audio_url` cannot be decoded: "),
        ([input_audio(silence(601))], 400, "audio_url", "Audio exceeds maximum allowed duration of 600s"),
        (
            [input_audio(silence(590))],
            400,
            "audio_url",
            "may take 16 MiB of memory (option.max_media_memory_mb)",
        ),
        ([audio_url(SOUNDS[0])] * 5, 400, "audio", "At most 4 audio(s) may be provided in one prompt."),
        ([{"type": "audio_url", "audio_url": {"url": "data:audio/wav,abc"}}], 400, "audio_url", "must be base64"),
        ([{"type": "audio_url", "audio_url": {"url": "ftp://host/a"}}], 400, "audio_url", "must be either a HTTP"),
        (
            [{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/a.wav"}}],
            422,
            "audio_url",
            "cannot be fetched from a public address",
        ),
    ],
)
def test_wrong_sounds_are_refused(
    audio: Server, parts: list[dict[str, Any]], status: int, param: str, message: str
) -> None:
    answer = ask(audio, *parts)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert message in error["message"]
    of_lmi = ask(audio, *parts, path="/invocations")
    assert (of_lmi.status_code, message in of_lmi.json()["error"]) == (424, True)


def test_a_model_that_transcribes_nothing_has_no_such_routes(audio: Server) -> None:
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        answer = audio.client.post(path, data={"model": audio.name}, files={"file": SOUNDS[0]})
        error = {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}
        assert (answer.status_code, answer.json()) == (404, {"error": error})
