"""The seventeen situations that the public Open Responses suite is about, in words of our own.

Against engines and a router of its own, or against any server: OPEN_RESPONSES_URL=http://localhost:8080/v1
OPEN_RESPONSES_MODEL=name. Answers are held to the public document's types alone, as the suite does."""

import json
import os
import time
import unittest

import shapes
import wire
from cluster import ENGINE_ARGUMENTS, Cluster
from situations import PIXEL, message
from patience import LIMIT_S

URL = os.environ.get("OPEN_RESPONSES_URL")
MODEL = os.environ.get("OPEN_RESPONSES_MODEL", "sim")
GET_WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "What the weather is like in a place.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}


def fits(response):
    shapes.fits_document(shapes.document.ResponseResource, response)


@unittest.skipIf(shapes.document is None, "the types of the public document want Python 3.11")
class OpenResponses(unittest.TestCase):
    #: Of the engines. A summary must end by itself.
    arguments = (*ENGINE_ARGUMENTS, "--stop-after", "32")

    @classmethod
    def setUpClass(cls):
        if URL:
            cls.url = URL.removesuffix("/v1")
            return
        config = {"responses": {"advanced": {"reasoning_events": "open_responses"}}}
        cls.cluster = Cluster(config=config, engine_arguments=cls.arguments)
        cls.addClassCleanup(cls.cluster.close)
        cls.url = cls.cluster.router.url

    def completed(self, response):
        fits(response)
        self.assertEqual(response["status"], "completed")
        self.assertTrue(response["output"])
        return response

    def whole(self, given, **options):
        answer = wire.whole(self.url, {"model": MODEL, "input": given, "stream": False, **options})
        self.assertIsNone(answer.error)
        return self.completed(answer.response)

    def turn(self, connection, given, **options):
        """The response of a turn that completes, each of its events of a type of the document."""
        connection.send(json.dumps({"type": "response.create", "model": MODEL, "input": given, **options}))
        while True:
            event = self.event(json.loads(connection.recv(timeout=LIMIT_S)))
            if event["type"] == "error":
                return event
            if event["type"] in ("response.completed", "response.failed", "response.incomplete"):
                return self.completed(event["response"])

    def event(self, event):
        if event["type"] == "error":
            shapes.fits_document(shapes.document.WebSocketErrorEvent, event)
        else:
            shapes.fits_document(shapes.DOCUMENT_EVENTS[event["type"]], event)
        return event

    def assert_unknown(self, event):
        self.assertEqual((event["type"], event["error"]["code"]), ("error", "previous_response_not_found"))

    def test_01_basic_response(self):
        self.whole([message("user", "Greet me in three words.")])

    def test_02_assistant_phase(self):
        self.whole(
            [
                message("user", "How much is 6 times 7?"),
                message("assistant", "Multiplying.", phase="commentary"),
                message("assistant", "42", phase="final_answer"),
                message("user", "Only the number again."),
            ]
        )

    def test_03_response_output_phase_schema(self):
        """Of the types, not of a server: messages may have a phase."""
        for phase in ("commentary", "final_answer", None):
            part = {"type": "output_text", "text": "42", "annotations": [], "logprobs": []}
            item = {"id": "msg_1", "status": "completed", "phase": phase, **message("assistant", [part])}
            shapes.fits_document(shapes.document.Message, item)

    def test_04_streaming_response(self):
        body = {"model": MODEL, "input": [message("user", "Name five numbers in order.")], "stream": True}
        status, headers, text = wire.call("POST", f"{self.url}/v1/responses", body)
        self.assertEqual(status, 200, text)
        self.assertIn("text/event-stream", headers["content-type"])
        events = [self.event(event) for event in wire.frames(text)]
        self.assertGreater(len(events), 3)
        self.assertEqual(events[-1]["type"], "response.completed")
        self.completed(events[-1]["response"])

    def test_05_websocket_response(self):
        with wire.websocket(self.url) as connection:
            self.turn(connection, [message("user", "Greet me.")])

    def test_06_websocket_sequential_responses(self):
        with wire.websocket(self.url) as connection:
            first = self.turn(connection, [message("user", "Greet me.")], store=False)
            second = self.turn(connection, [message("user", "Say goodbye.")], store=False)
        self.assertNotEqual(first["id"], second["id"])

    def test_07_websocket_continuation(self):
        with wire.websocket(self.url) as connection:
            first = self.turn(connection, [message("user", "I am called Alma.")], store=False)
            more = {"store": False, "previous_response_id": first["id"]}
            second = self.turn(connection, [message("user", "What am I called?")], **more)
        self.assertEqual(second["previous_response_id"], first["id"])

    def test_08_websocket_reconnect_store_false_recovery(self):
        with wire.websocket(self.url) as connection:
            first = self.turn(connection, [message("user", "I am called Alma.")], store=False)
        with wire.websocket(self.url) as connection:
            more = {"store": False, "previous_response_id": first["id"]}
            self.assert_unknown(self.turn(connection, [message("user", "What am I called?")], **more))
            whole = [message("user", "I am called Alma."), message("assistant", "Hello."), message("user", "And?")]
            self.turn(connection, whole, store=False)

    def test_09_websocket_previous_response_not_found(self):
        missing = f"resp_missing_{int(time.time())}"
        with wire.websocket(self.url) as connection:
            self.assert_unknown(self.turn(connection, [message("user", "And?")], previous_response_id=missing))

    def test_10_websocket_failed_continuation_evicts_cache(self):
        with wire.websocket(self.url) as connection:
            first = self.turn(connection, [message("user", "Greet me.")], store=False)
            more = {"store": False, "previous_response_id": first["id"]}
            alone = [{"type": "function_call_output", "call_id": "call_missing", "output": "{}"}]
            self.assertEqual(self.turn(connection, alone, **more)["type"], "error")
            self.assert_unknown(self.turn(connection, [message("user", "And?")], **more))

    def compact(self, **body):
        return wire.ask("POST", f"{self.url}/v1/responses/compact", body)

    def test_11_websocket_compact_new_chain(self):
        given = [message("user", "I am called Alma."), message("assistant", "Hello Alma."), message("user", "Note it.")]
        window = self.compact(model=MODEL, input=given)
        self.assertIsNone(window.error)
        with wire.websocket(self.url) as connection:
            more = [*window.response["output"], message("user", "What am I called?")]
            self.turn(connection, more, store=False, tools=[])

    def test_12_system_prompt(self):
        self.whole([message("system", "You are a gardener."), message("user", "Greet me.")])

    def test_13_tool_calling(self):
        response = self.whole([message("user", "Is it raining in San Francisco?")], tools=[GET_WEATHER])
        self.assertIn("function_call", [item["type"] for item in response["output"]])

    def test_14_image_input(self):
        parts = [{"type": "input_text", "text": "What is in it?"}, {"type": "input_image", "image_url": PIXEL}]
        self.whole([message("user", parts)])

    def test_15_multi_turn(self):
        self.whole([message("user", "I am called Alma."), message("assistant", "Hello."), message("user", "And?")])

    def test_16_compact_response(self):
        given = [message("user", "I am called Alma."), message("user", "I like tea.")]
        window = self.compact(model=MODEL, input=given, prompt_cache_key="key")
        self.assertIsNone(window.error)
        shapes.fits_document(shapes.document.CompactResource, window.response)
        self.assertEqual(window.response["object"], "response.compaction")
        self.assertIn("compaction", [item["type"] for item in window.response["output"]])

    def test_17_compact_missing_model(self):
        self.assertIn(self.compact(input=[message("user", "x")]).status, (400, 422))


class OpenResponsesOverChat(OpenResponses):
    arguments = (*OpenResponses.arguments, "--no-responses")

    @classmethod
    def setUpClass(cls):
        if URL:
            raise unittest.SkipTest("one server is enough")
        super().setUpClass()


if __name__ == "__main__":
    unittest.main()
