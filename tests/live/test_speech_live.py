"""Transcriptions and translations over HTTP, with a small Whisper."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.live import peak_memory
from tests.live.bare_media import MediaPrompt, bare_texts
from tests.live.server import Server, hosted, write_model
from tests.live.small_speech_model import prepare_small_speech_model
from tests.live.sounds import bomb, silence, tone

pytestmark = pytest.mark.slow

SOUND, OTHER = tone(300), tone(900)
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
LENGTH = 8


@pytest.fixture(scope="module")
def whisper(host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, object] = {
        "model_id": prepare_small_speech_model(),
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "kv_cache_memory_bytes": 64 << 20,
        "max_rolling_batch_size": 8,
        "max_media_memory_mb": 32,
    }
    with hosted(host, write_model(tmp_path_factory.mktemp("whisper") / "model", **options)) as model:
        yield model


@pytest.fixture(scope="module")
def bare() -> dict[str, str]:
    """The texts of bare vLLM, by task and sound."""
    asked = [(task, sound) for task in ("transcribe", "translate") for sound in ("sound", "other")]
    files = {"sound": SOUND, "other": OTHER}
    prompts = [
        MediaPrompt(
            f"<|startoftranscript|><|en|><|{task}|><|notimestamps|>",
            sounds=(base64.b64encode(files[sound]).decode(),),
            transcribes=True,
            max_tokens=LENGTH,
        )
        for task, sound in asked
    ]
    texts = bare_texts(prepare_small_speech_model(), prompts, kv_cache_memory_bytes=64 << 20, max_num_seqs=8)
    assert len(set(texts)) == len(texts), "neither the task nor the sound makes a difference"
    return {f"{task} {sound}": text for (task, sound), text in zip(asked, texts, strict=True)}


def ask(whisper: Server, sound: bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> httpx.Response:
    form = {"model": whisper.name, "language": "en", "max_completion_tokens": str(LENGTH)} | fields
    return whisper.client.post(path, data=form, files={"file": ("a.wav", sound, "audio/wav")})


def through_invocations(whisper: Server, path: str, sound: bytes, **fields: Any) -> httpx.Response:
    """Call the server like SageMaker's clients, which send all calls to one path."""
    form = {"language": "en", "max_completion_tokens": str(LENGTH)} | fields
    headers = {"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"}
    return whisper.client.post("/invocations", data=form, files={"file": ("a.wav", sound)}, headers=headers)


def test_transcriptions_answer_as_bare_vllm(whisper: Server, bare: dict[str, str]) -> None:
    answer = ask(whisper, SOUND)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"text": bare["transcribe sound"], "usage": {"type": "duration", "seconds": 1}}
    assert ask(whisper, OTHER).json()["text"] == bare["transcribe other"]
    assert through_invocations(whisper, TRANSCRIPTIONS, OTHER).json()["text"] == bare["transcribe other"]


def test_translations_answer_as_bare_vllm(whisper: Server, bare: dict[str, str]) -> None:
    assert ask(whisper, SOUND, TRANSLATIONS).json() == {"text": bare["translate sound"]}
    assert through_invocations(whisper, TRANSLATIONS, OTHER).json() == {"text": bare["translate other"]}


@pytest.mark.parametrize("call", [ask, through_invocations])
def test_transcriptions_are_streamed(whisper: Server, bare: dict[str, str], call: Any) -> None:
    if call is ask:
        answer = ask(whisper, SOUND, stream="true", stream_include_usage="true")
    else:
        answer = through_invocations(whisper, TRANSCRIPTIONS, SOUND, stream="true", stream_include_usage="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.text.strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    text = "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])
    assert (text, done) == (bare["transcribe sound"], "data: [DONE]")
    assert chunks[-1]["usage"]["completion_tokens"] == LENGTH


