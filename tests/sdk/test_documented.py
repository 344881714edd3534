"""Each row of the tables in docs/responses.md that say what is refused, ignored or done otherwise."""

import json
import unittest

import shapes
import wire
from cluster import Cluster
from situations import MODEL, TEXT, TIDE, message
from patience import LIMIT_S

CALLS = (
    {"type": "computer_call", "call_id": "c", "id": "cu_1", "status": "completed", "pending_safety_checks": [],
     "action": {"type": "screenshot"}},
    {"type": "computer_call_output", "call_id": "c",
     "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,iVBORw0KGgo="}},
    {"type": "local_shell_call", "call_id": "l", "id": "lsh_1", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "id": "l", "call_id": "l", "output": "a"},
    {"type": "mcp_call", "id": "mcp_1", "name": "n", "server_label": "s", "arguments": "{}", "output": "done"},
)
#: Stored and listed, not sent.
HOSTED = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}


@unittest.skipIf(wire.connect is None, "WebSocket mode wants Python 3.10")
class Documented(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.close)
        cls.url = cls.cluster.router.url

    def create(self, **body):
        return wire.whole(self.url, {"model": MODEL, "input": TEXT, **body})

    def test_what_is_refused_by_name(self):
        for body, status, code, param in (
            ({"store": "yes"}, 400, "invalid_type", "store"),
            ({"top_p": 1.5}, 400, "invalid_value", "top_p"),
            ({"tools": [{"type": "function"}]}, 400, "missing_required_parameter", "tools[0].name"),
            ({"model": "none", "background": True}, 404, "model_not_found", "model"),
            ({"request_id": "x"}, 400, "unsupported_parameter", "request_id"),
            ({"ec_transfer_params": {}}, 400, "unsupported_parameter", "ec_transfer_params"),
            ({"prompt": {"id": "p"}}, 400, "unsupported_parameter", "prompt"),
            ({"moderation": {"policy": "x"}}, 400, "unsupported_parameter", "moderation.policy"),
            (
                {"background": True, "background_options": {"continuation_id": "x"}},
                400,
                "unsupported_parameter",
                "background_options.continuation_id",
            ),
            ({"tool_choice": {"type": "programmatic_tool_calling"}}, 400, "unsupported_parameter", "tool_choice"),
        ):
            with self.subTest(body):
                refused = self.create(**body)
                self.assertIsNotNone(refused.error)
                shapes.check_error(refused.error)
                self.assertEqual((refused.status, refused.error["code"], refused.error["param"]), (status, code, param))
        refused = self.create(input=[message("user", TEXT), {"type": "configuration_update"}])
        self.assertEqual(refused.status, 400)
        self.assertTrue(refused.error["param"].startswith("input[1]"), refused)

    def test_what_is_ignored(self):
        for body in ({"not_a_member": 1}, {"service_tier": "ultrafast"}, {"stream_options": None}):
            with self.subTest(body):
                answer = self.create(**body)
                self.assertIsNone(answer.error)
                shapes.check_response(answer.response)

    def test_items_of_other_tools(self):
        answer = self.create(input=[message("user", TEXT), *CALLS, HOSTED, message("user", "So?")])
        self.assertIsNone(answer.error)
        without = self.create(input=[message("user", TEXT), *CALLS, message("user", "So?")])
        self.assertEqual(answer.response["usage"]["input_tokens"], without.response["usage"]["input_tokens"])
        path = f"{self.url}/v1/responses/{answer.response['id']}/input_items?order=asc&limit=100"
        kinds = [item["type"] for item in wire.ask("GET", path).response["data"]]
        self.assertEqual(kinds, ["message", *(item["type"] for item in CALLS), HOSTED["type"], "message"])

    def test_allowed_tools_are_echoed_and_called(self):
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "tide"}]}
        for create in (wire.whole, wire.streamed, wire.over_websocket):
            answer = create(self.url, {"model": MODEL, "input": TEXT, "tools": [TIDE], "tool_choice": choice})
            self.assertIsNone(answer.error)
            self.assertEqual(answer.response["tool_choice"], choice)
            self.assertEqual([item["type"] for item in answer.response["output"]], ["function_call"])

    def test_tools_that_an_item_lists_are_called(self):
        tools = {"type": "additional_tools", "role": "developer", "tools": [TIDE]}
        answer = self.create(input=[tools, message("user", TEXT)], tool_choice="required")
        self.assertIsNone(answer.error)
        self.assertEqual([item["type"] for item in answer.response["output"]], ["function_call"])

    def frame(self, connection, frame):
        connection.send(json.dumps(frame) if isinstance(frame, dict) else frame)
        return json.loads(connection.recv(timeout=LIMIT_S))

    def test_frames_of_a_websocket(self):
        body = {"type": "response.create", "model": MODEL, "input": TEXT, "max_output_tokens": 4}
        with wire.websocket(self.url) as connection:
            for frame in (
                {**body, "stream": False},
                {**body, "background": True},
                {"type": "response.inject"},
                {"type": "response.cancel"},
                b"binary",
                "no JSON",
            ):
                with self.subTest(frame):
                    error = self.frame(connection, frame)
                    self.assertEqual((error["type"], error["status"]), ("error", 400))
                    self.assertNotIn("stream_id", error)
                    shapes.check_error(error["error"])
            steer = {"type": "response.steer", "previous_response_id": "resp_1", "input": []}
            failed = self.frame(connection, steer)
            self.assertEqual(failed["type"], "response.steer.failed")
            self.assertEqual(failed["error"]["code"], "steering_not_supported")
            # Of no effect: the next frame is the beginning of the turn.
            connection.send(json.dumps({"type": "response.processed", "response_id": "resp_1"}))
            more = {"stream": True, "stream_options": {}, "client_metadata": {"a": "b"}}
            answer = wire.turn(connection, {**body, **more})
            self.assertEqual(answer.response["status"], "incomplete")

    def test_without_websockets_an_upgrade_is_426(self):
        for config in ({"websocket": {"enabled": False}}, {"mode": "pass_through"}):
            with self.subTest(config), Cluster(engines=1, config={"responses": config}) as cluster:
                upgrade = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13",
                           "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
                status, headers, _ = wire.call("GET", f"{cluster.router.url}/v1/responses", headers=upgrade)
                self.assertEqual((status, headers["connection"].lower()), (426, "close"))


if __name__ == "__main__":
    unittest.main()
