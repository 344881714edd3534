"""The Responses API to the letter: each situation over HTTP, as a stream and over a WebSocket, against one router with its
memory, one with Redis and three in turn. What is checked of every answer stands in shapes.py and stream_order.py."""

import itertools
import json
import unittest

from openai.types import conversations as sdk_conversations
from openai.types import responses as sdk
from openai.types.responses.response_item import ResponseItem

import shapes
import wire
from cluster import ENGINE_ARGUMENTS, Cluster, eventually, get
from shapes import Mismatch, check, check_error, check_response
from situations import MODEL, PIXEL, REFUSED, REPEATED, SITUATIONS, TEXT, TIDE, message

WAYS = {"whole": wire.whole, "streamed": wire.streamed, "websocket": wire.over_websocket}


def plain(items):
    """What items say, without what is minted for them."""
    minted = ("id", "call_id", "encrypted_content")
    return [{name: value for name, value in item.items() if name not in minted} for item in items]


class Fleet(unittest.TestCase):
    """The tests of every fleet; those below differ in their store, their replicas and their engines."""

    replicas = 1
    redis = False
    arguments = ENGINE_ARGUMENTS

    @classmethod
    def setUpClass(cls):
        if cls is Fleet:
            raise unittest.SkipTest("a base")
        if shapes.document is None:
            raise unittest.SkipTest("the types of the public document want Python 3.11")
        cls.cluster = Cluster(replicas=cls.replicas, redis=cls.redis, engine_arguments=cls.arguments)
        cls.addClassCleanup(cls.cluster.close)
        cls.turns = itertools.cycle([router.url for router in cls.cluster.routers])

    @property
    def url(self):
        """Of the router whose turn it is."""
        return next(self.turns)

    def ask(self, method, path, body=None):
        return wire.ask(method, f"{self.url}/v1{path}", body)

    def create(self, way="whole", **body):
        answer = WAYS[way](self.url, {"model": MODEL, **body})
        self.assertIsNone(answer.error)
        check_response(answer.response)
        return answer.response

    def check_ended(self, response, body, status):
        self.assertEqual(response["status"], status)
        self.assertEqual(response["model"], MODEL)
        self.assertIsNone(response["error"])
        self.assertIs(response["background"], False)
        if status == "completed":
            self.assertIsNone(response["incomplete_details"])
            self.assertGreaterEqual(response["completed_at"], response["created_at"])
        else:
            self.assertEqual(response["incomplete_details"], {"reason": "max_output_tokens"})
            self.assertIsNone(response["completed_at"])
        states = [item.get("status") for item in response["output"]]
        self.assertLessEqual({*states[:-1]}, {"completed", None}, "only the last item is cut")
        usage = response["usage"]
        self.assertEqual(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
        self.assertLessEqual(usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"])
        self.assertLessEqual(usage["output_tokens_details"]["reasoning_tokens"], usage["output_tokens"])
        for name in set(body) & set(REPEATED):
            self.assertEqual(response[name], body[name], name)
        for name in ("text", "reasoning"):
            for member, value in body.get(name, {}).items():
                # A format is repeated with what it did not name.
                said = response[name][member]
                self.assertEqual({**said, **value} if isinstance(value, dict) else value, said)
        self.assertEqual([tool["name"] for tool in response["tools"]], [tool["name"] for tool in body.get("tools", [])])

    def test_every_situation_in_every_way(self):
        for name, (body, status, items) in SITUATIONS.items():
            said = {}
            for way, create in WAYS.items():
                with self.subTest(name, way=way):
                    answer = create(self.url, {"model": MODEL, **body})
                    self.assertIsNone(answer.error)
                    response = answer.response
                    check_response(response)
                    self.check_ended(response, body, status)
                    kinds = [item["type"] for item in response["output"]]
                    self.assertTrue(kinds)
                    if items:
                        self.assertEqual(kinds, items)
                    said[way] = plain(response["output"])
                    self.check_kept(response)
            with self.subTest(name):
                self.assertEqual(len(said), len(WAYS))
                for way, output in said.items():
                    self.assertEqual(output, said["whole"], way)

    def check_kept(self, response):
        """What is stored is what was answered, on whichever replica."""
        kept = self.ask("GET", f"/responses/{response['id']}")
        if response["store"]:
            self.assertEqual(kept.response, response)
        else:
            self.assertEqual(kept.status, 404)

    def test_refusals_in_every_way(self):
        for name, (body, status, code, param) in REFUSED.items():
            body = {"model": MODEL, **body}
            if body["model"] is None:
                del body["model"]
            said = {}
            for way, create in WAYS.items():
                with self.subTest(name, way=way):
                    answer = create(self.url, body)
                    self.assertIsNotNone(answer.error, answer)
                    check_error(answer.error)
                    if way == "websocket" and code is None:
                        # Frames have a code always.
                        self.assertEqual(answer.error["code"], "invalid_request_error")
                        answer.error["code"] = None
                    self.assertEqual(answer.status, status, answer)
                    self.assertEqual((answer.error["code"], answer.error["param"]), (code, param), answer)
                    self.assertEqual(answer.error["type"], "invalid_request_error")
                    said[way] = answer.error
            with self.subTest(name):
                for way, error in said.items():
                    self.assertEqual(error, said["whole"], way)

    def test_turns_that_continue(self):
        for way in WAYS:
            with self.subTest(way=way):
                first = self.create(way, input="When is high tide?", tools=[TIDE], tool_choice="required")
                [call] = first["output"]
                outcome = {"type": "function_call_output", "call_id": call["call_id"], "output": "At six."}
                second = self.create(way, input=[outcome], tools=[TIDE], previous_response_id=first["id"])
                more = {"tools": [TIDE], "tool_choice": "none", "previous_response_id": second["id"]}
                third = self.create(way, input="And low tide?", **more)
                branch = self.create(way, input="And tomorrow?", **more)
                for before, after in ((first, second), (second, third), (second, branch)):
                    self.assertEqual(after["previous_response_id"], before["id"])
                    self.assertGreater(after["usage"]["input_tokens"], before["usage"]["input_tokens"])
                self.assertEqual(self.ask("DELETE", f"/responses/{second['id']}").status, 200)
                self.assertEqual(self.ask("GET", f"/responses/{third['id']}").response, third)

    def test_input_items(self):
        given = [
            message("developer", "Be short."),
            message("user", [{"type": "input_image", "image_url": PIXEL}, {"type": "input_text", "text": TEXT}]),
            message("assistant", "A pixel."),
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c", "name": "tide", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "six"},
            message("user", TEXT),
        ]
        response = self.create(input=given)
        seen = []
        after = ""
        while True:
            page = self.ask("GET", f"/responses/{response['id']}/input_items?order=asc&limit=3{after}").response
            check(sdk.ResponseItemList, page)
            for item in page["data"]:
                check(ResponseItem, item)
            self.assertEqual((page["first_id"], page["last_id"]), (page["data"][0]["id"], page["data"][-1]["id"]))
            seen += page["data"]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        self.assertEqual([item["type"] for item in seen], [item["type"] for item in given])
        self.assertEqual(len({item["id"] for item in seen}), len(given))
        latest = self.ask("GET", f"/responses/{response['id']}/input_items?limit=100").response
        self.assertEqual(latest["data"], seen[::-1])

    def test_the_end_of_a_response(self):
        response = self.create(input=TEXT)
        path = f"/responses/{response['id']}"
        refused = self.ask("POST", f"{path}/cancel")
        self.assertEqual((refused.status, refused.error["message"]), (400, "Cannot cancel a synchronous response."))
        deleted = self.ask("DELETE", path)
        self.assertEqual(deleted.response, {"id": response["id"], "object": "response.deleted", "deleted": True})
        for method, below in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            for _ in range(self.replicas):
                answer = self.ask(method, path + below)
                self.assertEqual(answer.status, 404)
                check_error(answer.error)
                self.assertEqual(answer.error["message"], f"Response with id '{response['id']}' not found.")

    def test_in_the_background(self):
        for body, status, _ in (SITUATIONS["a text"], SITUATIONS["reasoning"], SITUATIONS["an answer that is cut"]):
            with self.subTest(body):
                started = self.create(**body, background=True)
                self.assertEqual((started["status"], started["output"], started["usage"]), ("queued", [], None))
                ended = eventually("it ends", lambda: self.ended(started["id"]))
                self.assertEqual((ended["status"], ended["background"]), (status, True))
                for _ in range(self.replicas):
                    cancelled = self.ask("POST", f"/responses/{started['id']}/cancel")
                    self.assertEqual(cancelled.response, ended)

    def ended(self, response_id):
        response = self.ask("GET", f"/responses/{response_id}").response
        check_response(response)
        return None if response["status"] in ("queued", "in_progress") else response

    def test_a_background_stream_is_the_same_for_every_reader(self):
        body = {"input": TEXT, "reasoning": {"effort": "low"}, "background": True}
        answer = wire.streamed(self.url, {"model": MODEL, **body})
        self.assertEqual([event["type"] for event in answer.events[:3]], [
            "response.created", "response.queued", "response.in_progress"])
        response_id = answer.response["id"]
        for _ in range(self.replicas):
            self.assertEqual(wire.resumed(self.url, response_id), answer.events)
            last = len(answer.events) - 1
            for after in (0, 5, last - 1):
                self.assertEqual(wire.resumed(self.url, response_id, after), answer.events[after + 1:])
            # Not an empty stream, which clients take for a broken one.
            self.assertEqual(wire.resumed(self.url, response_id, last), answer.events[last:])
        self.check_kept(answer.response)

    def test_a_background_response_is_cancelled(self):
        self.slow_down()
        started = self.create(input=TEXT, background=True)
        cancelled = self.ask("POST", f"/responses/{started['id']}/cancel").response
        check_response(cancelled)
        self.assertEqual(cancelled["status"], "cancelled")
        for _ in range(self.replicas):
            self.assertEqual(self.ask("POST", f"/responses/{started['id']}/cancel").response["status"], "cancelled")
        self.assertEqual(wire.resumed(self.url, started["id"]).error["param"], "stream")
        body = {"model": MODEL, "input": TEXT, "background": True}
        with wire.open_stream(self.url, body) as (created, rest):
            response_id = created["response"]["id"]
            self.assertEqual(self.ask("POST", f"/responses/{response_id}/cancel").response["status"], "cancelled")
            events = [created, *rest()]
        self.assertEqual(wire.in_order(events).response["status"], "cancelled")
        self.assertEqual(events[-1]["type"], "response.incomplete")
        for _ in range(self.replicas):
            self.assertEqual(wire.resumed(self.url, response_id), events)

    def slow_down(self):
        self.set_faults({"slow_first_ms": 2000})
        self.addCleanup(self.set_faults, {})

    def set_faults(self, faults):
        for engine in self.cluster.engines:
            status, text = get(f"{engine.url}/sim/faults", json.dumps(faults).encode())
            self.assertEqual(status, 200, text)

    def test_an_engine_that_fails(self):
        for faults in ({"cut_after_tokens": 3}, {"error_after_tokens": 3}):
            self.set_faults(faults)
            self.addCleanup(self.set_faults, {})
            for way, create in WAYS.items():
                with self.subTest(faults, way=way):
                    # A text of its own: what fails twice in the same way is not sent again.
                    answer = create(self.url, {"model": MODEL, "input": f"{faults} {way}"})
                    if way == "whole":
                        self.assertEqual(answer.status // 100, 5)
                        check_error(answer.error)
                        self.assertEqual(answer.error["type"], "server_error")
                        continue
                    self.assertEqual(answer.response["status"], "failed")
                    self.assertEqual(answer.response["error"]["code"], "server_error")
                    self.assertIsNone(answer.response["completed_at"])
                    self.assertTrue(answer.events[-1]["response"]["output"], "what there was")

    def test_counted_tokens(self):
        for name in ("a text", "rules of the system and of a developer", "a function that must be called"):
            with self.subTest(name):
                body = {"model": MODEL, **SITUATIONS[name][0]}
                counted = self.ask("POST", "/responses/input_tokens", body).response
                self.assertEqual(set(counted), {"object", "input_tokens"})
                self.assertEqual(counted["object"], "response.input_tokens")
                response = wire.whole(self.url, body).response
                self.assertEqual(counted["input_tokens"], response["usage"]["input_tokens"])

    def test_compacted(self):
        # A summary must end by itself.
        self.set_faults({"stop_at_once": True})
        self.addCleanup(self.set_faults, {})
        given = [message("user", "I live in Lisbon."), message("assistant", "Good."), message("user", TEXT)]
        window = self.ask("POST", "/responses/compact", {"model": MODEL, "input": given}).response
        self.assertEqual(set(window), {"id", "object", "created_at", "output", "usage"})
        self.assertEqual(window["object"], "response.compaction")
        self.assertEqual([item["type"] for item in window["output"]], ["message", "message", "compaction"])
        for item in window["output"]:
            check(ResponseItem, item)
        check(sdk.ResponseUsage, window["usage"])
        for way in WAYS:
            with self.subTest(way=way):
                self.create(way, input=[*window["output"], message("user", "Go on.")])
                self.create(way, input="Go on.", previous_response_id=window["id"])
                large = [{"type": "compaction", "compact_threshold": 1000000}]
                inline = self.create(way, input=given, context_management=large)
                self.assertEqual([item["type"] for item in inline["output"]], ["message"])
                inline = self.create(way, input=[*given, {"type": "compaction_trigger"}])
                self.assertEqual([item["type"] for item in inline["output"]], ["compaction"])
        refused = self.ask("POST", "/responses/compact", {"input": given})
        self.assertEqual((refused.status, refused.error["param"]), (400, "model"))

    def test_conversations(self):
        body = {"items": [message("user", "Hello.")], "metadata": {"a": "b"}}
        created = self.ask("POST", "/conversations", body).response
        check(sdk_conversations.Conversation, created)
        path = f"/conversations/{created['id']}"
        for way in WAYS:
            body = {"conversation": created["id"], "tools": [TIDE], "reasoning": {"effort": "low"}}
            response = self.create(way, input=TEXT, **body)
            self.assertEqual(response["conversation"], {"id": created["id"]})
            call = response["output"][-1]
            if call["type"] == "function_call":
                outcome = {"type": "function_call_output", "call_id": call["call_id"], "output": "six"}
                self.create(way, input=[outcome], conversation=created["id"])
        page = self.ask("GET", f"{path}/items?limit=100&order=asc").response
        check(sdk_conversations.ConversationItemList, page)
        for item in page["data"][:3]:
            got = self.ask("GET", f"{path}/items/{item['id']}").response
            check(sdk_conversations.ConversationItem, got)
            self.assertEqual(got, item)
        added = self.ask("POST", f"{path}/items", {"items": [message("user", "More.")]}).response
        check(sdk_conversations.ConversationItemList, added)
        left = self.ask("DELETE", f"{path}/items/{added['data'][0]['id']}").response
        check(sdk_conversations.Conversation, left)
        changed = self.ask("POST", path, {"metadata": {"c": "d"}}).response
        self.assertEqual(changed, {**created, "metadata": {"c": "d"}})
        self.assertEqual(self.ask("GET", path).response, changed)
        deleted = self.ask("DELETE", path).response
        self.assertEqual(deleted, {"id": created["id"], "object": "conversation.deleted", "deleted": True})
        self.assertEqual(self.ask("GET", path).status, 404)

    def test_a_connection_keeps_what_is_not_stored(self):
        body = {"model": MODEL, "store": False}
        with wire.websocket(self.url) as connection:
            first = wire.turn(connection, {**body, "input": "I live in Lisbon."}).response
            second = wire.turn(connection, {**body, "input": "Where?", "previous_response_id": first["id"]}).response
            self.assertGreater(second["usage"]["input_tokens"], first["usage"]["input_tokens"])
            lane = {**body, "stream_id": "a.lane-1", "input": "And?", "previous_response_id": second["id"]}
            self.assertEqual(wire.turn(connection, lane).response["previous_response_id"], second["id"])
            # A continuation that fails takes along what it named.
            wrong = [{"type": "function_call_output", "call_id": "call_none", "output": "x"}]
            refused = wire.turn(connection, {**body, "input": wrong, "previous_response_id": second["id"]})
            self.assertEqual(refused.status, 400)
            check_error(refused.error)
            lost = wire.turn(connection, {**body, "input": "Where?", "previous_response_id": second["id"]})
            self.assertEqual((lost.status, lost.error["code"]), (400, "previous_response_not_found"))
        with wire.websocket(self.url) as connection:
            lost = wire.turn(connection, {**body, "input": "Where?", "previous_response_id": second["id"]})
            self.assertEqual((lost.status, lost.error["code"]), (400, "previous_response_not_found"))
            self.assertEqual(wire.turn(connection, {**body, "input": TEXT}).response["status"], "completed")


class OneWithMemory(Fleet):
    def test_reasoning_events_of_the_public_document(self):
        config = {"responses": {"advanced": {"reasoning_events": "open_responses"}}}
        with Cluster(engines=1, config=config) as cluster:
            body = {"model": MODEL, "input": TEXT, "reasoning": {"effort": "low"}}
            answer = wire.streamed(cluster.router.url, body, reasoning="response.reasoning")
            self.assertIn("response.reasoning.delta", [event["type"] for event in answer.events])

    def test_the_checks_find_what_is_wrong(self):
        """Each event of a stream left out, and each member of a response, is found."""
        body = {"model": MODEL, "input": TEXT, "reasoning": {"effort": "low"}, "max_output_tokens": 24}
        good = wire.streamed(self.url, body).events
        for place, event in enumerate(good):
            rest = [*good[:place], *good[place + 1 :]]
            numbered = [{**event, "sequence_number": number} for number, event in enumerate(rest)]
            with self.subTest(without=event["type"]), self.assertRaises(Mismatch):
                wire.in_order(numbered)
        for place in range(1, len(good)):
            swapped = [*good[: place - 1], good[place], good[place - 1], *good[place + 1 :]]
            if good[place]["type"] != good[place - 1]["type"]:
                numbered = [{**event, "sequence_number": number} for number, event in enumerate(swapped)]
                with self.subTest(swapped=place), self.assertRaises(Mismatch):
                    wire.in_order(numbered)
        response = good[-1]["response"]
        for name in set(response) - {"user"}:
            with self.subTest(without=name), self.assertRaises(Mismatch):
                check_response({other: value for other, value in response.items() if other != name})
        for name, wrong in (("created_at", "1"), ("store", None), ("output", [{}]), ("unknown", 1), ("model", None)):
            with self.subTest(name), self.assertRaises(Mismatch):
                check_response({**response, name: wrong})


class OneWithRedis(Fleet):
    redis = True


class ThreeReplicas(Fleet):
    replicas = 3


class ThreeReplicasOverChat(Fleet):
    replicas = 3
    arguments = (*ENGINE_ARGUMENTS, "--no-responses")


if __name__ == "__main__":
    unittest.main()
