"""The dashboard's page: what an operator does with it."""

import re
import unittest

from browser import SHOTS, BrowserTest, Load
from cluster import Engine, Router
from playwright.sync_api import expect

SCRIPT = "<script>alert(1)</script>"
READ = "read-only-0123456789"
OPERATE = "operate-0123456789"


class Dashboard(BrowserTest):
    def test_a_killed_worker_shows_and_names_are_text(self):
        engines = self.engines(["engine-1", "engine-2", SCRIPT])
        router = self.router(engines)
        page = self.page(router)
        with Load(router.url):
            expect(page.locator("#status")).to_have_text("live")
            expect(page.locator("#fleet-map .cell")).to_have_count(3)
            expect(page.locator("#fleet-map").get_by_text(SCRIPT, exact=True)).to_be_visible()
            expect(page.locator("#tile-workers .big")).to_have_text("3 of 3")
            expect(page.locator("#tail tbody tr").first).to_be_visible()
            page.locator("#fleet-table").get_by_role("button", name=SCRIPT).click()
            expect(page.locator("#worker-detail h4")).to_have_text(SCRIPT)
            expect(page.locator("#worker-detail")).to_contain_text("No KV events: the engine names no publisher at /kv_event_sources")
            page.screenshot(path=SHOTS / "fleet.png", full_page=True)
            engines["engine-2"].kill()
            expect(page.locator("#tile-workers .big")).to_have_text("2 of 3")
        expect(page.locator("#fleet-map .cell.down, #fleet-map .cell.breaker")).to_have_count(1)
        expect(page.locator("#events ol")).to_contain_text("engine-2")
        self.assert_clean(page)

    def test_a_click_on_a_decision_explains_it_and_a_pasted_request_too(self):
        router = self.router(self.engines(["engine-1", "engine-2", "engine-3"]))
        page = self.page(router)
        with Load(router.url):
            row = page.locator("#tail tbody tr").first
            expect(row).to_be_visible()
            page.get_by_role("button", name="Pause").click()
            row.get_by_role("button").click()
            expect(page.locator("#explanation .candidates tbody tr")).to_have_count(3)
            expect(page.locator("#explanation .chosen")).to_have_count(1)
            self.assertNotIn("Answer shortly", page.content())
        page.locator("#explain").screenshot(path=SHOTS / "explain.png")
        page.get_by_label("Body (JSON)").fill('{"model": "sim", "messages": [{"role": "user", "content": "Hello"}]}')
        page.get_by_role("button", name="Explain", exact=True).click()
        expect(page.locator("#explanation")).to_contain_text("Now, for the pasted request")
        expect(page.locator("#explanation .candidates tbody tr")).to_have_count(3)
        page.get_by_label("Body (JSON)").fill("{")
        page.get_by_role("button", name="Explain", exact=True).click()
        expect(page.locator("#explanation .problem")).to_be_visible()
        self.assert_clean(page)

    def test_the_token_is_asked_for_and_sent_as_a_header(self):
        admin = {"listen": "127.0.0.1:0", "tokens": {"read": [READ], "operate": [OPERATE]}}
        router = self.router(self.engines(["engine-1"]), admin=admin)
        page = self.page(router, expects_refusal=True)
        addresses = []
        page.on("request", lambda request: addresses.append(request.url))
        dialog = page.get_by_role("dialog", name="Admin token")
        expect(dialog).to_be_visible()
        self.assertNotIn("engine-1", page.content())
        page.locator("#token").fill("wrong-0123456789")
        page.get_by_role("button", name="Connect").click()
        expect(page.locator("#login-error")).to_contain_text("does not know this token")
        page.locator("#token").fill(READ)
        page.get_by_role("button", name="Connect").click()
        expect(page.locator("#status")).to_have_text("live")
        page.locator("#fleet-map .cell").first.click()
        expect(page.locator("#worker-detail h4")).to_have_text("engine-1")
        # The role `read` may look; what shows something of prompts needs more.
        page.get_by_role("button", name="Explain", exact=True).click()
        expect(page.locator("#explanation .problem")).to_contain_text("operate")
        self.assertEqual([it for it in addresses if "0123456789" in it], [])
        self.assertEqual(page.evaluate("[localStorage.length, document.cookie]"), [0, ""])
        self.assertEqual(page.evaluate("sessionStorage.length"), 1)
        self.assert_clean(page)

    def test_narrow_dark_and_by_keyboard(self):
        router = self.router(self.engines(["engine-1", "engine-2"]))
        with Load(router.url):
            narrow = self.page(router, viewport={"width": 390, "height": 844}, color_scheme="dark", reduced_motion="reduce")
            expect(narrow.locator("#tail tbody tr").first).to_be_visible()
            self.assert_fits(narrow)
            narrow.screenshot(path=SHOTS / "narrow-dark.png", full_page=True)
            page = self.page(router, color_scheme="dark")
            expect(page.locator("#tail tbody tr").first).to_be_visible()
            background = "getComputedStyle(document.body).backgroundColor"
            dark = page.evaluate(background)
            page.screenshot(path=SHOTS / "dark.png", full_page=True)
            page.keyboard.press("t")
            light = page.evaluate(background)
            self.assertNotEqual(dark, light)
            page.screenshot(path=SHOTS / "light.png", full_page=True)
            page.keyboard.press("/")
            self.assertEqual(page.evaluate("document.activeElement.id"), "fleet-search")
            page.keyboard.type("engine-2")
            expect(page.locator("#fleet-table tbody tr")).to_have_count(1)
            page.keyboard.press("Escape")
            page.keyboard.press("?")
            expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
            page.keyboard.press("Escape")
            page.keyboard.press("3")
            self.assertEqual(page.evaluate("document.activeElement.id"), "decisions")
            self.assert_fits(page)
        self.assert_clean(page)

    def test_screen_readers_get_names(self):
        router = self.router(self.engines(["engine-1", "engine-2"]))
        page = self.page(router)
        with Load(router.url):
            expect(page.locator("#tail tbody tr").first).to_be_visible()
        for role, name in [
            ("navigation", "Sections"),
            ("heading", "Fleet"),
            ("region", "Decisions"),
            ("table", "Workers"),
            ("group", "Requests"),
        ]:
            expect(page.get_by_role(role, name=name).first).to_be_attached()
        expect(page.get_by_role("main")).to_have_count(1)
        expect(page.get_by_role("img", name="Time to first token, now: p50")).to_be_attached()
        expect(page.get_by_role("button", name="engine-1: up, both").first).to_be_attached()
        unnamed = page.evaluate(
            """[...document.querySelectorAll("button, input, select, textarea, a, [role=img]")].filter((it) => {
                const label = it.getAttribute("aria-label") || it.textContent || [...(it.labels ?? [])].map((label) => label.textContent).join("");
                return !label.trim();
            }).map((it) => it.outerHTML)"""
        )
        self.assertEqual(unnamed, [])
        # Each number of the overview and of the tables is called as in /metrics.
        self.assertEqual(page.evaluate("[...document.querySelectorAll('.tile, .legend li')].filter((it) => !/^(warmroute|vllm)/.test(it.title)).length"), 0)
        self.assert_clean(page)

    def test_the_connection_comes_back(self):
        engines = self.engines(["engine-1"])
        router = self.router(engines, admin={"listen": "127.0.0.1:0", "dashboard": {"max_viewers": 1}})
        page = self.page(router)
        expect(page.locator("#status")).to_have_text("live")
        second = self.page(router, expects_refusal=True)
        expect(second.locator("#status")).to_contain_text("1 dashboards are open")
        self.assert_clean(page)
        # From here on lost connections are errors that the browser reports.
        router.kill()
        expect(page.locator("#status")).to_contain_text("disconnected, last update")
        expect(page.locator("#fleet-map .cell")).to_have_count(1)

    def test_a_thousand_workers_with_a_thousand_models_are_searched_and_sorted(self):
        # Ten simulated engines with a base model and 99 adapters each, every one on all addresses of this host.
        models = [f"model-{n:04}" for n in range(1_000)]
        workers = []
        for number in range(10):
            names = [part for model in models[100 * number : 100 * (number + 1)] for part in ("--model", model)]
            engine = Engine(self.directory.name, f"engine-{number}", "--listen", "0.0.0.0:0", "--decode-time", "2ms", *names)
            self.addCleanup(engine.kill)
            port = engine.url.rsplit(":", 1)[1]
            of_engine = range(100 * number, 100 * (number + 1))
            workers += [{"name": f"worker-{n:04}", "url": f"http://127.1.{n // 250}.{n % 250 + 1}:{port}"} for n in of_engine]
        router = Router(self.directory.name, workers, {"fleet": {"health": {"interval": "30s"}}})
        self.addCleanup(router.kill)
        page = self.page(router)
        expect(page.locator("#tile-workers .big")).to_have_text("1,000 of 1,000")
        expect(page.locator("#fleet-map .cell")).to_have_count(1_000)
        with Load(router.url, models=models[::100]):
            page.locator("#fleet-search").fill("worker-0777")
            expect(page.locator("#fleet-table tbody tr")).to_have_count(1)
            page.locator("#fleet-search").fill("")
            # Workers with requests come first, and all others are one line.
            expect(page.locator("#fleet-table .fold")).to_contain_text(re.compile(r"9[0-9]{2}\sidle workers"))
            expect(page.locator("#fleet-table th[aria-sort=descending]")).to_have_text("In flight")
            page.get_by_role("button", name="Show idle workers").click()
            expect(page.locator("#fleet-table tbody tr")).to_have_count(12)
            page.locator("#fleet-map select").select_option("itl")
            expect(page.locator("#fleet-map .map.of-latency")).to_have_count(1)
            page.locator("#fleet-table tbody button").first.click()
            expect(page.locator("#worker-detail h4")).to_contain_text("worker-")
            table = page.locator("#model-table")
            expect(table.locator("tbody tr")).to_have_count(12)
            expect(table).to_contain_text("of 1,000")
            expect(table.locator("tbody tr").first).to_contain_text("model-0")
            table.get_by_role("searchbox").fill("model-0900")
            expect(table.locator("tbody tr")).to_have_count(1)
            expect(table.locator("tbody td").first).to_have_text("100")
            # Requests are counted for it, so that it is the page's own number and no empty row.
            self.assertEqual(table.locator("tbody td").nth(5).get_attribute("title"), "warmroute_routed_prompt_tokens_total")
            expect(table.locator("tbody td").nth(5)).not_to_have_text("0")
            table.get_by_role("searchbox").fill("")
            busy = self.busy_share(page, 3)
            # Of a hundred candidates the best and the worst ten, what is between as one line; and the chosen one.
            page.get_by_label("Body (JSON)").fill('{"model": "model-0000", "messages": [{"role": "user", "content": "Hello"}]}')
            page.get_by_role("button", name="Explain", exact=True).click()
            expect(page.locator("#explanation .gap")).to_contain_text("candidates between these")
            self.assertIn(page.locator("#explanation .candidates tbody tr").count(), (21, 22, 23))
        page.set_viewport_size({"width": 1280, "height": 1250})
        page.keyboard.press("Escape")
        page.keyboard.press("2")
        page.wait_for_timeout(1_000)
        page.screenshot(path=SHOTS / "thousand.png")
        page.locator("#models").screenshot(path=SHOTS / "thousand-models.png")
        # Of the browser's one thread; the page must stay usable beside it.
        self.assertLess(busy, 0.8)
        self.assert_fits(page)
        self.assert_clean(page)


if __name__ == "__main__":
    unittest.main()
