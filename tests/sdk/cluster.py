"""Pretend engines and a router as processes, on free ports. Every wait has an end."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from patience import LIMIT_S

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
BINARY = pathlib.Path(os.environ.get("WARMROUTE", TARGET / "debug/warmroute"))


def eventually(what, holds):
    """Waits until `holds()` is true, and returns what it was."""
    limit = time.monotonic() + LIMIT_S
    while True:
        result = holds()
        if result:
            return result
        if time.monotonic() > limit:
            raise AssertionError(f"never: {what}")
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
        super().__init__(directory, name, "sim", "--enable-scale-out", *arguments)
        prefix = "listening on "
        self.url = self.await_line(lambda line: line[len(prefix):] if line.startswith(prefix) else None)


class Redis:
    """A `redis-server` of its own, on a socket of its own port, that keeps nothing on disk."""

    def __init__(self, directory):
        self.directory = directory
        for _ in range(5):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            # Another process may take the port before the server does.
            if self.starts():
                return
        raise AssertionError("redis-server does not start")

    def start(self):
        if not self.starts():
            raise AssertionError(f"redis-server: exit {self.process.returncode}")

    def starts(self):
        """Whether it answers, and has not ended."""
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self.directory, "save": "", "appendonly": "no"}
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            ["redis-server", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        eventually("redis-server answers", lambda: self.process.poll() is not None or self.answers())
        return self.process.poll() is None

    def answers(self):
        """Whether it is this server that answers, and no other on its port."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), LIMIT_S) as connection:
                connection.sendall(b"INFO server\r\n")
                return f"\r\nprocess_id:{self.process.pid}\r\n".encode() in connection.recv(1 << 16)
        except OSError:
            return False

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def kill(self):
        self.process.kill()
        self.process.wait(LIMIT_S)


class Router(Process):
    def __init__(self, directory, workers, config, name="router"):
        config = {
            "api": {"listen": "127.0.0.1:0", "drain_timeout": "2s", **config.get("api", {})},
            "admin": {"listen": "127.0.0.1:0"},
            "workers": workers,
            "fleet": {"health": {"interval": "100ms"}},
            "log": {"format": "json"},
            **{key: value for key, value in config.items() if key != "api"},
        }
        path = pathlib.Path(directory) / f"{name}.yaml"
        # JSON is YAML.
        path.write_text(json.dumps(config))
        super().__init__(directory, name, "serve", "--config", path)
        fields = self.await_line(self.listening)
        self.url = f"http://{fields['api']}"
        self.admin_url = f"http://{fields['admin']}"

    @staticmethod
    def listening(line):
        # What is wrong with a configuration comes as plain lines.
        fields = json.loads(line) if line.startswith("{") else {}
        return fields if fields.get("message") == "listening" else None


#: The key of all that a cluster's routers sign.
STATE_TOKEN_KEY = "0123456789abcdeffedcba987654321000112233445566778899aabbccddeeff"


#: Of engines that answer at once.
ENGINE_ARGUMENTS = ("--decode-time", "2ms")


class Cluster:
    """Engines, and a router that has seen all of them; or several, over a Redis. A context manager."""

    def __init__(
        self, engines=2, engine_arguments=ENGINE_ARGUMENTS, config=None, replicas=1, store=None, redis=False
    ):
        self.directory = tempfile.TemporaryDirectory(prefix="warmroute-sdk-")
        self.processes = []
        config = dict(config or {})
        try:
            if redis or replicas > 1:
                self.redis = self.keep(Redis(self.directory.name))
                # Beside other tests a reply may take longer than the 250 ms that a read has by default. A killed Redis is
                # noticed at once all the same.
                redis = {"urls": [self.redis.url], "advanced": {"read_timeout": "10s", "write_timeout": "10s"}}
                config["responses"] = {
                    "store": {"redis": redis, **(store or {})},
                    "state_token": {"keys": [STATE_TOKEN_KEY]},
                    **config.get("responses", {}),
                }
            self.engines = []
            for number in range(engines):
                self.engines.append(self.keep(Engine(self.directory.name, f"engine{number}", *engine_arguments)))
            workers = [engine.url for engine in self.engines]
            self.routers = []
            for number in range(replicas):
                name = f"router{number}"
                self.routers.append(self.keep(Router(self.directory.name, workers, config, name)))
            self.router = self.routers[0]
            for router in self.routers:
                eventually("all engines are up", lambda: self.workers_up(router) == engines)
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

    def workers_up(self, router=None):
        return int(sum(value for _, value in self.metric("warmroute_worker_up", router)))

    def metric(self, name, router=None):
        """The samples of a metric of a router, the first if none is named, as (labels, value)."""
        _, page = get(f"{(router or self.router).admin_url}/metrics")
        samples = (line.rpartition(" ") for line in page.splitlines())
        return [(labels, float(value)) for labels, _, value in samples if labels.partition("{")[0] == name]

    def seen(self, what):
        """What all engines together have seen: finished, aborted, refused or running requests for model work."""
        return sum(json.loads(get(f"{engine.url}/sim/requests")[1])[what] for engine in self.engines)

    def close(self):
        for process in self.processes:
            process.kill()
        self.directory.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
