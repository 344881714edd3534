#!/usr/bin/env python3
"""CPU of a request over HTTP/1.1 and over HTTP/2, of warmroute and of nginx, which speaks HTTP/1.1 to the same engine.

    benches/http2.py [plain|stream ...]

2 KB chats to one simulated engine without decode time, without TLS, 16 requests at a time: on 16 connections of HTTP/1.1,
on two connections of HTTP/2, and on one. Rounds are in turns. One line of JSON for each measurement, then the medians
with the least and the greatest.

Environment: WARMROUTE (target/dist/warmroute), ROUNDS (5), REQUESTS (8000 a measurement), TOKENS of a stream (64).
Needs h2load (Debian: nghttp2-client) and nginx.
"""

import collections
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
import urllib.request

from processes import WARMROUTE, Processes, free_port

ROUNDS = int(os.environ.get("ROUNDS", "5"))
REQUESTS = int(os.environ.get("REQUESTS", "8000"))
TOKENS = int(os.environ.get("TOKENS", "64"))
AT_A_TIME = 16
#: Name, and what h2load is told.
CLIENTS = {
    "HTTP/1.1, 16 connections": ["--h1", "-c", str(AT_A_TIME), "-m", "1"],
    "HTTP/2, 2 connections": ["-c", "2", "-m", str(AT_A_TIME // 2)],
    "HTTP/2, 1 connection": ["-c", "1", "-m", str(AT_A_TIME)],
}


def until_up(url):
    for _ in range(200):
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"{url} does not answer")


def cpu_seconds(pid):
    """Of a process and its children."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0.0
    for process in [str(pid), *children]:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


class Fleet(Processes):
    """The engine and the two routers. A context manager."""

    def __init__(self):
        super().__init__("http2")
        self.home = pathlib.Path(self.directory.name)
        engine, api, admin, nginx = (free_port() for _ in range(4))
        self.start(WARMROUTE, "sim", "--listen", f"127.0.0.1:{engine}", "--decode-time", "0ms")
        until_up(f"http://127.0.0.1:{engine}/health")
        config = {
            "api": {"listen": f"127.0.0.1:{api}", "drain_delay": "0s"},
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "log": {"level": "warn", "access": False},
            "workers": [f"http://127.0.0.1:{engine}"],
        }
        (self.home / "warmroute.yaml").write_text(json.dumps(config))
        (self.home / "nginx.conf").write_text(
            f"worker_processes 1; pid {self.home}/pid; error_log {self.home}/error.log; daemon off;\n"
            "events { worker_connections 1024; }\n"
            f"http {{ access_log off; client_body_temp_path {self.home}; proxy_temp_path {self.home};\n"
            "client_body_buffer_size 1m; keepalive_requests 1000000;\n"
            f"upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; }}\n"
            f"server {{ listen 127.0.0.1:{nginx}; location / {{ {self.proxy()} }} }}\n"
            f"server {{ listen 127.0.0.1:{nginx + 1} http2; location / {{ {self.proxy()} }} }} }}\n"
        )
        router, _ = self.start(WARMROUTE, "serve", "--config", str(self.home / "warmroute.yaml"))
        until_up(f"http://127.0.0.1:{admin}/readyz")
        proxy, _ = self.start("nginx", "-c", str(self.home / "nginx.conf"), "-p", str(self.home))
        until_up(f"http://127.0.0.1:{nginx}/health")
        #: Name: process, port of HTTP/1.1, port of HTTP/2.
        self.routers = {
            "nginx": (proxy.pid, nginx, nginx + 1),
            "warmroute": (router.pid, api, api),
        }

    @staticmethod
    def proxy():
        return (
            "proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection '';"
            " proxy_buffering off;"
        )

    def __exit__(self, *ended):
        # nginx ends its own processes.
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(timeout=30)
        super().__exit__(*ended)


def measure(fleet, router, client, body, requests):
    """CPU microseconds of the router for a request."""
    pid, http1, http2 = fleet.routers[router]
    flags = CLIENTS[client]
    port = http1 if "--h1" in flags else http2
    before = cpu_seconds(pid)
    said = subprocess.run(
        ["h2load", *flags, "-n", str(requests), "-d", str(body)]
        + ["-H", "content-type: application/json", f"http://127.0.0.1:{port}/v1/chat/completions"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    used = cpu_seconds(pid) - before
    good = int(re.search(r"status codes: (\d+) 2xx", said).group(1))
    if good != requests:
        sys.exit(f"{router}, {client}: {good} of {requests} requests have status 200\n{said}")
    return used / requests * 1e6


def main():
    modes = sys.argv[1:] or ["plain", "stream"]
    if not set(modes) <= {"plain", "stream"}:
        sys.exit(__doc__)
    with Fleet() as fleet:
        table = collections.defaultdict(list)
        for mode in modes:
            request = {
                "model": "sim",
                "messages": [{"role": "user", "content": "a word. " * 250}],
                "max_tokens": TOKENS if mode == "stream" else 16,
                "stream": mode == "stream",
            }
            body = fleet.home / f"{mode}.json"
            body.write_text(json.dumps(request))
            requests = REQUESTS if mode == "plain" else REQUESTS // 4
            for round_number in range(ROUNDS + 1):
                for client in CLIENTS:
                    for router in fleet.routers:
                        used = measure(fleet, router, client, body, requests)
                        # The first round warms up.
                        if round_number > 0:
                            table[mode, client, router].append(used)
                            row = {"mode": mode, "client": client, "router": router}
                            print(json.dumps({**row, "cpu_us": round(used, 1)}), flush=True)
        for (mode, client, router), used in table.items():
            median, least, most = statistics.median(used), min(used), max(used)
            print(f"{mode:8}{client:26}{router:11}{median:7.1f} us ({least:.1f} to {most:.1f})")


if __name__ == "__main__":
    main()
