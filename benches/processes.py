"""What the benches start: engines, a store and a router, as processes."""

import json
import os
import pathlib
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARMROUTE = os.environ.get("WARMROUTE", str(ROOT / "target/dist/warmroute"))
KEY = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
#: Flags of a simulated engine that long prompts and many requests cost next to no time.
LARGE_ENGINE = ["--prefill-tokens-per-second", "100000000", "--context-tokens-max", "1000000", "--cache-blocks", "2000000", "--running-max", "1000"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spread(values, digits=None):
    median = statistics.median(values)
    return {name: round(value, digits) for name, value in {"median": median, "min": min(values), "max": max(values)}.items()}


class Processes:
    """Processes and a folder with their logs, which end together. A context manager."""

    def __init__(self, name):
        self.directory = tempfile.TemporaryDirectory(prefix=f"warmroute-{name}-")
        self.processes = []

    def start(self, *command, find=None):
        """The process, and the first line of its log that `find` finds."""
        log = pathlib.Path(self.directory.name, f"{len(self.processes)}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        self.processes.append(process)
        if find is None:
            return process, None
        for _ in range(600):
            found = next(filter(find, log.read_text().splitlines()), None)
            if found:
                return process, found
            time.sleep(0.05)
        raise SystemExit(log.read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self.directory.cleanup()


class Rig(Processes):
    """Simulated engines, maybe a Redis, and a router, whose configuration has `config`, too."""

    def __init__(self, name, engine_flags, engines=1, store="memory", responses=None, **config):
        super().__init__(name)
        self.engines = []
        for _ in range(engines):
            _, line = self.start(WARMROUTE, "sim", "--listen", "127.0.0.1:0", *engine_flags, find=lambda line: "listening on " in line)
            self.engines.append(line.split("listening on ")[1].strip())
        responses = dict(responses or {})
        if store == "redis":
            port = free_port()
            self.start("redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1", find=lambda line: "Ready to accept" in line)
            responses |= {"store": {"redis": f"redis://127.0.0.1:{port}"}, "state_token": {"keys": [KEY]}}
        path = pathlib.Path(self.directory.name, "config.yaml")
        path.write_text(json.dumps({
            "api": {"listen": "127.0.0.1:0"},
            "admin": {"listen": "127.0.0.1:0"},
            "workers": self.engines,
            "fleet": {"health": {"interval": "2s"}},
            "responses": responses,
            "log": {"format": "json"},
        } | config))
        self.router, line = self.start(WARMROUTE, "serve", "--config", str(path), find=lambda line: '"listening"' in line)
        fields = json.loads(line)["fields"]
        host, port = fields["api"].rsplit(":", 1)
        self.api = (host, int(port))
        admin = f"http://{fields['admin']}"
        while b'"health":"up"' not in urllib.request.urlopen(admin + "/fleet").read().replace(b" ", b""):
            time.sleep(0.05)

    def cpu(self):
        """Seconds of CPU that the router has used."""
        tasks = pathlib.Path(f"/proc/{self.router.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
