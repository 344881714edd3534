#!/usr/bin/env python3
"""How many connections a router opens to many workers that each get few requests.

    benches/connections.py

300 workers (WORKERS), 16 I/O threads (THREADS), 400 requests a second (RATE) over 32 connections for 10 seconds (SECS). Prints the
connections to workers that were opened for so many requests, and the CPU time of the router a request; several programs in turns,
ROUNDS (2) times. Environment: WARMROUTE (target/dist/warmroute; or NAME=PROGRAM with spaces between), RIG (the programs of
benches/rig). Linux only: it counts accepted connections of the whole machine, so nothing else may open any.
"""

import http.client
import json
import os
import pathlib
import subprocess
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).parent
RIG = pathlib.Path(os.environ.get("RIG", HERE / "rig/target/release"))
PROGRAMS = [pair.rpartition("=") for pair in os.environ.get("WARMROUTE", str(HERE.parent / "target/dist/warmroute")).split()]
WORKERS, THREADS, RATE, SECS, ROUNDS = (
    int(os.environ.get(name, default))
    for name, default in [("WORKERS", 300), ("THREADS", 16), ("RATE", 400), ("SECS", 10), ("ROUNDS", 2)]
)
CLIENTS = 32
FIRST_PORT, API, ADMIN = 11_000, 8_211, 8_212


def accepted():
    names, values = (line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:"))
    return int(values[names.index("PassiveOpens")])


def cpu_us(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return 1e6 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(client, failed):
    connection = http.client.HTTPConnection("127.0.0.1", API)
    due = time.monotonic() + client / RATE
    for number in range(RATE * SECS // CLIENTS):
        time.sleep(max(0, due - time.monotonic()))
        due += CLIENTS / RATE
        text = f"{client} {number} " + "word " * 50
        body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 4})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            failed.append(answer.status)


def measure(program, folder):
    config = pathlib.Path(folder) / "config.yaml"
    workers = "".join(f"  - http://127.0.0.1:{FIRST_PORT + number}\n" for number in range(WORKERS))
    config.write_text(
        f'api: {{listen: "127.0.0.1:{API}"}}\nadmin: {{listen: "127.0.0.1:{ADMIN}"}}\nlog: {{level: warn, access: false}}\n'
        f"runtime: {{threads: {THREADS}}}\nfleet: {{health: {{interval: 1h}}}}\nworkers:\n{workers}"
    )
    router = subprocess.Popen([program, "serve", "--config", config])
    try:
        time.sleep(2)
        urllib.request.urlopen(f"http://127.0.0.1:{ADMIN}/readyz").read()
        connections, cpu, failed = accepted(), cpu_us(router.pid), []
        clients = [threading.Thread(target=send, args=(client, failed)) for client in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if failed:
            raise SystemExit(f"answers that are not 200: {failed[:5]}")
        requests = RATE * SECS // CLIENTS * CLIENTS
        opened = accepted() - connections - CLIENTS
        return {"requests": requests, "opened": opened, "cpu_us": round((cpu_us(router.pid) - cpu) / requests, 1)}
    finally:
        router.terminate()
        router.wait()


def main():
    fleet = subprocess.Popen([RIG / "mockfleet", "--port", str(FIRST_PORT), "--workers", str(WORKERS)])
    try:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(ROUNDS):
                for name, _, program in PROGRAMS:
                    print(json.dumps({"program": name or program} | measure(program, folder)), flush=True)
    finally:
        fleet.terminate()


if __name__ == "__main__":
    main()
