"""The dashboard and the alerts, as files; tests/live/test_metrics_live.py finds their metrics on a server."""

from __future__ import annotations

import pytest

from tests.monitoring import ALERTS, DASHBOARD, alerts, expressions, panels, selections


def test_the_dashboard_takes_its_data_source_and_servers_from_variables() -> None:
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query", "model": "query"}
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["datasource"] for target in panel["targets"]] == [panel["datasource"]] * len(panel["targets"])
        for target in panel["targets"]:
            assert all('instance=~"$instance"' in text for _, text in selections(target["expr"])), target["expr"]


def test_no_two_panels_have_one_place_or_one_number() -> None:
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in every)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_each_alert_has_a_severity_and_a_summary_with_the_server_that_it_is_about() -> None:
    assert len(ALERTS["groups"]) == 1
    for alert in alerts():
        assert alert["alert"].startswith("Slipway")
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.instance }}" in alert["annotations"]["summary"]
    assert len({alert["alert"] for alert in alerts()}) == len(alerts())


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("slipway_ready == 0", [("slipway_ready", "")]),
        (
            'histogram_quantile(0.99, sum by (instance, le) (rate(a_bucket{status=~"5..", x="b"}[5m]))) > 0.1',
            [("a_bucket", '{status=~"5..", x="b"}')],
        ),
        ("sum(rate(vllm:a_total[$__rate_interval])) / count(b) or vector(0)", [("vllm:a_total", ""), ("b", "")]),
        ("min_over_time(a[5m]) > 0 and deriv(b{}[10m]) == 0", [("a", ""), ("b", "{}")]),
    ],
)
def test_the_metrics_of_an_expression_are_found(expression: str, found: list[tuple[str, str]]) -> None:
    assert selections(expression) == found
    assert expressions()
