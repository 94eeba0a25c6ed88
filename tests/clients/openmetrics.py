"""Reads a page of metrics from standard input by the parser of prometheus_client, which refuses what the
OpenMetrics standard does not allow, and prints the samples as a JSON list of [name, labels, value]."""

import json
import math
import sys

from prometheus_client.openmetrics.parser import text_string_to_metric_families

samples = [
    [sample.name, sample.labels, sample.value]
    for family in text_string_to_metric_families(sys.stdin.read())
    for sample in family.samples
]
assert all(math.isfinite(value) for _, _, value in samples)
print(json.dumps(samples))
