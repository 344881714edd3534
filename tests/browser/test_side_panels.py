"""What an operator looks for beside requests: ranks, speeds, adapters; streams that went on elsewhere, gateways, webhooks,
batches, WebSockets, traces. Each shown by what has happened."""

import http.server
import json
import re
import socket
import threading
import unittest
import urllib.request

from browser import SHOTS, BrowserTest, Load
from cluster import Engine, Router, eventually, get
from patience import LIMIT_S
from playwright.sync_api import expect
from test_panels import free_ports, post

SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="


def receiver(test, status):
    """A receiver of webhooks that answers each with this status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    test.addCleanup(server.server_close)
    test.addCleanup(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}/hook"


def websocket(router):
    """A connection in WebSocket mode, on which nothing is said."""
    host, port = router.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    connection.sendall(
        f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
    )
    answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return connection


class SidePanels(BrowserTest):
    def test_ranks_speeds_and_adapters_are_on_the_fleet(self):
        quick = ("--decode-time", "2ms")
        ranks = Engine(self.directory.name, "ranks", *quick, "--data-parallel-size", "2", "--kv-events", "tcp://*:0", "--kv-replay", "tcp://*:0")
        adapters = Engine(self.directory.name, "adapters", *quick, "--model", "sim", "--model", "sql", "--model", "poems", "--max-loras", "1")
        for engine in (ranks, adapters):
            self.addCleanup(engine.kill)
        workers = [
            {"name": "two-ranks", "url": ranks.url, "prefill_rate": 12000},
            {"name": "with-adapters", "url": adapters.url, "prefill_rate": 4000},
        ]
        router = Router(self.directory.name, workers, {})
        self.addCleanup(router.kill)
        eventually("the router is ready", lambda: get(f"{router.admin_url}/readyz")[0] == 200)
        page = self.page(router)
        with Load(router.url, users=6, models=("sim", "sql")):
            cell = page.locator("#fleet-map .cell").filter(has_text="two-ranks")
            expect(cell).to_contain_text("2 ranks: ")
            row = page.locator("#fleet-table tbody tr").filter(has_text="two-ranks")
            expect(row).to_contain_text("both, 2 ranks")
            expect(row).to_contain_text("12.0 k")
            expect(row).to_contain_text(" / ")
            row.get_by_role("button").click()
            detail = page.locator("#worker-detail")
            expect(detail.locator("tbody tr")).to_have_count(2)
            expect(detail.locator("thead")).to_contain_text("In flight")
            expect(detail).to_contain_text("12.0 k prompt tokens/s (configured)")
            expect(detail).to_contain_text("ms a step")
            expect(detail).to_contain_text("Slots")
            # Its decisions name the rank, and when the first token is expected.
            tail = page.locator("#tail tbody tr").filter(has_text="two-ranks rank ")
            expect(tail.first).to_be_visible()
            page.get_by_role("button", name="Pause").click()
            tail.first.get_by_role("button").click()
            expect(page.locator("#explanation .choice")).to_contain_text("two-ranks rank ")
            expect(page.locator("#explanation thead")).to_contain_text("First token")
            page.locator("#fleet").screenshot(path=SHOTS / "ranks.png")
            page.locator("#explain").screenshot(path=SHOTS / "explain-ranks.png")
            page.locator("#fleet-table tbody tr").filter(has_text="with-adapters").get_by_role("button").click()
            expect(detail).to_contain_text("Adapters in GPU")
            expect(detail).to_contain_text("sql")
            # The details of a worker stay up to date.
            before = detail.inner_text()
            page.locator("#worker").scroll_into_view_if_needed()
            page.wait_for_function("before => document.getElementById('worker-detail').innerText !== before", arg=before)
            models = page.locator("#model-table tbody tr")
            expect(models.filter(has_text="sql").locator("td").nth(4)).to_have_text("1 worker")
            expect(models.filter(has_text="sim").locator("td").nth(4)).to_have_text("–")
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(300)
            self.assert_fits(page)
        # Where a table is wider than the page, its edge says so.
        expect(page.locator("#fleet-table .scroll.cut")).to_have_count(1)
        self.assert_clean(page)

    def test_what_happens_beside_requests_has_panels(self):
        engines = self.engines(["engine-1", "engine-2"])
        endpoint = {"secrets": [SECRET], "allow_http": True, "allowed_networks": ["127.0.0.0/8"]}
        config = {
            "models": [{"name": "sim", "stream_continuation": {}}],
            "routing": {"policy": "round_robin"},
            "traces": {"endpoint": receiver(self, 200), "protocol": "http/protobuf"},
            "batches": {"folder": f"{self.directory.name}/batches"},
            "endpoint_picker": {"listen": f"127.0.0.1:{free_ports(1)[0]}"},
            "webhooks": {"endpoints": [
                {"name": "billing", "url": receiver(self, 204), **endpoint},
                {"name": "broken", "url": receiver(self, 500), **endpoint},
            ]},
        }  # fmt: skip
        router = self.router(engines, **config)
        page = self.page(router)
        expect(page.locator("#gateways")).to_contain_text("Open")
        expect(page.locator("#continuations")).to_be_hidden()
        expect(page.locator("#batches")).to_contain_text(re.compile("Lines that wait for room *0"))
        body = {"model": "sim", "input": "once", "background": True, "max_output_tokens": 4}
        self.assertEqual(post(f"{router.url}/v1/responses", "none", body), 200)
        hooks = page.locator("#webhooks")
        expect(hooks).to_contain_text("billing")
        expect(hooks.locator(".notice").filter(has_text="billing").locator("li").filter(has_text="delivered")).to_contain_text("1")
        expect(hooks.locator(".notice").filter(has_text="broken")).to_contain_text("1 event waits")
        # One of two workers cuts its streams, and the other one goes on with them.
        faults = urllib.request.Request(f"{engines['engine-1'].url}/sim/faults", b'{"cut_after_tokens": 3}', {"content-type": "application/json"})
        urllib.request.urlopen(faults, timeout=LIMIT_S).read()
        chat = {"model": "sim", "stream": True, "max_tokens": 12, "messages": [{"role": "user", "content": "tell me"}]}
        for _ in range(4):
            request = urllib.request.Request(f"{router.url}/v1/chat/completions", json.dumps(chat).encode(), {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                self.assertIn(b"[DONE]", answer.read())
        expect(page.locator("#continuations li").filter(has_text="went on on another worker")).to_contain_text("2")
        expect(page.locator("#tile-failed")).to_contain_text("2 streams went on")
        # Each of those requests was traced.
        exported = page.locator("#traces li").filter(has_text="exported").locator(".value")
        expect(exported).to_have_text(re.compile("[1-9]"))
        expect(page.locator("#websockets")).to_be_hidden()
        connection = websocket(router)
        sockets = page.locator("#websockets")
        expect(sockets).to_contain_text(re.compile("Open *1"))
        connection.close()
        expect(sockets).to_contain_text(re.compile("Open *0"))
        expect(sockets.locator("li").filter(has_text="client")).to_contain_text("1")
        page.locator("#parts").screenshot(path=SHOTS / "side-panels.png")
        # Each number has the name of its metric, or of the page that it is from, as its tooltip or that of what it is in.
        page.locator("#fleet-map .cell").first.click()
        page.locator("#tail tbody button").first.click()
        expect(page.locator("#explanation .candidates")).to_be_visible()
        unnamed = page.evaluate(
            """() => {
                const found = [];
                const walker = document.createTreeWalker(document.getElementById("view"), NodeFilter.SHOW_TEXT);
                const words = "button.link, .pill, h1, h2, h3, h4, time, textarea, option, .note, .empty, .bar, .uplot, .why, .choice, #slow-workers";
                while (walker.nextNode()) {
                    const node = walker.currentNode;
                    const element = node.parentElement;
                    if (!/[0-9]/.test(node.data) || element.closest("[title]") || element.closest(words) || !element.checkVisibility()) continue;
                    found.push(`${element.closest("[id]").id}: ${node.data}`);
                }
                return found;
            }"""
        )
        named = {"events", "worker-detail", "explanation"}
        self.assertEqual([it for it in unnamed if it.split(":")[0] not in named], [])
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                page.wait_for_timeout(300)
                self.assert_fits(page)
                page.locator("#parts").screenshot(path=SHOTS / f"side-panels-{width}-{scheme}.png")
        self.assert_clean(page)


if __name__ == "__main__":
    unittest.main()
