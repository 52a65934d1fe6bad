"""The metrics of a model on vLLM count every request. Their names, types, labels and buckets are vLLM's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.live.server import Server, copy_model, hosted, serving, write_model
from tests.live.small_model import ENDLESS_STREAM
from tests.monitoring import expressions, grouped, labels, selections
from tests.waiting import wait_until

HANDLERS = Path(__file__).parents[1] / "fixtures" / "handlers"
OLD_NAMES = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"}
PROMPT = "Once upon a time"
OPTIONS = {"enable_lora": True, "kv_cache_metrics": True, "custom_histogram_buckets": '{"request_params_n": [1, 3]}'}


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("metrics"), **OPTIONS, **small_options) as server:
        assert server.invoke(PROMPT, max_new_tokens=2).status_code == 200
        yield server


def families(text: str, start: str = "") -> dict[str, Metric]:
    """Return the metrics whose names start with this text, by name."""
    return {metric.name: metric for metric in text_string_to_metric_families(text) if metric.name.startswith(start)}


class Counts:
    """The sums of samples, by names and labels."""

    def __init__(self, server: Server) -> None:
        found = families(server.client.get("/metrics").text).values()
        self._samples = [sample for metric in found for sample in metric.samples]

    def sum(self, name: str, labels: Mapping[str, str]) -> float:
        chosen = [s for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        assert chosen, f"no series {name}{labels}"
        return sum(sample.value for sample in chosen)


def test_the_options_of_metrics_have_their_effect(lora: Server) -> None:
    """test_vllm_metrics_internals.py compares all series with the metrics of vLLM."""
    text = lora.client.get("/metrics").text
    ours = families(text, "vllm:")
    assert ours.keys() > OLD_NAMES
    assert "vllm:kv_block_lifetime_seconds" in ours
    assert "vllm:lora_requests_info" in ours
    assert 'vllm:request_params_n_bucket{engine="0",le="3.0",model_name="model"}' in text
    (cache,) = ours["vllm:cache_config_info"].samples
    assert cache.value == 1
    assert min(int(cache.labels["num_gpu_blocks"]), int(cache.labels["block_size"])) > 0


def test_every_series_has_a_type_and_those_of_other_servers_keep_their_names(lora: Server) -> None:
    text = lora.client.get("/metrics").text
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert {*types.values()} == {"counter", "gauge", "histogram"}
    for line in text.splitlines():
        if not line.startswith("#"):
            name = re.split(r"[{ ]", line)[0]
            assert name in types or types[re.sub("_(bucket|sum|count)$", "", name)] == "histogram"
    for name in ("nv_inference_count", "nv_inference_request_success", "tgi_request_count", "tgi_request_success"):
        assert types[name] == "counter"
        assert re.search(rf"^{name}[{{ ]", text, re.MULTILINE)


CHAT = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
COMPLETION = {"model": "model", "prompt": PROMPT, "max_tokens": 3}
GENERATE = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
TRITON = {"text_input": PROMPT, "max_tokens": 3}
STREAM = {"stream": True}
CALLS: list[tuple[str, dict[str, Any]]] = [
    *((path, GENERATE) for path in ("/invocations", "/predictions/model", "/models/model/invoke", "/generate", "/")),
    *(("/invocations", body | STREAM) for body in (GENERATE, CHAT, COMPLETION)),
    *((path, CHAT) for path in ("/invocations", "/openai/v1/chat/completions", "/v1/messages")),
    ("/generate_stream", GENERATE),
    *((path, body) for body in (CHAT, CHAT | STREAM) for path in ("/v1/chat/completions", "/v1/messages")),
    *(("/v1/completions", COMPLETION | more) for more in ({}, STREAM, {"echo": True}, {"echo": True} | STREAM)),
    *(("/v1/responses", {"model": "model", "input": "Hi", "max_output_tokens": 3} | more) for more in ({}, STREAM)),
    ("/v2/models/model/generate", TRITON),
    ("/v2/models/model/generate_stream", TRITON | STREAM),
    *((path, {"prompt": PROMPT, "max_tokens": 3}) for path in ("/v1/generate", "/v1/generate_stream")),
]
OF_CALLS = (
    # The parser appends `_total` to the names of Triton's and TGI's counters.
    *("tgi_request_count_total", "tgi_request_success_total", "nv_inference_request_success_total"),
    *("tgi_request_duration_count", "slipway_requests_total"),
)
SAME_COUNTS = (
    ("slipway_generated_tokens_total", "vllm:generation_tokens_total"),
    ("slipway_inter_token_seconds_count", "vllm:inter_token_latency_seconds_count"),
    ("slipway_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
    ("slipway_queue_seconds_count", "vllm:request_queue_time_seconds_count"),
    ("slipway_generations_finished_total", "vllm:request_success_total"),
    ("tgi_request_generated_tokens_count", "vllm:request_generation_tokens_count"),
    ("tgi_request_generated_tokens_sum", "vllm:request_generation_tokens_sum"),
    ("tgi_request_inference_duration_count", "vllm:request_inference_time_seconds_count"),
)


def test_every_call_counts_once_whole_and_streamed_in_the_series_of_all_servers(lora: Server) -> None:
    def counted() -> set[float]:
        counts = Counts(lora)
        return {counts.sum(name, {}) - before.sum(name, {}) for name in OF_CALLS}

    def added() -> dict[str, float]:
        counts = Counts(lora)
        return {name: counts.sum(name, {}) - before.sum(name, {}) for pair in SAME_COUNTS for name in pair}

    before = Counts(lora)
    for number, (path, body) in enumerate(CALLS, start=1):
        assert lora.client.post(path, json=body).status_code == 200, (path, body)
        wait_until(lambda number=number: counted() == {number})
    failed = [counts.sum("tgi_request_failure_total", {}) for counts in (before, Counts(lora))]
    assert failed[0] == failed[1]
    wait_until(lambda: all(added()[own] == added()[vllms] > 0 for own, vllms in SAME_COUNTS), about=added)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/invocations", CHAT), ("/v1/chat/completions", CHAT | STREAM), ("/v1/completions", COMPLETION | {"echo": True})],
)
def test_completions_and_chats_report_the_load_to_routers(lora: Server, path: str, body: dict[str, Any]) -> None:
    number = r"([0-9.e-]+)"
    forms = {
        "JSON": rf'JSON {{"named_metrics": {{"num_requests_waiting": {number}, "kv_cache_usage_perc": {number}}}}}',
        "TEXT": rf"TEXT named_metrics.num_requests_waiting={number}, named_metrics.kv_cache_usage_perc={number}",
    }
    with lora.client.stream("POST", "/v1/completions", json=ENDLESS_STREAM) as running:
        assert running.status_code == 200
        lora.wait_for_metric("slipway_engine_running", ENDLESS_STREAM["n"])
        for name, form in forms.items():
            reply = lora.client.post(path, json=body, headers={"endpoint-load-metrics-format": name})
            found = re.fullmatch(form, reply.headers["endpoint-load-metrics"])
            assert found
            assert float(found[2]) > 0
    assert "endpoint-load-metrics" not in lora.client.post(path, json=body).headers


SAMPLED = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "temperature": 1.0}


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "ignore_eos_token": True}}, 1),
        ("/v1/completions", SAMPLED | {"n": 3}, 3),
        ("/v1/completions", SAMPLED | {"n": 2, "add_special_tokens": True}, 2),  # vLLM's serving classes answer.
    ],
    ids=["slipway", "slipway, several", "vllm, several"],
)
def test_a_request_counts_as_on_vllms_server(lora: Server, path: str, body: dict[str, Any], sequences: int) -> None:
    prompt = len(lora.client.post("/tokenize", json={"model": "model", "prompt": PROMPT}).json()["tokens"])
    expected = {
        ("vllm:request_success_total", "length"): sequences,
        ("vllm:request_success_total", "stop"): 0,
        ("vllm:prompt_tokens_total", ""): prompt * sequences,
        ("vllm:generation_tokens_total", ""): 5 * sequences,
        ("vllm:iteration_tokens_total_sum", ""): (prompt + 5) * sequences,
        ("vllm:time_to_first_token_seconds_count", ""): sequences,
        ("vllm:inter_token_latency_seconds_count", ""): 4 * sequences,
        ("vllm:request_params_n_count", ""): 1,
        ("vllm:request_params_n_sum", ""): sequences,
        ("vllm:request_max_num_generation_tokens_sum", ""): 5,
        ("vllm:e2e_request_latency_seconds_count", ""): sequences,
        ("vllm:request_queue_time_seconds_count", ""): sequences,
        ("vllm:request_prompt_tokens_sum", ""): prompt * sequences,
        ("vllm:request_generation_tokens_sum", ""): 5 * sequences,
        ("vllm:request_params_max_tokens_sum", ""): 5 * sequences,
        ("vllm:prefix_cache_queries_total", ""): prompt * sequences,
        ("vllm:num_preemptions_total", ""): 0,
    }

    def counted() -> dict[tuple[str, str], float]:
        counts = Counts(lora)
        return {
            (name, reason): counts.sum(name, {"finished_reason": reason} if reason else {}) for name, reason in expected
        }

    before = counted()
    assert lora.client.post(path, json=body).status_code == 200

    def added() -> dict[tuple[str, str], float]:
        return {key: value - before[key] for key, value in counted().items()}

    wait_until(lambda: added() == expected, about=added)


_OF_THE_SCRAPE = {"instance"}
"""Labels that Prometheus adds."""


@pytest.mark.parametrize("host", ["host"], indirect=True)
def test_dashboard_and_alerts_name_metrics_and_labels_that_a_server_has(
    lora: Server, host: Server, tmp_path: Path
) -> None:
    custom = copy_model(HANDLERS / "script", tmp_path / "monitored" / "model")
    with hosted(host, custom):
        texts = lora.client.get("/metrics").text, host.client.get("/metrics").text
    samples: dict[str, set[str]] = {}
    for text in texts:
        for metric in text_string_to_metric_families(text):
            # The parser appends `_total` to counters without it. Neither file names such a counter.
            for sample in metric.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
    for expression in expressions():
        found = selections(expression)
        assert found, expression
        for name, chosen in found:
            assert name in samples, expression
            assert labels(chosen) <= samples[name] | _OF_THE_SCRAPE, expression
            assert grouped(expression) <= samples[name] | _OF_THE_SCRAPE, expression


@pytest.mark.slow
@pytest.mark.parametrize("host", ["host"], indirect=True)
def test_models_side_by_side_share_no_series_and_take_theirs_along(
    host: Server, tmp_path: Path, small_options: dict[str, object]
) -> None:
    with ExitStack() as models:
        names = ["metrics-1", "metrics-2"]
        for name in names:
            model = models.enter_context(hosted(host, write_model(tmp_path / name / "model", **small_options)))
            assert model.invoke(PROMPT, max_new_tokens=2).status_code == 200
        found = families(host.client.get("/metrics").text)
        for metric in found.values():
            series = [(sample.name, *sorted(sample.labels.items())) for sample in metric.samples]
            assert len(series) == len(set(series))
        running = {s.labels["model_name"] for s in found["vllm:num_requests_running"].samples}
        caches = {s.labels["model"] for s in found["vllm:cache_config_info"].samples}
        assert running >= set(names) <= caches
    assert not re.search("metrics-[12]", host.client.get("/metrics").text)
