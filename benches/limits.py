#!/usr/bin/env python3
"""Limits of tenants, measured from outside: whether a flood of one tenant slows another, and what a limit costs.

    benches/limits.py isolation   the TTFT of one tenant alone, and beside another at 20 times its limit (median of pairs)
    benches/limits.py cpu         CPU a request of a tenant with limits over Redis and of one without, in turns

Environment: WARMROUTE (target/dist/warmroute), RIG (benches/rig/target/release, for `cpu`), ROUNDS (5), SECS (20).
Needs redis-server. One line of JSON for each round, then the medians with their spread.
"""

import asyncio
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.request

from processes import ROOT, WARMROUTE, Processes, free_port

RIG = pathlib.Path(os.environ.get("RIG", ROOT / "benches/rig/target/release"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
SECS = float(os.environ.get("SECS", "20"))

#: Requests a second: the flood's limit, what it sends, and what the other tenant sends.
FLOOD_LIMIT = 10
FLOOD = 20 * FLOOD_LIMIT
STEADY = 5
REPLICAS = 3
#: A prompt of 2,000 tokens that no other request has; the engines compute 10,000 a second, so its TTFT is 200 ms.
PROMPT_TOKENS = 2_000
PREFILL_TOKENS_PER_SECOND = 10_000
ENGINES = 8


class Fleet(Processes):
    """Engines, Redis and routers as processes. A context manager."""

    def __init__(self, replicas, engine_urls=None):
        super().__init__("limits")
        self.redis = free_port()
        self.start("redis-server", "--port", str(self.redis), "--save", "", "--appendonly", "no")
        self.workers = engine_urls or [self.engine() for _ in range(ENGINES)]
        self.peers = [free_port() for _ in range(replicas)]
        self.routers = [self.router(number) for number in range(replicas)]
        # For the replicas to find each other.
        time.sleep(3)

    def engine(self):
        port = free_port()
        speed = f"--prefill-tokens-per-second={PREFILL_TOKENS_PER_SECOND}"
        self.start(WARMROUTE, "sim", "--listen", f"127.0.0.1:{port}", speed, "--decode-time", "10ms")
        return f"http://127.0.0.1:{port}"

    def router(self, number):
        api, admin = free_port(), free_port()
        config = {
            "api": {"listen": f"127.0.0.1:{api}"},
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "workers": self.workers,
            "responses": {"mode": "pass_through"},
            "limits": {"store": f"redis://127.0.0.1:{self.redis}", "output_reserve": 16},
            "log": {"level": "warn", "access": False},
            "tenants": [
                {"name": "steady", "keys": ["sk-steady"]},
                {
                    "name": "flood",
                    "keys": ["sk-flood"],
                    "limits": {"requests_per_minute": 60 * FLOOD_LIMIT, "burst": "1s"},
                },
                {
                    "name": "limited",
                    "keys": ["sk-limited"],
                    "limits": {"requests_per_minute": 10**9, "tokens_per_minute": 10**9, "concurrent_requests": 10**6},
                },
            ],
        }
        if len(self.peers) > 1:
            config["peers"] = {
                "listen": f"127.0.0.1:{self.peers[number]}",
                "discovery": [{"static": [f"127.0.0.1:{port}" for port in self.peers]}],
                "secret": "of-a-measurement-0123456789abcdef",
            }
        path = pathlib.Path(self.directory.name) / f"router{number}.yaml"
        path.write_text(json.dumps(config))
        process, _ = self.start(WARMROUTE, "serve", "--config", str(path))
        for _ in range(300):
            try:
                if urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=1).status == 200:
                    break
            except OSError:
                time.sleep(0.1)
        else:
            raise SystemExit("the router is not ready; see its log: " + (path.parent / f"{len(self.processes) - 1}.log").read_text())
        return api, process.pid


def request(key, number):
    ids = [(number * 7919 + place) % 50_000 + 1 for place in range(PROMPT_TOKENS)]
    body = json.dumps({"model": "sim", "prompt": ids, "max_tokens": 4, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: router\r\nauthorization: Bearer sk-{key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def ask(port, key, number):
    """Status, and seconds to the first event."""
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(key, number))
    status, first = 0, None
    try:
        while line := await reader.readline():
            if not status:
                status = int(line.split()[1])
            if first is None and line.startswith(b"data: "):
                first = time.monotonic() - started
    finally:
        writer.close()
    return status, first


async def send(ports, key, rate, seconds, results, seed):
    """Requests at even intervals, over all replicas."""
    tasks, started = set(), time.monotonic()
    number = 0
    while (elapsed := time.monotonic() - started) < seconds:
        if number <= elapsed * rate:
            port = ports[number % len(ports)]
            task = asyncio.create_task(ask(port, key, seed * 1_000_003 + number))
            task.add_done_callback(lambda done: results.append(done.result() if not done.exception() else (0, None)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        else:
            await asyncio.sleep(0.002)
    await asyncio.gather(*tasks, return_exceptions=True)


def p99(values):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


async def isolation():
    ratios, shares = [], []
    with Fleet(REPLICAS) as fleet:
        ports = [port for port, _ in fleet.routers]
        for number in range(ROUNDS):
            ttft = {}
            # The order changes with each pair.
            for mode in ["alone", "beside"][:: 1 if number % 2 == 0 else -1]:
                steady, flood = [], []
                seed = 2 * number + (mode == "beside") + 1
                sends = [send(ports, "steady", STEADY, SECS, steady, seed)]
                if mode == "beside":
                    sends.append(send(ports, "flood", FLOOD, SECS, flood, seed + 1_000))
                await asyncio.gather(*sends)
                ttft[mode] = p99([first for status, first in steady if status == 200])
                failed = sum(status != 200 for status, _ in steady)
                row = {"round": number, "mode": mode, "ttft_p99_ms": round(ttft[mode] * 1000, 1), "failed": failed}
                if flood:
                    granted = sum(status == 200 for status, _ in flood)
                    limit = FLOOD_LIMIT * (SECS + 1)
                    shares.append(granted / limit)
                    row |= {"flood_sent": len(flood), "flood_granted": granted, "of_limit": round(granted / limit, 3)}
                print(json.dumps(row), flush=True)
                await asyncio.sleep(2)
            ratios.append(ttft["beside"] / ttft["alone"])
    report("ttft_p99_beside_over_alone", ratios)
    report("flood_of_limit", shares)


def cpu():
    engine = free_port()
    mock = subprocess.Popen([RIG / "mockfleet", "--port", str(engine), "--workers", "1", "--tokens", "16"], stdout=subprocess.DEVNULL)
    differences = []
    try:
        time.sleep(0.5)
        with Fleet(1, [f"http://127.0.0.1:{engine}"]) as fleet:
            port, pid = fleet.routers[0]
            for number in range(ROUNDS):
                micros = {}
                for key in ["steady", "limited"][:: 1 if number % 2 == 0 else -1]:
                    command = [RIG / "blast", "--addr", f"127.0.0.1:{port}", "--pid", str(pid), "--bearer", f"sk-{key}"]
                    output = subprocess.run([*command, "--secs", str(SECS / 4)], check=True, capture_output=True).stdout
                    result = json.loads(output)
                    micros[key] = result["cpu_us_per_req"]
                    row = {"round": number, "tenant": key, "cpu_us": micros[key], "rps": result["rps"], "bad": result["bad"]}
                    print(json.dumps(row), flush=True)
                differences.append(micros["limited"] - micros["steady"])
    finally:
        mock.kill()
        mock.wait()
    report("cpu_us_of_limits", differences)


def report(name, values):
    row = {"median": round(statistics.median(values), 3), "lowest": round(min(values), 3), "highest": round(max(values), 3)}
    print(json.dumps({name: row, "of": len(values)}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["isolation"]:
            asyncio.run(isolation())
        case ["cpu"]:
            cpu()
        case _:
            raise SystemExit(__doc__)
