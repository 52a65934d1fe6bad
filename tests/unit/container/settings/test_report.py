from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.models.placement import GpuPlan
from container.settings.lookup import SettingEntry
from container.settings.report import render_text, startup_json
from container.settings.server import ServerConfig
from container.settings.settings import Settings, Startup, StartupModel
from container.settings.values import masked, quoted
from handlers.model_config import ModelConfig

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"


def settings(*entries: SettingEntry, warnings: tuple[str, ...] = ()) -> Settings:
    config = ModelConfig(name="model", model_dir=Path("/opt/ml/model"), model_id="org/name")
    return Settings(server_config=ServerConfig(), config=config, entries=entries, warnings=warnings)


def as_json(reported: Settings) -> str:
    return startup_json(Startup(reported.server_config, (StartupModel(reported, "/opt/ml/model"),)), GpuPlan(()))


def test_the_table_is_aligned() -> None:
    text = render_text(
        settings(
            SettingEntry("port", 9000, "command line: --port"),
            SettingEntry("option.trust_remote_code", False, "default"),
            SettingEntry("option.revision", None, "default"),
            SettingEntry("drain_timeout", 2.5, "default", "a note"),
            warnings=("careful",),
        )
    )
    assert text.splitlines() == [
        "setting                   value  source",
        "port                      9000   command line: --port",
        "option.trust_remote_code  false  default",
        "option.revision           -      default",
        "drain_timeout             2.5    default (a note)",
        "warning: careful",
    ]


def test_json_keeps_types() -> None:
    report = json.loads(
        as_json(
            settings(
                SettingEntry("port", 9000, "default"),
                SettingEntry("fail_fast", True, "default", "a note"),
                SettingEntry("option.revision", None, "default"),
                warnings=("careful",),
            )
        )
    )
    assert report == {
        "settings": [
            {"name": "port", "value": 9000, "source": "default"},
            {"name": "fail_fast", "value": True, "source": "default", "note": "a note"},
            {"name": "option.revision", "value": None, "source": "default"},
        ],
        "aliases": [],
        "warnings": ["careful"],
        "gpus": {"memory_bytes": [], "models": [], "idle": 0, "warning": None},
    }


@pytest.mark.parametrize(
    "name", [*("option.hf_token", "HF_TOKEN", "option.api_key"), *("option.some_password", "option.secret_key")]
)
def test_a_credential_is_hidden_by_its_name(name: str) -> None:
    report = settings(SettingEntry(name, "s3cret", "environment"))
    assert "s3cret" not in render_text(report) + as_json(report)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TOKEN, "***"),
        (f'{{"token": "{TOKEN}"}}', '{"token": "***"}'),
        ("http://user:pass@host/x", "http://***@host/x"),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ('{"a": 1, "credentials": {"b": "c"}, "d": "é"}', '{"a": 1, "credentials": "***", "d": "\\u00e9"}'),
        ('["--api-key", "k1", "k2", "--port", "8000"]', '["--api-key", "***", "***", "--port", "8000"]'),
        ("--api-key k1 k2 --port 8000", "--api-key *** --port 8000"),
    ],
)
def test_a_credential_is_hidden_by_its_look_and_what_is_beside_it_stays(text: str, expected: str) -> None:
    assert masked("option.other", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "https://user:p@s3cret@host/x",
        "redis://:a/s3cret@host:1/x",
        "s3://AKIAABCDEFGHIJKLMNOP:a/s3cret@bucket/adapter",
        "https://host/x?a=b&X-Amz-Signature=s3cret&c=d",
        "https://host/x?sig=s3cret",
        '{"connector": {"password": "a, \\"b s3cret"}}',
        '"{\\"api_key\\": \\"s3cret\\"}"',
        "{'secret': 's3cret'}",
        '{"aws_session_token": ["s3cret", "s3cret"]}',
        '{"headers": {"Authorization": "Bearer s3cret"}}',
        "Authorization: Basic s3cret",
        "--port 8000 --api-key s3cret",
        '["--served-api-key", "s3cret"]',
        "password=s3cret",
        "ghp_aaaaaaaaaaaaaaaaaaaas3cret",
        '{"auth": {"credentials": {"user": "u", "pw": "s3cret"}}}',
        '{"token": {"value": "s3cret"}}',
        '{"api_keys": [["a", "s3cret"], "s3cret"]}',
        '{"token": "s3cret", "token": null}',
        "credentials={'user': 'u', 'pw': 's3cret'}",
        "--port 8000 --api-key k1 s3cret --seed 1",
        '["--api-key", "k1", "s3cret"]',
        "['--api-key', 'k1', 's3cret']",
        '{"my_token": "s3cret"}',
        "SERVICE_TOKEN=s3cret",
        "password: 's3''s3cret'",
    ],
)
def test_a_credential_is_hidden_within_a_value(text: str) -> None:
    report = settings(SettingEntry("option.other", text, "environment"))
    assert "s3cret" not in render_text(report) + as_json(report)


@pytest.mark.parametrize(
    "text",
    [
        '{"num_speculative_tokens": 5, "eos_token_id": 2, "image_token": "<image>"}',
        '{"token": null, "password": "", "credentials": {}, "api_keys": []}',
        "a=http://h1:80/x,b=s3://bucket/adapter@2",
        '["--port", "8000", "--image-token", "<image>"]',
        '{"tokenizer": "a", "design": "b"}',
        '{"hf_overrides_text": 1}',
        *("org/name", "s3://bucket/adapter@2"),
        "--max-num-batched-tokens 4096",
        "https://host:8080/path",
    ],
)
def test_a_value_without_a_credential_is_shown(text: str) -> None:
    assert masked("option.other", text) == text


def test_counts_of_tokens_and_an_empty_credential_are_shown() -> None:
    for name in ("option.max_num_batched_tokens", "option.max_rolling_batch_prefill_tokens"):
        assert masked(name, "4096") == "4096"
    assert masked("HF_TOKEN", "") == ""


def test_json_that_is_nested_too_deeply_to_be_read_is_text() -> None:
    assert masked("option.other", "[" * 100_000 + ' {"password": "s3cret"}').endswith('{"password": "***"}')


def test_a_long_value_is_cut_short_in_a_message() -> None:
    assert quoted("x", "a" * 300) == '"' + "a" * 200 + '..."'


@given(st.text(), st.text())
def test_no_value_breaks_the_table(name: str, value: str) -> None:
    lines = render_text(settings(SettingEntry("option.x", value, "default"), warnings=(name,))).splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


@given(st.text())
def test_a_quoted_value_is_one_printable_line(value: str) -> None:
    assert quoted("x", value).isprintable()
