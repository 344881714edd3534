"""The demo's story on its dashboard: one address, first round_robin, then cache_aware."""

import re
import subprocess
import unittest

from browser import SHOTS, BrowserTest
from cluster import BINARY
from playwright.sync_api import expect


class Demo(BrowserTest):
    def test_one_dashboard_shows_both_policies_and_the_change_between_them(self):
        size = ["--users", "12", "--groups", "6", "--conversations", "1", "--turns", "5", "--system-tokens", "2000"]
        process = subprocess.Popen([BINARY, "demo", *size], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        # The first line, so that one can open it before anything happens.
        address = re.fullmatch(r"Dashboard: (http://\S+)/\n", process.stderr.readline()).group(1)
        page = self.open(address)
        expect(page.locator("#events")).to_contain_text("policy round_robin")
        expect(page.locator("#events")).to_contain_text("policy round_robin → cache_aware")
        for chart in ("#chart-cached", "#chart-ttft"):
            marks = re.compile(r"; round_robin from [0-9:]+Z; cache_aware from [0-9:]+Z")
            expect(page.locator(chart).get_by_role("img")).to_have_attribute("aria-label", marks)
        # The same page all the time, and the requests of both phases on it.
        reasons = page.locator("#chart-decisions .legend")
        expect(reasons.get_by_text("round robin")).to_be_visible()
        expect(reasons.get_by_text("longest prefix")).to_be_visible()
        expect(page.locator("#tile-workers .big")).to_have_text("4 of 4")
        page.wait_for_timeout(4_000)
        page.screenshot(path=SHOTS / "demo.png")
        self.assert_fits(page)
        self.assert_clean(page)


if __name__ == "__main__":
    unittest.main()
