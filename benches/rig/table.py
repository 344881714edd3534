"""Reads compare.sh's lines; prints medians over the rounds, with the least and the greatest."""

import json
import sys
from statistics import median

rows = {}
for line in sys.stdin:
    path, mode, name, figures = line.split(" ", 3)
    rows.setdefault((path, mode, name), []).append(json.loads(figures))

print(f"{'path':24} {'mode':7} {'router':14} {'CPU us a request':>22} {'requests/s':>11} {'p50 us':>8} {'p99 us':>8} {'MB':>5} failed")
for (path, mode, name), rounds in rows.items():
    cpu = [figures["cpu_us_per_req"] or 0 for figures in rounds]
    spread = f"{median(cpu):.1f} ({min(cpu):.1f}-{max(cpu):.1f})"
    middle = lambda pick: median(pick(figures) for figures in rounds)
    print(
        f"{path:24} {mode:7} {name:14} {spread:>22} {middle(lambda f: f['rps']):11.0f}"
        f" {middle(lambda f: f['total_us']['p50']):8.0f} {middle(lambda f: f['total_us']['p99']):8.0f}"
        f" {max(f['peak_rss_mb'] or 0 for f in rounds):5.0f} {sum(f['bad'] for f in rounds)}"
    )
