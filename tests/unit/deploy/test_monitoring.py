"""The files of the dashboard and the alerts. tests/live/test_metrics_live.py finds their metrics on a server."""

from __future__ import annotations

import re

from tests.monitoring import ALERTS, DASHBOARD, alerts, grouped, panels, selections


def test_the_dashboard_takes_its_data_source_and_servers_from_variables() -> None:
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query", "model": "query"}
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["datasource"] for target in panel["targets"]] == [panel["datasource"]] * len(panel["targets"])
        for target in panel["targets"]:
            assert all('instance=~"$instance"' in text for _, text in selections(target["expr"])), target["expr"]


def test_a_legend_names_all_labels_by_which_its_expression_groups_and_no_others() -> None:
    for panel in panels():
        for target in panel["targets"]:
            if kept := grouped(target["expr"]) - {"le"}:
                assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == kept, panel["title"]


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
