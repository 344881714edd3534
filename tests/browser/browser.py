"""A headless Chromium in front of a real router and simulated engines as processes.

Screenshots are kept in target/dashboard, or in CARGO_TARGET_DIR's.
"""

import json
import os
import pathlib
import sys
import tempfile
import threading
import unittest
import urllib.request

from playwright.sync_api import expect, sync_playwright

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/sdk"))

from cluster import TARGET, Engine, Router, eventually, get  # noqa: E402
from patience import LIMIT_S  # noqa: E402

SHOTS = TARGET / "dashboard"
CHROMIUM = os.environ.get("WARMROUTE_CHROMIUM", "/usr/bin/chromium")
LIMIT_MS = 1_000 * LIMIT_S
expect.set_options(timeout=LIMIT_MS)


class Load:
    """Conversations with the router for as long as it is open."""

    def __init__(self, url, users=4, models=("sim",), headers=()):
        self.models = models
        self.headers = dict(headers)
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.talk, args=(url, user), daemon=True) for user in range(users)]
        for thread in self.threads:
            thread.start()

    def talk(self, url, user):
        turn = 0
        while not self.stopped.is_set():
            turn += 1
            system = f"You are assistant {user}. " + "Answer shortly and kindly. " * 60
            history = [{"role": "user", "content": f"Question {number}?"} for number in range(turn % 12 + 1)]
            body = {"model": self.models[(turn + user) % len(self.models)], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8, "messages": [{"role": "system", "content": system}, *history]}
            try:
                request = urllib.request.Request(
                    f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json", **self.headers}
                )
                urllib.request.urlopen(request, timeout=LIMIT_S).read()
            except OSError:
                self.stopped.wait(0.05)
            self.stopped.wait(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for thread in self.threads:
            thread.join(15)


class BrowserTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        SHOTS.mkdir(parents=True, exist_ok=True)
        cls.playwright = sync_playwright().start()
        cls.browser = cls.playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()

    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.problems = []

    def engines(self, names):
        engines = {}
        for index, name in enumerate(names):
            engines[name] = Engine(self.directory.name, f"engine-{index}", "--model", "sim", "--decode-time", "2ms")
            self.addCleanup(engines[name].kill)
        return engines

    def router(self, engines, **config):
        workers = [{"name": name, "url": engine.url} for name, engine in engines.items()]
        router = Router(self.directory.name, workers, config)
        self.addCleanup(router.kill)
        eventually("the router is ready", lambda: get(f"{router.admin_url}/readyz")[0] == 200)
        return router

    def page(self, router, expects_refusal=False, **options):
        return self.open(router.admin_url, expects_refusal, **options)

    def open(self, address, expects_refusal=False, **options):
        context = self.browser.new_context(viewport={"width": 1280, "height": 900}, **options) if "viewport" not in options else self.browser.new_context(**options)
        self.addCleanup(context.close)
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)

        def on_console(message):
            # The browser itself reports an answer such as 401.
            is_refusal = expects_refusal and "status of" in message.text
            if message.type in ("error", "warning") and not is_refusal:
                self.problems.append(message.text)

        page.on("console", on_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        # Violations of the policy, which the console may show in other words.
        page.add_init_script("window.violations = []; document.addEventListener('securitypolicyviolation', (it) => window.violations.push(it.violatedDirective));")
        page.goto(f"{address}/")
        return page

    def assert_clean(self, page):
        self.assertEqual(self.problems, [])
        self.assertEqual(page.evaluate("window.violations"), [])

    def assert_fits(self, page):
        width, room = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        self.assertLessEqual(width, room)

    def busy_share(self, page, seconds):
        """The share of the time in which the page's thread does something."""
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def values():
            metrics = session.send("Performance.getMetrics")["metrics"]
            by_name = {metric["name"]: metric["value"] for metric in metrics}
            return by_name["Timestamp"], by_name["TaskDuration"]

        started, before = values()
        page.wait_for_timeout(seconds * 1000)
        ended, after = values()
        return (after - before) / (ended - started)
