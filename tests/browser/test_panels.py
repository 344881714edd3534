"""The panels of parts that are configured seldom, with real values: three replicas over Redis, prefill/decode pairs with KV
events, a queue, tenants with limits, background responses."""

import json
import socket
import unittest
import urllib.error
import urllib.request

from browser import SHOTS, BrowserTest, Load
from cluster import STATE_TOKEN_KEY, Engine, Redis, Router, eventually, get
from patience import LIMIT_S
from playwright.sync_api import expect

SECRET = "0123456789abcdef" * 4


def free_ports(number):
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def post(url, key, body):
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=LIMIT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


class PanelsTest(BrowserTest):
    def test_each_panel_shows_what_happens(self):
        redis = Redis(self.directory.name)
        self.addCleanup(redis.kill)
        workers = []
        for role in ("prefill", "decode"):
            for number in (1, 2):
                name = f"{role}-{number}"
                engine = Engine(
                    self.directory.name, name, "--decode-time", "4ms", "--prefill-tokens-per-second", "4000",
                    "--kv-role", role, "--kv-connector", "nixl", "--kv-events", "tcp://*:0", "--kv-replay", "tcp://*:0",
                )  # fmt: skip
                self.addCleanup(engine.kill)
                workers.append({"name": name, "url": engine.url, "role": role})
        ports = free_ports(3)
        config = {
            "prefill_decode": {"connector": "nixl"},
            "queue": {"max_worker_queued_tokens": 64},
            "responses": {"store": {"redis": redis.url}, "state_token": {"keys": [STATE_TOKEN_KEY]}},
            "tenants": [
                {"name": "calm", "keys": ["sk-calm-0123456789"]},
                {"name": "loud", "keys": ["sk-loud-0123456789"], "limits": {"requests_per_minute": 6, "tokens_per_minute": 100000, "concurrent_requests": 8}},
            ],
        }  # fmt: skip
        routers = []
        for number, port in enumerate(ports):
            others = [f"127.0.0.1:{other}" for other in ports if other != port]
            peers = {"name": f"replica-{number}", "listen": f"127.0.0.1:{port}", "discovery": [{"static": others}], "secret": SECRET}
            router = Router(self.directory.name, workers, {**config, "peers": peers}, f"router-{number}")
            self.addCleanup(router.kill)
            routers.append(router)
        for router in routers:
            eventually("the router is ready", lambda: get(f"{router.admin_url}/readyz")[0] == 200)
        router = routers[0]
        page = self.page(router)
        with Load(router.url, users=6, headers={"authorization": "Bearer sk-calm-0123456789"}):
            chat = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello " * 40}]}
            statuses = [post(f"{router.url}/v1/chat/completions", "sk-loud-0123456789", chat) for _ in range(12)]
            # How many of them depends on the machine: while the store takes over 100 ms, each replica grants its third.
            self.assertEqual((statuses[0], set(statuses)), (200, {200, 429}), statuses)
            for number in range(3):
                body = {"model": "sim", "input": f"Question {number}", "background": True, "max_output_tokens": 400}
                self.assertEqual(post(f"{router.url}/v1/responses", "sk-calm-0123456789", body), 200)
            expect(page.locator("#kv-ranks tbody tr")).to_have_count(4)
            expect(page.locator("#kv-ranks tbody .pill.live").first).to_be_visible()
            expect(page.locator("#pairs")).to_contain_text("nixl")
            expect(page.locator("#transfers")).to_contain_text("prefill")
            expect(page.locator("#transfers")).to_contain_text("completed")
            expect(page.locator("#chart-requests .legend")).to_contain_text("refused (429)")
            expect(page.locator("#responses")).to_contain_text("Left by a lost replica")
            expect(page.locator("#store")).to_contain_text("redis")
            expect(page.locator("#peers .pill.up")).to_have_count(2)
            expect(page.locator("#peers")).to_contain_text("replica-1")
            expect(page.locator("#queue")).to_contain_text("saturation")
            expect(page.locator("#waits")).to_contain_text("queue wait")
            tenants = page.locator("#tenants tbody tr")
            expect(tenants).to_have_count(2)
            loud = page.locator("#tenants tbody tr").filter(has_text="loud")
            expect(loud).to_contain_text("requests per minute 6")
            expect(loud).to_contain_text("of 6 requests/min")
            expect(page.locator("#fleet-table tbody tr").filter(has_text="decode-1")).to_contain_text("ms")
            for width in (1280, 390):
                for scheme in ("light", "dark"):
                    page.set_viewport_size({"width": width, "height": 900})
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_timeout(1_200)
                    self.assert_fits(page)
                    page.screenshot(path=SHOTS / f"panels-{width}-{scheme}.png", full_page=True)
            page.set_viewport_size({"width": 1280, "height": 900})
            page.emulate_media(color_scheme="light")
            page.locator("#parts").screenshot(path=SHOTS / "panels.png")
            self.assertNotIn("Answer shortly", page.content())
        # What was limited is limited by all replicas together, and each shows it.
        other = self.page(routers[1])
        expect(other.locator("#tenants tbody tr").filter(has_text="loud")).to_contain_text("% of 6 requests/min")
        # Without its store the page says so.
        redis.kill()
        post(f"{router.url}/v1/chat/completions", "sk-loud-0123456789", {"model": "sim", "messages": []})
        expect(page.locator("#store .facts")).to_contain_text("down")
        self.assert_clean(page)

    def test_a_slow_worker_is_named(self):
        engines = self.engines(["engine-1", "engine-2", "engine-3"])
        slow = Engine(self.directory.name, "slow", "--model", "sim", "--decode-time", "40ms", "--prefill-tokens-per-second", "500")
        self.addCleanup(slow.kill)
        router = self.router({**engines, "slow-worker": slow}, routing={"policy": "round_robin"})
        page = self.page(router)
        with Load(router.url, users=6):
            expect(page.locator("#slow-workers")).to_contain_text("slow-worker: ")
            row = page.locator("#fleet-table tbody tr").filter(has_text="slow-worker")
            expect(row.locator("td.slow").first).to_be_visible()
            expect(page.locator("#slow-workers")).not_to_contain_text("engine-")
            page.locator("#fleet").screenshot(path=SHOTS / "slow.png")
        self.assert_fits(page)
        self.assert_clean(page)


if __name__ == "__main__":
    unittest.main()
