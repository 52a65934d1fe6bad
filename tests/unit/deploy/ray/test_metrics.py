"""The metrics of several replicas in one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from deploy.ray.replica_application import merged_metrics

ONE = """# HELP slipway_requests_total HTTP requests served.
# TYPE slipway_requests_total counter
slipway_requests_total{route="/a",status="200"} 1.0
# HELP slipway_ready 1 when the model can serve.
# TYPE slipway_ready gauge
slipway_ready 1.0
# HELP nv_inference_count Prompts.
# TYPE nv_inference_count counter
nv_inference_count 3.0
# HELP slipway_request_seconds Duration of HTTP requests.
# TYPE slipway_request_seconds histogram
slipway_request_seconds_bucket{le="+Inf"} 2.0
slipway_request_seconds_count 2.0
slipway_request_seconds_sum 0.5
"""


def test_each_series_has_its_replica_and_each_metric_one_head() -> None:
    text = merged_metrics({"a": ONE, "b": ONE.replace("ready 1.0", "ready 0.0")}).decode()
    assert text.splitlines()[:4] == [
        "# HELP slipway_requests_total HTTP requests served.",
        "# TYPE slipway_requests_total counter",
        'slipway_requests_total{replica="a",route="/a",status="200"} 1.0',
        'slipway_requests_total{replica="b",route="/a",status="200"} 1.0',
    ]
    ready = next(m for m in text_string_to_metric_families(text) if m.name == "slipway_ready")
    assert [(sample.labels, sample.value) for sample in ready.samples] == [({"replica": "a"}, 1), ({"replica": "b"}, 0)]
    assert text.count("# TYPE ") == 4
    counter = "# TYPE nv_inference_count counter"
    assert f'\n{counter}\nnv_inference_count{{replica="a"}} 3.0\nnv_inference_count{{replica="b"}} 3.0\n#' in text
    assert text.endswith("""
# TYPE slipway_request_seconds histogram
slipway_request_seconds_bucket{replica="a",le="+Inf"} 2.0
slipway_request_seconds_count{replica="a"} 2.0
slipway_request_seconds_sum{replica="a"} 0.5
slipway_request_seconds_bucket{replica="b",le="+Inf"} 2.0
slipway_request_seconds_count{replica="b"} 2.0
slipway_request_seconds_sum{replica="b"} 0.5
""")


def test_a_metric_that_one_replica_alone_has_and_values_with_any_characters_stay() -> None:
    other = '# HELP m One\\nline.\n# TYPE m gauge\nm{name="a{b} \u2028 c"} 1.0\n'
    text = merged_metrics({"a": ONE, "b": other}).decode()
    assert text.endswith('# HELP m One\\nline.\n# TYPE m gauge\nm{replica="b",name="a{b} \u2028 c"} 1.0\n')
