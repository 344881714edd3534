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
import random
import sys

from processes import LARGE_ENGINE, Rig, spread

ROUNDS = int(os.environ.get("ROUNDS", "5"))
TURNS = int(os.environ.get("TURNS", "100"))
TOKENS = int(os.environ.get("TOKENS", "100000"))
EARLIER = int(os.environ.get("EARLIER", "19"))
#: Items that one call may add to a conversation.
ITEMS_A_CALL = 20
WORDS = "the of and to in model cache prefix router turn answer layer token worker fleet replica".split()


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


async def main():
    found = {}
    for number in range(ROUNDS):
        line = {}
        for store in ["memory", "redis"][:: 1 if number % 2 else -1]:
            with Rig("conversation", ["--decode-time", "1ms", *LARGE_ENGINE], store=store) as rig:
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
