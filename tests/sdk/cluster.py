"""Pretend engines and a router as processes, on free ports. Every wait has an end."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("WARMROUTE", ROOT / "target/debug/warmroute"))

#: For what takes milliseconds on an idle machine.
LIMIT_S = 30


def eventually(what, holds):
    """Waits until `holds()` is true, and returns what it was."""
    limit = time.monotonic() + LIMIT_S
    while True:
        result = holds()
        if result:
            return result
        if time.monotonic() > limit:
            raise AssertionError(f"not within {LIMIT_S} s: {what}")
        time.sleep(0.02)


def get(url, data=None):
    """Status and text of an answer, whatever the status."""
    try:
        with urllib.request.urlopen(url, data=data, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Process:
    """A `warmroute` of its own, and what it wrote."""

    def __init__(self, directory, name, *arguments):
        self.output = pathlib.Path(directory) / f"{name}.log"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [BINARY, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def await_line(self, find):
        """The first thing that `find` makes of a line."""

        def look():
            lines = self.output.read_text().split("\n")[:-1]
            found = next(filter(None, map(find, lines)), None)
            if found is None and self.process.poll() is not None:
                raise AssertionError(f"{self.output.name}: exit {self.process.returncode}: {lines}")
            return found

        try:
            return eventually(f"{self.output.name} says where it listens", look)
        except BaseException:
            self.kill()
            raise

    def kill(self):
        self.process.kill()
        self.process.wait(LIMIT_S)

    def stop(self):
        """Asks it to end as a service manager does, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class Engine(Process):
    def __init__(self, directory, name, *arguments):
        super().__init__(directory, name, "sim", *arguments)
        prefix = "listening on "
        self.url = self.await_line(lambda line: line[len(prefix):] if line.startswith(prefix) else None)


class Router(Process):
    def __init__(self, directory, workers, config):
        config = {
            "api": {"listen": "127.0.0.1:0", "drain_timeout_ms": 2000, **config.get("api", {})},
            "admin": {"listen": "127.0.0.1:0"},
            "fleet": {"workers": [{"url": url} for url in workers], "health": {"interval_ms": 100}},
            "log": {"format": "json"},
        }
        path = pathlib.Path(directory) / "config.yaml"
        # JSON is YAML.
        path.write_text(json.dumps(config))
        super().__init__(directory, "router", "serve", "--config", path)
        fields = self.await_line(self.listening)
        self.url = f"http://{fields['api']}"
        self.admin_url = f"http://{fields['admin']}"

    @staticmethod
    def listening(line):
        # What is wrong with a configuration comes as plain lines.
        fields = json.loads(line).get("fields", {}) if line.startswith("{") else {}
        return fields if fields.get("message") == "listening" else None


class Cluster:
    """Engines and a router that has seen all of them. A context manager."""

    def __init__(self, engines=2, engine_arguments=("--decode-ms", "2"), config=None):
        self.directory = tempfile.TemporaryDirectory(prefix="warmroute-sdk-")
        self.processes = []
        try:
            self.engines = []
            for number in range(engines):
                self.engines.append(self.keep(Engine(self.directory.name, f"engine{number}", *engine_arguments)))
            workers = [engine.url for engine in self.engines]
            self.router = self.keep(Router(self.directory.name, workers, config or {}))
            eventually("all engines are up", lambda: self.workers_up() == engines)
        except BaseException:
            self.close()
            raise

    def keep(self, process):
        self.processes.append(process)
        return process

    @property
    def base_url(self):
        return f"{self.router.url}/v1"

    def is_ready(self):
        return get(f"{self.router.admin_url}/readyz")[0] == 200

    def workers_up(self):
        return int(sum(value for _, value in self.metric("warmroute_worker_up")))

    def metric(self, name):
        """The samples of a metric, as (labels, value)."""
        _, page = get(f"{self.router.admin_url}/metrics")
        samples = (line.rpartition(" ") for line in page.splitlines())
        return [(labels, float(value)) for labels, _, value in samples if labels.partition("{")[0] == name]

    def close(self):
        for process in self.processes:
            process.kill()
        self.directory.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
