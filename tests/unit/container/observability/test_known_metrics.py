"""The metric series of other servers, for the dashboards of these servers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from container.observability.metrics import known_metrics, labelled
from container.observability.prometheus_text import prometheus_text
from engines.loaded_model import EngineStatus
from engines.statistics import EngineStatistics


def _text(statistics: EngineStatistics, status: EngineStatus) -> str:
    return prometheus_text(known_metrics("model", statistics, status)).decode()


def _statistics() -> EngineStatistics:
    statistics = EngineStatistics()
    statistics.started_requests, statistics.finished_requests = 5, 4
    statistics.prompt_tokens, statistics.tokens = 50, 60
    statistics.time_to_first_token.observe(0.02)
    statistics.inter_token.observe(0.002)
    statistics.queue_time.observe(0.5)
    statistics.prompt_lengths.observe(12)
    statistics.ended(20, 5.0)
    statistics.calls.count(2.0, failed=False)
    statistics.calls.count(1.0, failed=False)
    statistics.calls.count(0.5, failed=True)
    return statistics


def _samples() -> dict[str, tuple[dict[str, str], float]]:
    """Return the samples by name. Each histogram has only its widest bucket."""
    families = known_metrics("model", _statistics(), EngineStatus(3, 2, 0.25))
    return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}


def test_two_versions_of_a_model_share_no_series() -> None:
    families = {
        f"m:{version}": known_metrics("m", _statistics(), EngineStatus(3, 2, 0.25), version) for version in "12"
    }
    series = [(sample.name, *sorted(sample.labels.items())) for one in labelled(families) for sample in one.samples]
    assert len(series) == len(set(series))
    assert ("nv_inference_count", ("model", "m"), ("version", "2")) in series
    assert ("vllm:num_requests_running", ("engine", "0"), ("model_name", "m"), ("version", "2")) in series


def test_vllms_series_have_its_names_and_labels() -> None:
    samples, labels = _samples(), {"model_name": "model", "engine": "0"}
    expected = {
        "vllm:num_requests_running": 3.0,
        "vllm:num_requests_waiting": 2.0,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 50.0,
        "vllm:generation_tokens_total": 60.0,
        "vllm:request_success_total": 4.0,
        "vllm:time_to_first_token_seconds_count": 1.0,
        "vllm:time_to_first_token_seconds_sum": 0.02,
        "vllm:inter_token_latency_seconds_sum": 0.002,
        "vllm:time_per_output_token_seconds_sum": 0.002,
        "vllm:request_queue_time_seconds_sum": 0.5,
    }
    assert {name: samples[name] for name in expected} == {name: (labels, value) for name, value in expected.items()}


def test_tritons_series_have_its_names_and_labels() -> None:
    samples, labels = _samples(), {"model": "model", "version": "1"}
    expected = {
        "nv_inference_request_success": 2.0,
        "nv_inference_request_failure": 1.0,
        "nv_inference_count": 5.0,
        "nv_inference_request_duration_us": 3e6,
        "nv_inference_queue_duration_us": 5e5,
        "nv_inference_pending_request_count": 2.0,
    }
    assert {name: samples[name] for name in expected} == {name: (labels, value) for name, value in expected.items()}


def test_tgis_series_have_its_names() -> None:
    samples = _samples()
    expected = {
        "tgi_request_count": ({}, 3.0),
        "tgi_request_success": ({}, 2.0),
        "tgi_request_failure": ({}, 1.0),
        "tgi_request_duration_count": ({}, 2.0),
        "tgi_request_duration_sum": ({}, 3.0),
        "tgi_request_queue_duration_sum": ({}, 0.5),
        "tgi_request_inference_duration_sum": ({}, 5.0),
        "tgi_request_mean_time_per_token_duration_sum": ({}, 0.25),
        "tgi_request_mean_time_per_token_duration_count": ({}, 1.0),
        "tgi_request_input_length_sum": ({}, 12.0),
        "tgi_request_generated_tokens_sum": ({}, 20.0),
        "tgi_batch_current_size": ({}, 3.0),
        "tgi_queue_size": ({}, 2.0),
    }
    assert {name: samples[name] for name in expected} == expected


def test_no_series_is_untyped_and_counters_without_the_usual_ending_keep_their_names() -> None:
    text = _text(_statistics(), EngineStatus(3, 2, 0.25))
    assert " untyped\n" not in text
    assert '\n# TYPE nv_inference_count counter\nnv_inference_count{model="model",version="1"} 5.0\n' in text
    assert "\n# TYPE tgi_request_success counter\ntgi_request_success 2.0\n" in text


def test_vllms_own_metrics_take_the_place_of_those_that_slipway_makes() -> None:
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    Counter("vllm:generation_tokens", "Tokens.", labels, registry=registry).labels("theirs", "1").inc(7)
    Gauge("vllm:cache_config_info", "Settings.", ["block_size"], registry=registry).labels("16").set(1)
    statistics = _statistics()
    statistics.vllm = registry
    families = {
        name: list(known_metrics("m", statistics, EngineStatus(3, 2, 0.25), version, served_as))
        for name, version, served_as in (("one", None, "theirs"), ("versions", "2", None))
    }
    series = {
        name: {(s.name, *sorted(s.labels.items())) for family in made for s in family.samples}
        for name, made in families.items()
    }
    counter, info = "vllm:generation_tokens_total", ("vllm:cache_config_info", ("block_size", "16"))
    assert {(counter, ("engine", "1"), ("model_name", "theirs")), info} < series["one"]
    assert {(counter, ("engine", "1"), ("model_name", "m"), ("version", "2")), info} < series["versions"]
    assert ("vllm:gpu_cache_usage_perc", ("engine", "0"), ("model_name", "theirs")) in series["one"]
    assert ("nv_inference_count", ("model", "m"), ("version", "1")) in series["one"]
    assert not any(name == "vllm:num_requests_running" for name, *_ in series["one"])
    (beside,) = (family for family in labelled(families) if family.name == "vllm:cache_config_info")
    assert [sample.labels["model"] for sample in beside.samples] == ["one", "versions"]


def test_histograms_count_what_is_not_above_their_bounds() -> None:
    text = _text(_statistics(), EngineStatus(0, 0, 0.0))
    head = 'vllm:time_to_first_token_seconds_bucket{engine="0",le="'
    assert f'{head}0.01",model_name="model"}} 0.0\n' in text
    assert f'{head}0.025",model_name="model"}} 1.0\n' in text
    assert f'{head}+Inf",model_name="model"}} 1.0\n' in text


def test_tgis_histograms_have_buckets() -> None:
    text = _text(_statistics(), EngineStatus(0, 0, 0.0))
    assert 'tgi_request_duration_bucket{le="0.00015"} 0.0\n' in text
    assert 'tgi_request_duration_bucket{le="145.6"} 2.0\n' in text
    assert 'tgi_request_input_length_bucket{le="10.0"} 0.0\n' in text
    assert 'tgi_request_input_length_bucket{le="20.0"} 1.0\n' in text
    assert 'tgi_request_generated_tokens_bucket{le="20.0"} 1.0\n' in text


def test_a_sequence_without_a_token_has_no_time_for_each_token() -> None:
    statistics = EngineStatistics()
    statistics.ended(0, 1.0)
    assert (statistics.lengths.counts[0], sum(statistics.mean_times.counts)) == (1, 0)
