#!/usr/bin/env python3
"""What a stored response costs the router beside one that passes through, and a token of a background response.

    benches/stored.py [WHAT ...]    pass_through, store_false, stored: a whole response of 2 KB; unread, read: a token of a
                                    streamed background response whose client left at once, or reads it to its end

The store is a Redis. A token is the difference of answers of TOKENS and 3 TOKENS. Environment: WARMROUTE
(target/dist/warmroute; several, as NAME=PROGRAM with spaces between, are measured in turns), ROUNDS (5), REQUESTS (2000 a
round), RUNNING (200 background responses at a time, over four simulated engines at 50 tokens a second), TOKENS (100), and
CALLGRIND=1, which counts instructions with valgrind instead of CPU time: the same on a busy machine, but without the kernel; take
fewer REQUESTS and RUNNING=10 then. Needs redis-server. One line of JSON for each round, then the medians with their spread.
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import processes
from conversation import WORDS, Client
from processes import LARGE_ENGINE, Rig, spread

ROUNDS = int(os.environ.get("ROUNDS", "5"))
REQUESTS = int(os.environ.get("REQUESTS", "2000"))
RUNNING = int(os.environ.get("RUNNING", "200"))
TOKENS = int(os.environ.get("TOKENS", "100"))
CALLGRIND = os.environ.get("CALLGRIND") == "1"
CONNECTIONS = 8
WHAT = ["pass_through", "store_false", "stored", "unread", "read"]
PROMPT = " ".join(WORDS[n * n % 16] for n in range(340))[:2000]


class Measured(Rig):
    """A rig whose router's work can be counted."""

    def __init__(self, program, **responses):
        processes.WARMROUTE = program
        self.callgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=%s"] if CALLGRIND else None
        decode = "20ms" if "background" in responses else "0ms"
        flags, log = ["--decode-time", decode, *LARGE_ENGINE], {"format": "json", "access": False}
        super().__init__("stored", flags, engines=4, store="redis", responses=responses, log=log)

    def start(self, *command, find):
        if self.callgrind and "serve" in command:
            command = [it.replace("%s", self.directory.name + "/out") for it in self.callgrind] + list(command)
        return super().start(*command, find=find)

    def cost(self):
        """Microseconds of CPU, or instructions, so far."""
        if not self.callgrind:
            return 1e6 * self.cpu()
        before = set(pathlib.Path(self.directory.name).glob("out.*"))
        subprocess.run(["callgrind_control", "--dump", str(self.router.pid)], check=True, capture_output=True)
        time.sleep(1)
        new = set(pathlib.Path(self.directory.name).glob("out.*")) - before
        counts = [int(line.split()[1]) for file in new for line in file.open() if line.startswith(("summary:", "totals:"))]
        self.counted = getattr(self, "counted", 0) + max(counts)
        return self.counted

    def busy(self):
        """Requests that the engines run. The engines are asked, since asking the router would count."""
        pages = (urllib.request.urlopen(engine + "/metrics").read().decode() for engine in self.engines)
        lines = (line for page in pages for line in page.splitlines() if line.startswith("vllm:num_requests_running"))
        return sum(float(line.split()[-1]) for line in lines)


async def whole(rig, **members):
    """The cost of a whole response."""
    clients = [await Client.open(rig.api) for _ in range(CONNECTIONS)]

    async def send(client, count):
        for number in range(count):
            await client.post("/v1/responses", {"model": "sim", "input": f"{number} {PROMPT}", "max_output_tokens": 16} | members)

    await asyncio.gather(*(send(client, 20) for client in clients))
    before = rig.cost()
    await asyncio.gather(*(send(client, REQUESTS // CONNECTIONS) for client in clients))
    return (rig.cost() - before) / (REQUESTS // CONNECTIONS * CONNECTIONS)


async def background(rig, tokens, is_read):
    """The cost of so many background responses of so many tokens."""
    body = {"model": "sim", "input": PROMPT, "max_output_tokens": tokens, "background": True, "stream": True}
    text = json.dumps(body).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)

    async def one(number):
        await asyncio.sleep(number / RUNNING)
        reader, writer = await asyncio.open_connection(*rig.api, limit=1 << 20)
        writer.write(head + text)
        try:
            await reader.readuntil(b"response.output_text.delta")
        except asyncio.IncompleteReadError as ended:
            raise SystemExit(f"no token: {ended.partial.decode()!r}") from None
        if is_read:
            await reader.readuntil(b"data: [DONE]")
        writer.close()

    before = rig.cost()
    await asyncio.gather(*(one(number) for number in range(RUNNING)))
    while rig.busy():
        await asyncio.sleep(0.2)
    await asyncio.sleep(1)
    return rig.cost() - before


async def measure(program, what):
    if what in ("unread", "read"):
        with Measured(program, background={"max_running": 10_000}) as rig:
            await background(rig, 10, is_read=True)
            few, many = [await background(rig, tokens, what == "read") for tokens in (TOKENS, 3 * TOKENS)]
            return (many - few) / (2 * TOKENS * RUNNING)
    mode = {"mode": "pass_through"} if what == "pass_through" else {}
    with Measured(program, **mode) as rig:
        return await whole(rig, store=what == "stored")


async def main(whats):
    programs = [pair.rpartition("=") for pair in processes.WARMROUTE.split()]
    found = {}
    for number in range(ROUNDS):
        line = {}
        for what in whats:
            for name, _, program in programs[:: 1 if number % 2 else -1]:
                label = f"{name} {what}".strip()
                line[label] = round(await measure(program, what), 2)
                found.setdefault(label, []).append(line[label])
        print(json.dumps(line), flush=True)
    unit = "instructions" if CALLGRIND else "us"
    print(json.dumps({unit: {label: spread(values, 1) for label, values in sorted(found.items())}}))


if __name__ == "__main__":
    if not set(sys.argv[1:]) <= set(WHAT):
        raise SystemExit(__doc__)
    asyncio.run(main(sys.argv[1:] or WHAT))
