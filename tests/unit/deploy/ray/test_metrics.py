"""The metrics of several replicas in one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from deploy.ray.metrics import merged_metrics

ONE = """# HELP slipway_requests_total HTTP requests served.
# TYPE slipway_requests_total counter
slipway_requests_total{route="/a",status="200"} 1.0
# HELP slipway_ready 1 when the model can serve.
# TYPE slipway_ready gauge
slipway_ready 1.0
# HELP nv_inference_count Prompts.
# TYPE nv_inference_count untyped
nv_inference_count 3.0
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
    assert '\nnv_inference_count{replica="a"} 3.0\n' in text
