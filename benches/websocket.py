#!/usr/bin/env python3
"""WebSocket mode measured from outside: what an idle socket takes, and the router's CPU of a turn against HTTP streaming.

    benches/websocket.py idle   memory of the router by socket: opened only, and after each had a turn
    benches/websocket.py cpu    CPU of a turn over WebSockets and over HTTP (kept connections), in turns

Environment: WARMROUTE (target/dist/warmroute), ROUNDS (5), SOCKETS (10000), TURNS (400), TOKENS (200). One line of JSON for
each round, then the medians with their spread. `idle` needs as many file descriptors as sockets, and some more.
"""

import asyncio
import base64
import json
import os
import pathlib
import statistics
import struct
import sys

import processes
from processes import spread

ROUNDS = int(os.environ.get("ROUNDS", "5"))
SOCKETS = int(os.environ.get("SOCKETS", "10000"))
TURNS = int(os.environ.get("TURNS", "400"))
TOKENS = int(os.environ.get("TOKENS", "200"))
#: Connections with turns at a time.
CLIENTS = 16
#: Sockets that are being opened at a time.
OPENING = 64
TICKS = os.sysconf("SC_CLK_TCK")
ENDS = (b'"type":"response.completed"', b'"type":"response.incomplete"', b'"type":"response.failed"', b'"type":"error"')


class Rig(processes.Rig):
    """A simulated engine and a router, as processes. A context manager."""

    def __init__(self):
        super().__init__(
            "websocket",
            ["--decode-time", "2ms"],
            api={"listen": "127.0.0.1:0", "advanced": {"max_connections": SOCKETS + 500, "engine_descriptors": 4096}},
            fleet={"health": {"interval": "100ms"}},
            # The client here answers no pings.
            responses={"websocket": {"max_connections": SOCKETS + 100, "ping_interval": "1h"}},
        )

    def cpu(self):
        """Seconds of CPU that the router has used."""
        fields = pathlib.Path(f"/proc/{self.router.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self):
        """Resident bytes of the router that are its own."""
        lines = pathlib.Path(f"/proc/{self.router.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def body(**more):
    return {"model": "sim", "input": "Tell me of the sea.", "max_output_tokens": TOKENS, "store": False} | more


class WebSocket:
    @classmethod
    async def open(cls, api):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(*api, limit=1 << 14)
        key = base64.b64encode(os.urandom(16)).decode()
        self.writer.write(
            f"GET /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n".encode()
        )
        head = await self.reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in head:
            raise SystemExit(head.decode())
        return self

    async def turn(self, **more):
        text = json.dumps({"type": "response.create", **body(**more)}).encode()
        # A mask of zeros is as good a mask as any.
        length = struct.pack("!BBH", 0x81, 0x80 | 126, len(text)) if len(text) > 125 else bytes([0x81, 0x80 | len(text)])
        self.writer.write(length + bytes(4) + text)
        events = 0
        while True:
            first, length = await self.reader.readexactly(2)
            if length == 126:
                length = struct.unpack("!H", await self.reader.readexactly(2))[0]
            elif length == 127:
                length = struct.unpack("!Q", await self.reader.readexactly(8))[0]
            payload = await self.reader.readexactly(length)
            if first & 0xF == 1:
                events += 1
                if any(end in payload[:80] for end in ENDS):
                    return events


class Http:
    @classmethod
    async def open(cls, api):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(*api, limit=1 << 20)
        return self

    async def turn(self, **more):
        text = json.dumps(body(stream=True, **more)).encode()
        self.writer.write(
            b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text
        )
        await self.reader.readuntil(b"\r\n\r\n")
        events = 0
        while True:
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            piece = (await self.reader.readexactly(size + 2))[:size]
            if not size:
                return events
            events += piece.count(b"\nevent: ") + piece.startswith(b"event: ")


async def turns(kind, rig):
    """CPU seconds of the router for each turn, and the events of one."""
    clients = [await kind.open(rig.api) for _ in range(CLIENTS)]
    for client in clients:
        await client.turn()
    before = rig.cpu()
    events = []

    async def run(client):
        for _ in range(TURNS // CLIENTS):
            events.append(await client.turn())

    await asyncio.gather(*map(run, clients))
    cpu = rig.cpu() - before
    for client in clients:
        client.writer.close()
    return cpu / len(events), statistics.mean(events)


async def cpu():
    ratios, kinds = [], {"websocket": (WebSocket, []), "http": (Http, [])}
    with Rig() as rig:
        for number in range(ROUNDS):
            order = list(kinds.items())
            line = {}
            for name, (kind, found) in order if number % 2 else reversed(order):
                seconds, events = await turns(kind, rig)
                found.append(1e6 * seconds)
                line[name] = {"us_per_turn": round(1e6 * seconds), "events": events}
            ratios.append(line["websocket"]["us_per_turn"] / line["http"]["us_per_turn"])
            print(json.dumps(line), flush=True)
    result = {name: spread(found, 0) for name, (_, found) in kinds.items()}
    print(json.dumps({"us_per_turn": result, "ratio": spread(ratios, 2)}))


async def idle():
    found = {"opened": [], "after_a_turn": []}
    for _ in range(ROUNDS):
        with Rig() as rig:
            warm = await WebSocket.open(rig.api)
            await warm.turn()
            await asyncio.sleep(1)
            before, sockets = rig.memory(), []
            for _ in range(0, SOCKETS, OPENING):
                count = min(OPENING, SOCKETS - len(sockets))
                sockets += await asyncio.gather(*(WebSocket.open(rig.api) for _ in range(count)))
            await asyncio.sleep(2)
            opened = (rig.memory() - before) / SOCKETS
            for at in range(0, SOCKETS, OPENING):
                await asyncio.gather(*(socket.turn(max_output_tokens=4) for socket in sockets[at : at + OPENING]))
            await asyncio.sleep(2)
            after = (rig.memory() - before) / SOCKETS
            found["opened"].append(opened)
            found["after_a_turn"].append(after)
            print(json.dumps({"opened": round(opened), "after_a_turn": round(after)}), flush=True)
            for socket in sockets:
                socket.writer.transport.abort()
    print(json.dumps({"sockets": SOCKETS, "bytes_per_socket": {name: spread(values, 0) for name, values in found.items()}}))


if __name__ == "__main__":
    what = {"cpu": cpu, "idle": idle}.get(sys.argv[1] if len(sys.argv) == 2 else "")
    if what is None:
        raise SystemExit(__doc__)
    asyncio.run(what())
