"""Responses in the background, with OpenAI's Python SDK: three routers, one Redis. Whoever is asked, it goes on."""

import json
import unittest

import openai

from cluster import Cluster, eventually, get
from test_responses import HELLO, Replicas

RUNNING = ("queued", "in_progress")
ENDS = ("response.completed", "response.incomplete", "response.failed")


class WithThree(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(replicas=3, engine_arguments=("--decode-time", "20ms"))
        cls.addClassCleanup(cls.cluster.close)
        cls.sdk = Replicas(cls.cluster)
        cls.addClassCleanup(cls.sdk.close)

    def setUp(self):
        eventually("the engines have nothing to do", lambda: self.cluster.seen("running") == 0)

    def fault(self, **faults):
        for engine in self.cluster.engines:
            status, text = get(f"{engine.url}/sim/faults", json.dumps(faults).encode())
            self.assertEqual(status, 200, text)

    def running(self):
        """On all routers, whether an engine has started it or not."""
        samples = [self.cluster.metric("warmroute_background_running", router) for router in self.cluster.routers]
        return sum(value for each in samples for _, value in each)

    def begin(self, tokens, **options):
        return self.sdk.create(HELLO, background=True, max_output_tokens=tokens, **options)

    def ended(self, response):
        """Polls, each time another router, as the guides do; then all of them say the same."""

        def poll():
            polled = self.sdk.responses.retrieve(response.id)
            return polled if polled.status not in RUNNING else None

        last = eventually("it ends", poll)
        for _ in self.cluster.routers:
            self.assertEqual(self.sdk.responses.retrieve(response.id), last)
        return last

    def check_numbers(self, events):
        """From 0, without a hole, nothing twice, one end; gives the last response."""
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        self.assertEqual([event.type for event in events if event.type in ENDS], [events[-1].type])
        return events[-1].response

    def text(self, events):
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")


class Poll(WithThree):
    def test_status_goes_from_queued_to_completed_on_every_router(self):
        created = self.begin(50)
        self.assertEqual((created.status, created.background, created.output), ("queued", True, []))
        eventually("it runs", lambda: self.sdk.responses.retrieve(created.id).status == "in_progress")
        last = self.ended(created)
        self.assertEqual((last.status, last.incomplete_details.reason), ("incomplete", "max_output_tokens"))
        self.assertEqual(last.usage.output_tokens, 50)
        self.assertTrue(last.output_text)
        self.assertEqual(self.sdk.responses.input_items.list(created.id).data[0].content[0].text, HELLO)
        self.assertEqual(self.sdk.create("And then?", previous_response_id=created.id).status, "completed")

    def test_a_client_that_disconnects_at_once_finds_the_response_later(self):
        with self.begin(30, stream=True) as stream:
            created = next(stream).response
        self.assertEqual(self.ended(created).usage.output_tokens, 30)

    def test_an_unstored_response_can_be_polled(self):
        last = self.ended(self.begin(10, store=False))
        self.assertEqual((last.status, last.store), ("incomplete", False))


class Stream(WithThree):
    def test_a_stream_resumes_on_another_router_after_each_disconnect(self):
        with self.begin(100, stream=True) as stream:
            events = [next(stream) for _ in range(7)]
        kinds = [event.type for event in events[:4]]
        expected = ["created", "queued", "in_progress", "output_item.added"]
        self.assertEqual(kinds, [f"response.{kind}" for kind in expected])
        id = events[0].response.id
        while events[-1].type not in ENDS:
            after = events[-1].sequence_number
            with self.sdk.responses.retrieve(id, stream=True, starting_after=after) as stream:
                more = [event for event, _ in zip(stream, range(25))]
            self.assertTrue(more)
            events += more
        last = self.check_numbers(events)
        self.assertEqual(self.text(events), last.output_text)
        self.assertEqual(last.usage.output_tokens, 100)
        self.assertEqual(self.sdk.responses.retrieve(id), last)
        # Sent again from the beginning, and from the middle, when it is over.
        for _ in self.cluster.routers:
            self.assertEqual(list(self.sdk.responses.retrieve(id, stream=True)), events)
            rest = self.sdk.responses.retrieve(id, stream=True, starting_after=40)
            self.assertEqual(list(rest), events[41:])

    def test_readers_on_every_router_get_the_same_events(self):
        stream = self.begin(60, stream=True)
        events = [next(stream)]
        id = events[0].response.id
        readers = [self.sdk.responses.retrieve(id, stream=True) for _ in self.cluster.routers]
        events += stream
        self.check_numbers(events)
        for reader in readers:
            self.assertEqual(list(reader), events)

    def test_the_stream_helper_resumes(self):
        with self.sdk.responses.stream(model="sim", input=HELLO, background=True) as stream:
            events = [event for event, _ in zip(stream, range(10))]
        id = events[0].response.id
        with self.sdk.responses.stream(response_id=id) as stream:
            whole = list(stream)
            final = stream.get_final_response()
        self.assertEqual(final.status, "completed")
        with self.sdk.responses.stream(response_id=id, starting_after=9) as stream:
            rest = list(stream)
        numbers = [event.sequence_number for event in events + rest]
        self.assertEqual(numbers, list(range(len(whole))))
        self.assertEqual(self.text(whole), final.output_text)

    def test_after_its_router_is_killed_the_sent_output_remains(self):
        arguments = ("--decode-time", "20ms")
        lease = {"duration": "2s"}
        with Cluster(replicas=3, engine_arguments=arguments, store={"lease": lease}) as cluster:
            sdk = Replicas(cluster)
            self.addCleanup(sdk.close)
            first, *others = sdk.clients
            unseen = first.responses.create(model="sim", input=HELLO, background=True, max_output_tokens=40)
            stream = first.responses.create(
                model="sim", input=HELLO, background=True, stream=True, max_output_tokens=2000
            )
            events = [next(stream) for _ in range(12)]
            cluster.routers[0].kill()
            try:
                events += list(stream)
            except openai.APIConnectionError:
                pass
            id, after = events[0].response.id, events[-1].sequence_number
            events += others[0].responses.retrieve(id, stream=True, starting_after=after)
            last = self.check_numbers(events)
            self.assertEqual((last.status, last.error.code), ("failed", "server_error"))
            self.assertEqual(self.text(events), last.output_text)
            for client in others:
                self.assertEqual(client.responses.retrieve(id), last)
                again = lambda: client.responses.retrieve(unseen.id)
                eventually("what no client saw runs again", lambda: again().status not in RUNNING)
                self.assertEqual(again().usage.output_tokens, 40)


class Cancel(WithThree):
    def cancelled(self, id):
        """Cancelled from another router than the last call's, and so on all of them."""
        cancelled = self.sdk.responses.cancel(id)
        self.assertEqual((cancelled.status, cancelled.error), ("cancelled", None))
        for _ in self.cluster.routers:
            self.assertEqual(self.sdk.responses.retrieve(id).status, "cancelled")

    def test_queued(self):
        before = self.cluster.seen("finished") + self.cluster.seen("aborted")
        self.fault(refuse=503)
        self.addCleanup(self.fault)
        created = self.begin(1000)
        self.assertEqual(self.sdk.responses.retrieve(created.id).status, "queued")
        self.cancelled(created.id)
        eventually("its router knows of it", lambda: self.running() == 0)
        self.fault()
        # No engine works for it when it could.
        self.assertEqual(self.sdk.create(HELLO, max_output_tokens=60).usage.output_tokens, 60)
        self.assertEqual(self.cluster.seen("finished") + self.cluster.seen("aborted"), before + 1)

    def test_at_an_engine_that_has_not_answered(self):
        aborted = self.cluster.seen("aborted")
        self.fault(hang=True)
        self.addCleanup(self.fault)
        created = self.begin(1000)
        eventually("an engine has it", lambda: self.cluster.seen("running") == 1)
        self.assertEqual(self.sdk.responses.retrieve(created.id).status, "queued")
        self.cancelled(created.id)
        eventually("the engine saw the abort", lambda: self.cluster.seen("aborted") == aborted + 1)

    def test_running_and_twice(self):
        aborted = self.cluster.seen("aborted")
        created = self.begin(1000)
        eventually("it runs", lambda: self.sdk.responses.retrieve(created.id).status == "in_progress")
        self.cancelled(created.id)
        eventually("the engine saw the abort", lambda: self.cluster.seen("aborted") == aborted + 1)
        self.cancelled(created.id)
        self.assertEqual(self.cluster.seen("running"), 0)
        with self.assertRaises(openai.BadRequestError):
            self.sdk.create("And then?", previous_response_id=created.id)

    def test_in_the_middle_of_its_stream(self):
        aborted = self.cluster.seen("aborted")
        stream = self.begin(1000, stream=True)
        events = [next(stream) for _ in range(20)]
        id = events[0].response.id
        self.cancelled(id)
        events += stream
        # No client knows an event of that name.
        last = self.check_numbers(events)
        self.assertEqual((events[-1].type, last.status), ("response.incomplete", "cancelled"))
        eventually("the engine saw the abort", lambda: self.cluster.seen("aborted") == aborted + 1)
        # What there was is kept, on every router, and the events tell it.
        for _ in self.cluster.routers:
            kept = lambda: self.sdk.responses.retrieve(id).output_text
            eventually("what there was is kept", lambda: kept() == self.text(events))
        again = list(self.sdk.responses.retrieve(id, stream=True))
        self.assertEqual(again[:-1], events[:-1])
        self.assertEqual(self.check_numbers(again).status, "cancelled")

    def test_after_its_end(self):
        last = self.ended(self.begin(3))
        for _ in range(2 * len(self.cluster.routers)):
            self.assertEqual(self.sdk.responses.cancel(last.id), last)

    def test_unknown_and_deleted(self):
        deleted = self.begin(1000, stream=True)
        id = next(deleted).response.id
        self.sdk.responses.delete(id)
        for unknown in (id, "resp_" + 48 * "0"):
            for _ in self.cluster.routers:
                with self.assertRaises(openai.NotFoundError):
                    self.sdk.responses.cancel(unknown)
        self.assertEqual(list(deleted)[-1].type, "response.failed")
        eventually("the engine stops", lambda: self.cluster.seen("running") == 0)


if __name__ == "__main__":
    unittest.main()
