#!/usr/bin/env python3
"""One system prompt that every request has, in front of simulated engines: does the load spread, and how long do answers take?

    WARMROUTE=target/release/warmroute benches/rig/hot_prompt.py [--clients 100] [--stream] [--rounds 5] CONFIGURATION...

Each CONFIGURATION is lines of the router's YAML, such as 'routing: {policy: least_load}; queue: off'; all are measured in turns,
each time with new engines. Prints for each the mean time of an answer (median over the rounds, lowest and highest), its ratio to the
first configuration in the same round, and the largest part of the requests that one engine had.
"""

import argparse
import collections
import http.client
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time

BINARY = os.environ.get("WARMROUTE", "target/release/warmroute")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, path):
    for _ in range(300):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"nothing answers at port {port}")


def ask(port, body, seen):
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"content-type": "application/json", "x-warmroute-decision": "1"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}")
    decision = dict(pair.split("=", 1) for pair in answer.headers["x-warmroute-decision"].split("; ") if "=" in pair)
    seen.append((time.monotonic() - began, decision["worker"]))


def measure(configuration, options):
    """The mean time of an answer, and the largest part of one engine."""
    engines = [free_port() for _ in range(options.engines)]
    api, admin = free_port(), free_port()
    started = [subprocess.Popen([BINARY, "sim", "--listen", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for port in engines]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        lines = [f"api: {{listen: '127.0.0.1:{api}'}}", f"admin: {{listen: '127.0.0.1:{admin}'}}", "log: {access: false}"]
        lines.append("workers: [" + ", ".join(f"'http://127.0.0.1:{port}'" for port in engines) + "]")
        lines += [line.strip() for line in configuration.split(";")]
        file.write("\n".join(lines) + "\n")
        file.flush()
        try:
            for port in engines:
                wait_for(port, "/health")
            started.append(subprocess.Popen([BINARY, "serve", "--config", file.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            wait_for(admin, "/readyz")
            system = {"role": "system", "content": "You are a helpful assistant. " * 900}
            seen = []

            def client(number):
                for turn in range(options.requests):
                    question = {"role": "user", "content": f"question {number} {turn} " + "q" * 200}
                    body = {"model": "sim", "max_tokens": options.tokens, "stream": options.stream, "messages": [system, question]}
                    ask(api, body, seen)

            clients = [threading.Thread(target=client, args=(number,)) for number in range(options.clients)]
            for thread in clients:
                thread.start()
            for thread in clients:
                thread.join()
        finally:
            for process in started:
                process.kill()
                process.wait()
    workers = collections.Counter(worker for _, worker in seen)
    return statistics.mean(took for took, _ in seen), max(workers.values()) / len(seen)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--clients", type=int, default=100, help="requests at a time")
    arguments.add_argument("--requests", type=int, default=3, help="requests of each client")
    arguments.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    arguments.add_argument("--engines", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--stream", action="store_true")
    arguments.add_argument("configurations", nargs="+", metavar="CONFIGURATION")
    options = arguments.parse_args()
    rounds = collections.defaultdict(list)
    for number in range(options.rounds):
        for configuration in options.configurations:
            mean, largest = measure(configuration, options)
            rounds[configuration].append((mean, largest))
            print(f"round {number + 1}: {configuration}: {mean:.2f} s, {largest:.0%} at one engine", flush=True)
    first = [mean for mean, _ in rounds[options.configurations[0]]]
    for configuration in options.configurations:
        means = [mean for mean, _ in rounds[configuration]]
        ratios = [mean / other for mean, other in zip(means, first)]
        largest = max(part for _, part in rounds[configuration])
        print(
            f"{configuration}: mean {statistics.median(means):.2f} s ({min(means):.2f} to {max(means):.2f}), "
            f"{statistics.median(ratios):.2f} x the first ({min(ratios):.2f} to {max(ratios):.2f}), at most {largest:.0%} at one engine"
        )


if __name__ == "__main__":
    main()
