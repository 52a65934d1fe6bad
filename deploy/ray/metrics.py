"""Merges the metrics of all replicas into one text."""

from __future__ import annotations

from collections.abc import Mapping


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Merge the metrics of replicas. Each series gets the label `replica`.

    The texts are not parsed, because prometheus_client's parser renames counters without `_total`, such as Triton's.

    Args:
        texts: The text of each replica's /metrics, by the name of the replica.

    Returns:
        The merged text, in Prometheus format.
    """
    metrics: dict[str, dict[str, list[str]]] = {}  # Lines by the name of the metric, then by the kind of the line.
    for replica, text in texts.items():
        lines: dict[str, list[str]] = {}
        for line in filter(None, text.split("\n")):
            if line.startswith("#"):
                _, kind, name = line.split(" ", 3)[:3]
                lines = metrics.setdefault(name, {"HELP": [], "TYPE": [], "": []})
                lines[kind] = [line]
            else:
                lines[""].append(_of_replica(line, replica))
    return "".join(f"{line}\n" for kinds in metrics.values() for lines in kinds.values() for line in lines).encode()


def _of_replica(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
