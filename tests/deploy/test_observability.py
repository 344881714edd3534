"""Dashboards and alerts name metrics and labels that exist; the rules do what they say."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import unittest

import yaml

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "deploy/observability"
RULES = sorted(path for path in (FOLDER / "prometheus").glob("*.yaml") if not path.name.endswith(".test.yaml"))
PROMTOOL = os.environ.get("WARMROUTE_PROMTOOL") or shutil.which("promtool")
# Labels that scraping and queries add.
OTHERS = {"instance", "job", "le"}
RECORDED = re.compile(r"\b\w+:[\w:]+\b")
NAMED = re.compile(r"(?<![\w:])((?:warmroute|process)_\w+)(?:\{([^}]*)\})?")


def reference():
    """Metric -> its labels, with the series of histograms."""
    found = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            name, kind, labels = cells[0].strip("`"), cells[1], set(re.findall(r"`(\w+)`", cells[2]))
            found[name] = labels
            if kind == "histogram":
                found.update({f"{name}_{series}": labels for series in ("bucket", "count", "sum")})
    return found


def problems(expression, known):
    """Metrics and labels of a query that do not exist."""
    expression = re.sub(r'"[^"]*"', '""', expression)
    wrong, labels = [], set(OTHERS)
    for name, matchers in NAMED.findall(RECORDED.sub("", expression)):
        if name not in known:
            wrong.append(name)
            continue
        labels |= known[name]
        wrong += [f"{name}{{{label}}}" for label in re.findall(r"(\w+)\s*[=!]", matchers) if label not in known[name] | OTHERS]
    for name in RECORDED.findall(expression):
        if name not in known:
            wrong.append(name)
        labels |= known.get(name, set())
    for group in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression):
        wrong += [f"by ({label})" for label in re.findall(r"\w+", group) if label not in labels]
    return wrong


def rules():
    groups = (group for path in RULES for group in yaml.safe_load(path.read_text())["groups"])
    return [rule for group in groups for rule in group["rules"]]


def recorded():
    """Recorded series -> the labels that they are grouped by."""
    return {rule["record"]: set(re.findall(r"\w+", rule["record"].split(":")[0])) for rule in rules() if "record" in rule}


def dashboards():
    spec = importlib.util.spec_from_file_location("dashboards", FOLDER / "dashboards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.files()


class Observability(unittest.TestCase):
    def test_every_query_names_metrics_and_labels_that_exist(self):
        known = {**reference(), **recorded()}
        self.assertGreater(len(known), 150)
        queries = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
        for path in (FOLDER / "dashboards").glob("*.json"):
            dashboard = json.loads(path.read_text())
            for panel in dashboard["panels"]:
                queries += [(f"{path.name}: {panel['title']}", target["expr"]) for target in panel.get("targets", ())]
            for variable in dashboard["templating"]["list"][1:]:
                queries.append((f"{path.name}: ${variable['name']}", variable["query"]["query"].split("(", 1)[1].split(",")[0]))
        self.assertGreater(len(queries), 90)
        wrong = {where: found for where, query in queries if (found := problems(query, known))}
        self.assertEqual(wrong, {})

    def test_a_metric_or_label_that_does_not_exist_is_seen(self):
        known = {"warmroute_worker_up": {"worker"}, "worker:up:sum": {"worker"}}
        for query, expected in [
            ("sum by (worker) (warmroute_worker_up)", []),
            ('sum by (model) (warmroute_worker_up{rank="0"})', ["warmroute_worker_up{rank}", "by (model)"]),
            ("warmroute_worker_gone == 0", ["warmroute_worker_gone"]),
            ('worker:up:sum{worker="a:b:c"} and on (instance) worker:down:sum', ["worker:down:sum"]),
        ]:
            self.assertEqual(problems(query, known), expected, query)

    def test_the_dashboards_are_those_that_their_descriptions_give(self):
        written = {path.name: path.read_text() for path in (FOLDER / "dashboards").glob("*.json")}
        self.assertEqual(written, dashboards(), "run deploy/observability/dashboards.py")

    def test_every_alert_has_its_runbook(self):
        sections = re.findall(r"^## (\w+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
        alerts = [rule for rule in rules() if "alert" in rule]
        self.assertEqual([rule["alert"] for rule in alerts], sections)
        for rule in alerts:
            self.assertTrue(rule["annotations"]["runbook_url"].endswith(f"docs/troubleshooting.md#{rule['alert'].lower()}"))
            self.assertIn(rule["labels"]["severity"], ("critical", "warning", "info"))

    @unittest.skipUnless(PROMTOOL, "promtool is not installed")
    def test_promtool_accepts_the_rules_and_their_tests(self):
        for command in (["check", "rules", *RULES], ["test", "rules", FOLDER / "prometheus/alerts.test.yaml"]):
            run = subprocess.run([PROMTOOL, *command], capture_output=True, text=True)
            self.assertEqual(run.returncode, 0, run.stdout + run.stderr)


if __name__ == "__main__":
    unittest.main()
