#!/usr/bin/env python3
"""What an endpoint picker behind a real Envoy costs and chooses, beside the proxy. Both are one process.

    benches/endpoint_picker.py cpu            CPU a request of 2 KB and of a stream: proxy, picker, and Envoy itself, in turns
    benches/endpoint_picker.py instructions   instructions a request of 2 KB: proxy and picker, by valgrind (no noise)
    benches/endpoint_picker.py long           CPU of the next turn of a known conversation of 100,000 tokens: proxy and picker
    benches/endpoint_picker.py routing TRACE  `player` through the proxy, and through Envoy and the picker, each with a cold
                                              fleet: mean TTFT and the cached share of prompts

Run it with a Python that has tests/envoy/requirements.txt. Environment: WARMROUTE (target/dist/warmroute), RIG
(benches/rig/target/release), ROUNDS (3), SECS (5 a round), REQUESTS (200 instructions, 200 long, 3000 routing),
SPEEDUP (2, of `routing`). One line of JSON for each round, then the medians with the least and the greatest.
"""

import http.client
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/sdk"), str(ROOT / "tests/envoy")]

import cluster  # noqa: E402
from cluster import Router, eventually, get  # noqa: E402
from gateway import Envoy, free_port  # noqa: E402

WARMROUTE = pathlib.Path(os.environ.get("WARMROUTE", ROOT / "target/dist/warmroute"))
RIG = pathlib.Path(os.environ.get("RIG", ROOT / "benches/rig/target/release"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
SECS = os.environ.get("SECS", "5")
CHAT = "/v1/chat/completions"
CONFIG = {"log": {"format": "json", "access": False}, "fleet": {"health": {"interval": "2s"}}, "responses": {"mode": "pass_through"}}


class Rig:
    """Engines, a router that is proxy and picker at once, and Envoy. A context manager."""

    def __init__(self, fleet, *arguments, workers=4, under=(), config=None):
        self.directory = tempfile.TemporaryDirectory(prefix="warmroute-picker-")
        self.processes = []
        self.port = port = free_port()
        self.fleet = subprocess.Popen(
            [RIG / fleet, "--port", str(port), "--workers", str(workers), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.workers = [("127.0.0.1", port + number) for number in range(workers)]
        urls = [f"http://127.0.0.1:{port}" for _, port in self.workers]
        self.model = json.loads(eventually("the fleet answers", lambda: self.answer(urls[0] + "/v1/models")))["data"][0]["id"]
        cluster.BINARY = WARMROUTE if not under else self.wrapper(under)
        address = f"127.0.0.1:{free_port()}"
        self.router = Router(self.directory.name, urls, {**CONFIG, "endpoint_picker": {"listen": address}, **(config or {})})
        up = lambda: sum(it["health"] == "up" for it in json.loads(get(f"{self.router.admin_url}/fleet")[1])["workers"])
        eventually("all workers are up", lambda: up() == workers)
        self.envoy = Envoy(self.directory.name, address, self.workers)
        self.processes += [self.router, self.envoy]

    @staticmethod
    def answer(url):
        try:
            return get(url)[1]
        except OSError:
            return None

    def wrapper(self, under):
        path = pathlib.Path(self.directory.name, "wrapped")
        path.write_text("#!/bin/sh\nexec " + " ".join(map(str, under)) + f' {WARMROUTE} "$@"\n')
        path.chmod(0o755)
        return path

    def targets(self):
        return {"proxy": self.router.url, "picker": self.envoy.url}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        self.fleet.send_signal(signal.SIGKILL)
        self.fleet.wait()
        self.directory.cleanup()


def address(url):
    return url.removeprefix("http://")


def blast(rig, url, pid, *more):
    command = [RIG / "blast", "--addr", address(url), "--path", CHAT, "--conns", "16", "--secs", SECS, "--prompt", "2000"]
    run = subprocess.run([*command, "--model", rig.model, "--pid", str(pid), *more], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.strip().splitlines()[-1]) if run.stdout.strip().startswith("{") else run.stdout.strip()


def cpu():
    found = {}
    with Rig("mockfleet") as rig:
        for number in range(ROUNDS):
            for name, more in (("whole", ()), ("stream", ("--stream",))):
                router, envoy = rig.router.process.pid, rig.envoy.process.pid
                for what, url, pid in (
                    ("proxy", rig.router.url, router),
                    ("picker", rig.envoy.url, router),
                    ("envoy", rig.envoy.url, envoy),
                ):
                    load = blast(rig, url, pid, *more)
                    found.setdefault(f"{what} {name}", []).append(load["cpu_us_per_req"])
                    print(json.dumps({"round": number, "what": what, "answer": name, "blast": load}), flush=True)
        summary(found)
        decisions = "warmroute_endpoint_picker_decision_seconds"
        print("\n".join(line for line in get(rig.router.admin_url + "/metrics")[1].splitlines() if line.startswith(decisions)))


class Client:
    """One connection, so that only requests are measured."""

    def __init__(self, url):
        host, port = address(url).split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=120)

    def chat(self, body):
        self.connection.request("POST", CHAT, body, {"content-type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)


def chat(model, messages):
    return json.dumps({"model": model, "messages": messages, "max_tokens": 8})


def instructions():
    requests = int(os.environ.get("REQUESTS", "200"))
    found = {}
    with tempfile.TemporaryDirectory() as out:
        path = pathlib.Path(out, "out")
        under = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={path}")
        quiet = {"fleet": {"health": {"interval": "10s"}}, "runtime": {"threads": 1}}
        with Rig("mockfleet", workers=2, under=under, config=quiet) as rig:
            body = chat(rig.model, [{"role": "user", "content": "a word. " * 250}])

            def count():
                for old in pathlib.Path(out).glob("out.*"):
                    old.unlink()
                subprocess.run(["callgrind_control", "--dump", str(rig.router.process.pid)], capture_output=True, check=True)
                time.sleep(2)
                lines = [line for file in pathlib.Path(out).glob("out.*") for line in file.read_text().splitlines()]
                totals = [int(line.split()[1]) for line in lines if line.startswith(("summary:", "totals:"))]
                return max(totals)

            for number in range(ROUNDS):
                for name, url in rig.targets().items():
                    client = Client(url)
                    for _ in range(20):
                        client.chat(body)
                    count()
                    for _ in range(requests):
                        client.chat(body)
                    few = count()
                    for _ in range(3 * requests):
                        client.chat(body)
                    each = (count() - few) / (2 * requests)
                    found.setdefault(name, []).append(each)
                    print(json.dumps({"round": number, "what": name, "instructions": round(each)}), flush=True)
    summary(found)


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def long():
    """100,000 tokens are 400 KB."""
    requests = int(os.environ.get("REQUESTS", "200"))
    found = {}
    with Rig("mockfleet") as rig:
        for number in range(ROUNDS):
            for name, url in rig.targets().items():
                client = Client(url)
                messages = [
                    {"role": ("user", "assistant")[turn % 2], "content": f"{name} {number} {turn} " + "word " * 4_000} for turn in range(19)
                ]
                client.chat(chat(rig.model, messages))
                bodies = []
                for turn in range(requests):
                    messages.append({"role": "assistant", "content": "an answer"})
                    messages.append({"role": "user", "content": f"and then {turn}?"})
                    bodies.append(chat(rig.model, messages))
                before = cpu_seconds(rig.router.process.pid)
                for body in bodies:
                    client.chat(body)
                each = (cpu_seconds(rig.router.process.pid) - before) / requests * 1e3
                found.setdefault(name, []).append(each)
                print(json.dumps({"round": number, "what": name, "bytes": len(bodies[-1]), "cpu_ms": round(each, 3)}), flush=True)
    summary(found)


def routing(trace):
    speedup, requests = os.environ.get("SPEEDUP", "2"), os.environ.get("REQUESTS", "3000")
    for number in range(ROUNDS):
        for name in ("proxy", "picker"):
            with Rig("cachefleet", "--speedup", speedup, workers=8) as rig:
                command = [RIG / "player", "--trace", trace, "--addr", address(rig.targets()[name]), "--rate", "2"]
                command += ["--requests", requests, "--speedup", speedup, "--model", rig.model, "--fleet-port", str(rig.port)]
                run = subprocess.run(command, capture_output=True, text=True, check=True)
                print(json.dumps({"round": number, "what": name, "player": json.loads(run.stdout)}), flush=True)


def summary(found):
    for name, values in found.items():
        print(f"{name:13} median {statistics.median(values):12.2f}   least {min(values):12.2f}   greatest {max(values):12.2f}")


if __name__ == "__main__":
    modes = {"cpu": cpu, "instructions": instructions, "long": long, "routing": routing}
    if len(sys.argv) < 2 or sys.argv[1] not in modes:
        sys.exit(__doc__)
    modes[sys.argv[1]](*sys.argv[2:])
