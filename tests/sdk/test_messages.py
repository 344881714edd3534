"""Anthropic's Python SDK against a router and its engines, over real sockets."""

import unittest

try:
    import anthropic
except ImportError:
    anthropic = None

from cluster import Cluster, get
from patience import LIMIT_S

HELLO = [{"role": "user", "content": "Tell me of the sea, at some length, if you would."}]
MODEL = "sim"


WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}


def client(url, **options):
    options = {"max_retries": 0, "timeout": LIMIT_S, "api_key": "none", **options}
    return anthropic.Anthropic(base_url=url, **options)


@unittest.skipUnless(anthropic, "anthropic is not installed")
class WithCluster(unittest.TestCase):
    """Tests that leave the fleet as it is share one."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(config={"api": {"max_body": "100000B"}})
        cls.addClassCleanup(cls.cluster.close)
        cls.client = client(cls.cluster.router.url)
        cls.addClassCleanup(cls.client.close)

    def create(self, **body):
        return self.client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": HELLO, **body})


class Answers(WithCluster):
    def test_message(self):
        message = self.create(system="Be brief.")
        self.assertEqual([block.type for block in message.content], ["text"])
        self.assertTrue(message.content[0].text)
        self.assertEqual(message.stop_reason, "max_tokens")
        self.assertEqual(message.usage.output_tokens, 5)
        self.assertTrue(message._request_id)

    def test_stream_is_accumulated(self):
        with self.client.messages.stream(model=MODEL, max_tokens=7, messages=HELLO) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        self.assertTrue(text)
        self.assertEqual(message.content[0].text, text)
        self.assertEqual(message.usage.output_tokens, 7)
        whole = self.create(max_tokens=7)
        self.assertEqual(whole.content[0].text, text)

    def test_events_come_in_order(self):
        events = [event.type for event in self.create(stream=True)]
        self.assertEqual(events[:2], ["message_start", "content_block_start"])
        self.assertEqual(events[-3:], ["content_block_stop", "message_delta", "message_stop"])
        self.assertEqual(events.count("content_block_delta"), 5)

    def test_thinking(self):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        with self.client.messages.stream(
            model=MODEL, max_tokens=1030, messages=HELLO, thinking=thinking
        ) as stream:
            message = stream.get_final_message()
        self.assertEqual([block.type for block in message.content], ["thinking", "text"])

    def test_tools_are_called_and_answered(self):
        for stream in (False, True):
            with self.subTest(stream=stream):
                self.converse(stream)

    def converse(self, stream):
        asked = {"model": MODEL, "max_tokens": 9, "tools": [WEATHER]}
        if stream:
            with self.client.messages.stream(messages=HELLO, **asked) as events:
                first = events.get_final_message()
        else:
            first = self.client.messages.create(messages=HELLO, **asked)
        self.assertEqual(first.stop_reason, "tool_use")
        call = first.content[-1]
        self.assertEqual((call.type, call.name), ("tool_use", "weather"))
        self.assertEqual(sorted(call.input), ["city", "days"])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        turns = [
            *HELLO,
            {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"}) for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second = self.client.messages.create(messages=turns, **asked)
        self.assertEqual(second.content[0].type, "text")

    def test_a_second_turn_finds_the_first_cached(self):
        system = "An opening of its own: " + "many words of it, " * 50
        self.create(system=system)
        again = self.create(system=system, messages=[*HELLO, {"role": "assistant", "content": "So."}, *HELLO])
        self.assertGreater(again.usage.cache_read_input_tokens, 0)

    def test_tokens_are_counted(self):
        counted = self.client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.", tools=[WEATHER])
        usage = self.create(system="Be brief.", tools=[WEATHER]).usage
        used = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        self.assertEqual(counted.input_tokens, used)

    def test_beta_messages(self):
        message = self.client.beta.messages.create(model=MODEL, max_tokens=3, messages=HELLO, betas=["tools-2024-04-04"])
        self.assertEqual(message.usage.output_tokens, 3)


class Errors(WithCluster):
    def assert_refused(self, kind, type, call, *part):
        with self.assertRaises(kind) as caught:
            call()
        error = caught.exception
        self.assertEqual(error.body["type"], "error")
        self.assertEqual(error.body["error"]["type"], type)
        self.assertTrue(error.request_id)
        for text in part:
            self.assertIn(text, error.message)

    def test_errors_are_typed(self):
        self.assert_refused(
            anthropic.NotFoundError, "not_found_error", lambda: self.create(model="none"), "none"
        )
        extra = {"kv_transfer_params": {"do_remote_decode": True}}
        self.assert_refused(
            anthropic.BadRequestError, "invalid_request_error", lambda: self.create(extra_body=extra), "kv_transfer_params"
        )
        self.assert_refused(
            anthropic.RequestTooLargeError, "request_too_large", lambda: self.create(system="x" * 200_000)
        )

    def test_keys(self):
        tenants = [{"name": "a", "keys": ["sk-a"], "limits": {"requests_per_minute": 1, "burst": "60s"}}]
        with Cluster(engines=1, config={"tenants": tenants}) as cluster:
            wrong = client(cluster.router.url, api_key="sk-b")
            self.addCleanup(wrong.close)
            body = {"model": MODEL, "max_tokens": 2, "messages": HELLO}
            self.assert_refused(
                anthropic.AuthenticationError, "authentication_error", lambda: wrong.messages.create(**body)
            )
            right = client(cluster.router.url, api_key="sk-a")
            self.addCleanup(right.close)
            self.assertEqual(right.messages.create(**body).usage.output_tokens, 2)
            self.assert_refused(
                anthropic.RateLimitError, "rate_limit_error", lambda: right.messages.create(**body)
            )
            token = client(cluster.router.url, api_key=None, auth_token="sk-a")
            self.addCleanup(token.close)
            self.assert_refused(
                anthropic.RateLimitError, "rate_limit_error", lambda: token.messages.create(**body)
            )

    def test_a_stream_that_breaks_off_is_an_error(self):
        with Cluster(engines=1) as cluster:
            get(f"{cluster.engines[0].url}/sim/faults", b'{"cut_after_tokens": 2}')
            broken = client(cluster.router.url)
            self.addCleanup(broken.close)
            with self.assertRaises(anthropic.APIStatusError) as caught:
                with broken.messages.stream(model=MODEL, max_tokens=5, messages=HELLO) as stream:
                    stream.get_final_message()
            self.assertEqual(caught.exception.body["error"]["type"], "api_error")


if __name__ == "__main__":
    unittest.main()
