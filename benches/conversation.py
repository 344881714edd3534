#!/usr/bin/env python3
"""What the 20th turn of a long conversation costs the router, measured from outside.

    benches/conversation.py     CPU of a turn whose history is a conversation, and one whose history is a chain of responses,
                                with the store in memory and in Redis, in turns

No tokenizer is configured, so this is all CPU but that of tokens. Environment: WARMROUTE (target/dist/warmroute), ROUNDS (5),
TURNS (100 a round), TOKENS (100000, of four characters), EARLIER (19 turns before). Needs redis-server. One line of JSON for
each round, then the medians with their spread.
"""

import asyncio
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARMROUTE = os.environ.get("WARMROUTE", str(ROOT / "target/dist/warmroute"))
ROUNDS = int(os.environ.get("ROUNDS", "5"))
TURNS = int(os.environ.get("TURNS", "100"))
TOKENS = int(os.environ.get("TOKENS", "100000"))
EARLIER = int(os.environ.get("EARLIER", "19"))
#: Items that one call may add to a conversation.
ITEMS_A_CALL = 20
KEY = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
WORDS = "the of and to in model cache prefix router turn answer layer token worker fleet replica".split()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Rig:
    """A simulated engine, maybe a Redis, and a router, as processes. A context manager."""

    def __init__(self, store, engines=1, decode="1ms", responses=None, access_log=True):
        self.directory = tempfile.TemporaryDirectory(prefix="warmroute-conversation-")
        self.processes = []
        self.engines = []
        for _ in range(engines):
            _, line = self.start(
                WARMROUTE, "sim", "--listen", "127.0.0.1:0", "--decode-time", decode, "--prefill-tokens-per-second", "100000000",
                "--context-tokens-max", "1000000", "--cache-blocks", "2000000", "--running-max", "1000",
                find=lambda line: "listening on " in line,
            )
            self.engines.append(line.split("listening on ")[1].strip())
        responses = dict(responses or {})
        if store == "redis":
            port = free_port()
            self.start("redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1", find=lambda line: "Ready to accept" in line)
            responses |= {"store": {"redis": f"redis://127.0.0.1:{port}"}, "state_token": {"keys": [KEY]}}
        config = pathlib.Path(self.directory.name, "config.yaml")
        config.write_text(json.dumps({
            "api": {"listen": "127.0.0.1:0"},
            "admin": {"listen": "127.0.0.1:0"},
            "workers": self.engines,
            "fleet": {"health": {"interval": "2s"}},
            "responses": responses,
            "log": {"format": "json", "access": access_log},
        }))
        self.router, line = self.start(WARMROUTE, "serve", "--config", str(config), find=lambda line: '"listening"' in line)
        fields = json.loads(line)["fields"]
        host, port = fields["api"].rsplit(":", 1)
        self.api = (host, int(port))
        admin = f"http://{fields['admin']}"
        while b'"health":"up"' not in urllib.request.urlopen(admin + "/fleet").read().replace(b" ", b""):
            time.sleep(0.05)

    def start(self, *command, find):
        log = pathlib.Path(self.directory.name, f"{len(self.processes)}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        self.processes.append(process)
        for _ in range(600):
            found = next(filter(find, log.read_text().splitlines()), None)
            if found:
                return process, found
            time.sleep(0.05)
        raise SystemExit(log.read_text())

    def cpu(self):
        """Seconds of CPU that the router has used."""
        tasks = pathlib.Path(f"/proc/{self.router.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self.directory.cleanup()


class Client:
    @classmethod
    async def open(cls, api):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(*api, limit=1 << 24)
        return self

    async def post(self, path, body):
        text = json.dumps(body).encode()
        self.writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(text)) + text)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in head:
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            answer = await self.reader.readexactly(length)
        else:
            answer = b""
            while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
                answer += (await self.reader.readexactly(size + 2))[:size]
            await self.reader.readexactly(2)
        if b" 200 " not in head[:16]:
            raise SystemExit((head + answer).decode())
        return json.loads(answer)


def text(characters, chance):
    """Prose with line breaks and quotes, which JSON escapes."""
    out, length = [], 0
    while length < characters:
        word = chance.choice(WORDS) if chance.random() < 0.6 else f"{chance.getrandbits(24):x}"
        out.append(chance.choice([word] * 30 + [f'"{word}"', word + "\n"]))
        length += len(out[-1]) + 1
    return " ".join(out)


def create(**more):
    return {"model": "sim", "input": "Go on.", "max_output_tokens": 1} | more


async def histories(client, kind, count, chance):
    """What the next turn of each of so many histories has in its body."""
    size, found = TOKENS * 4 // EARLIER, []
    for _ in range(count):
        if kind == "chain":
            previous = {}
            for _ in range(EARLIER):
                answer = await client.post("/v1/responses", create(input=text(size, chance)) | previous)
                previous = {"previous_response_id": answer["id"]}
            found.append(previous)
            continue
        conversation = (await client.post("/v1/conversations", {}))["id"]
        half = size // 2
        items = [{"role": role, "content": text(half, chance)} for _ in range(EARLIER) for role in ("user", "assistant")]
        for at in range(0, len(items), ITEMS_A_CALL):
            await client.post(f"/v1/conversations/{conversation}/items", {"items": items[at : at + ITEMS_A_CALL]})
        found.append({"conversation": conversation})
    return found


async def measure(rig, kind, chance):
    """CPU seconds of the router for each turn."""
    client = await Client.open(rig.api)
    prepared = await histories(client, kind, TURNS, chance)
    await asyncio.sleep(0.5)
    before = rig.cpu()
    for history in prepared:
        await client.post("/v1/responses", create(**history))
    cpu = rig.cpu() - before
    client.writer.close()
    return cpu / TURNS


def spread(values, digits=None):
    median = statistics.median(values)
    return {name: round(value, digits) for name, value in {"median": median, "min": min(values), "max": max(values)}.items()}


async def main():
    found = {}
    for number in range(ROUNDS):
        line = {}
        for store in ["memory", "redis"][:: 1 if number % 2 else -1]:
            with Rig(store) as rig:
                chance = random.Random(number)
                for kind in ["conversation", "chain", "none"]:
                    if kind == "none":
                        client = await Client.open(rig.api)
                        before = rig.cpu()
                        for _ in range(TURNS):
                            await client.post("/v1/responses", create())
                        seconds = (rig.cpu() - before) / TURNS
                    else:
                        seconds = await measure(rig, kind, chance)
                    line[f"{kind}, {store}"] = round(1e6 * seconds)
                    found.setdefault(f"{kind}, {store}", []).append(1e6 * seconds)
        print(json.dumps(line), flush=True)
    print(json.dumps({"us_per_turn": {name: spread(values) for name, values in sorted(found.items())}}))


if __name__ == "__main__":
    if len(sys.argv) != 1:
        raise SystemExit(__doc__)
    asyncio.run(main())