def test_openais_client_transcribes_and_translates(whisper: Server, bare: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none")
    more = {"max_completion_tokens": LENGTH}
    file = ("a.wav", SOUND)
    asked = client.audio.transcriptions.create(model=whisper.name or "", file=file, language="en", extra_body=more)
    assert asked.text == bare["transcribe sound"]
    more["language"] = "en"  # type: ignore[assignment]
    translated = client.audio.translations.create(model=whisper.name or "", file=file, extra_body=more)
    assert translated.text == bare["translate sound"]


def test_a_long_sound_is_transcribed_in_clips(whisper: Server) -> None:
    answer = ask(whisper, tone(300, 5.0, 8000), response_format="verbose_json")
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert (document["language"], float(document["duration"])) == ("en", 5.0)
    assert ask(whisper, tone(300, 5.0)).json()["usage"]["seconds"] == 5


def test_the_language_is_found_if_none_is_named(whisper: Server) -> None:
    form = {"model": whisper.name, "max_completion_tokens": "2", "response_format": "verbose_json"}
    answer = whisper.client.post(TRANSCRIPTIONS, data=form, files={"file": ("a.wav", SOUND)})
    assert (answer.status_code, len(answer.json()["language"])) == (200, 2)


@pytest.mark.parametrize(
    ("sound", "fields", "param", "message"),
    [
        (b"no sound", {}, "file", "`file` cannot be decoded: Invalid or corrupted audio data."),
        (b"", {}, "file", "`file` cannot be decoded: "),
        (SOUND[:40], {}, "file", "`file` cannot be decoded"),
        (SOUND, {"language": "xx"}, None, "Unsupported language: 'xx'"),
        (SOUND, {"response_format": "srt"}, None, "Currently only support response_format: "),
        (SOUND, {"stream": "true", "response_format": "verbose_json"}, None, "doesn't support streaming"),
        (SOUND, {"temperature": "hot"}, "body.temperature", "validation error"),
        (SOUND, {"vllm_xargs": "[" * 100_000}, None, "the body has a value that cannot be used"),
        (SOUND, {"temperature": "-1"}, "temperature", "temperature must be non-negative"),
        (silence(601), {}, "file", "`file` cannot be decoded: Audio exceeds maximum allowed duration of 600s"),
        (bytes(27 << 20), {}, "file", "`file` may have 25 MiB (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB)"),
        (bytes((25 << 20) + 1), {}, "audio_filesize_mb", "Maximum file size exceeded"),
    ],
)
def test_wrong_sounds_are_the_clients_fault(
    whisper: Server, sound: bytes, fields: dict[str, str], param: str | None, message: str
) -> None:
    for answer in (ask(whisper, sound, **fields), through_invocations(whisper, TRANSCRIPTIONS, sound, **fields)):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, 400, param), answer.text
        assert message in error["message"]


def test_the_sounds_of_a_request_are_counted_as_memory(whisper: Server) -> None:
    answer = ask(whisper, silence(590))  # it takes 36 MiB once it is decoded for the model
    assert answer.status_code == 400
    assert "may take 32 MiB of memory (option.max_media_memory_mb)" in answer.json()["error"]["message"]


def test_sounds_that_grow_are_refused_in_bounded_memory(whisper: Server) -> None:
    ask(whisper, SOUND)  # imports the decoders
    grown = bomb()
    assert len(grown) < 1 << 20
    peak_memory.reset(whisper.process.pid)
    before = peak_memory.peak_mib(whisper.process.pid)
    for sound, message in ((grown, "exceeding the 256 MiB limit"), (silence(3600, 100), "maximum allowed duration")):
        for _ in range(4):
            answer = ask(whisper, sound)
            assert (answer.status_code, message in answer.text) == (400, True), answer.text
    assert peak_memory.peak_mib(whisper.process.pid) - before < 200


def test_forms_without_a_file_or_with_another_model_are_refused(whisper: Server) -> None:
    form = {"model": whisper.name}
    missing = whisper.client.post(TRANSCRIPTIONS, data=form, files={"sound": SOUND})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "body.file"), missing.text
    text = whisper.client.post(TRANSCRIPTIONS, data=form | {"file": "text"})
    assert (text.status_code, "Expected 'file' to be a file-like object" in text.text) == (422, True)
    document = whisper.client.post(TRANSCRIPTIONS, json=form)
    assert (document.status_code, document.json()["error"]["param"]) == (400, "body.file"), document.text
    unknown = ask(whisper, SOUND, model="other")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, 404),
        ("/v1/completions", {"prompt": "Hello"}, 404),
        ("/invocations", {"inputs": "Hello"}, 424),
        ("/invocations", {"messages": [{"role": "user", "content": "Hello"}]}, 424),
    ],
)
def test_a_model_that_only_transcribes_refuses_prompts(
    whisper: Server, path: str, body: dict[str, Any], status: int
) -> None:
    if path.startswith("/v1/"):
        body = body | {"model": whisper.name}
    answer = whisper.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert ask(whisper, SOUND).status_code == 200


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_transcription_has_a_deadline(whisper: Server, stream: str) -> None:
    form, files = {"model": whisper.name, "stream": stream}, {"file": ("a.wav", SOUND)}
    answer = whisper.client.post(TRANSCRIPTIONS, data=form, files=files, headers={"X-Slipway-Deadline": "0.0001"})
    assert answer.status_code == 504, answer.text
    assert "the call had no answer at its deadline" in answer.text


def test_a_client_that_leaves_ends_its_transcription(whisper: Server) -> None:
    """Each of a dozen clips has hundreds of tokens.

    A slow client may leave too late, after the end of the transcription. Then the test tries again.
    """
    before = whisper.metric("slipway_generations_aborted_total")
    form = {"model": whisper.name, "language": "en", "stream": "true"}
    files = {"file": ("a.wav", tone(300, 20.0))}

    def is_aborted() -> bool:
        with whisper.client.stream("POST", TRANSCRIPTIONS, data=form, files=files) as answer:
            assert next(answer.iter_bytes()).startswith(b"data: ")
        for gauge in ("slipway_open_requests", "slipway_engine_running"):
            whisper.wait_for_metric(gauge, 0)
        return whisper.metric("slipway_generations_aborted_total") > before

    assert any(is_aborted() for _ in range(5))
