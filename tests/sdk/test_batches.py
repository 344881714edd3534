"""Files and batches with OpenAI's Python SDK, and Message Batches with Anthropic's, over real sockets. Every answer is read
strictly: a member that is missing or of a wrong type is an error here."""

import io
import json
import pathlib
import tempfile
import unittest

import openai
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileObject
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

try:
    import anthropic
except ImportError:
    anthropic = None

import shapes
import wire
from cluster import Cluster, eventually
from patience import LIMIT_S
from test_webhooks import SECRET, Receiver

MODEL = "sim"
HELLO = [{"role": "user", "content": "Tell me of the sea, at some length, if you would."}]
OVER = ("completed", "failed", "expired", "cancelled")
#: Engines refuse it.
TOO_MANY_TOKENS = 10_000_000


def line(custom_id, url="/v1/chat/completions", **body):
    if url == "/v1/chat/completions":
        body = {"messages": HELLO, "max_tokens": 5, **body}
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}
    return json.dumps(request) + "\n"


class WithBatches(unittest.TestCase):
    """Tests that leave the fleet as it is share one."""

    #: Of the engines.
    arguments = ("--decode-time", "2ms")
    #: Of the router, beside batches.
    config = {}

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="warmroute-batches-")
        cls.addClassCleanup(folder.cleanup)
        config = {"batches": {"folder": folder.name}, **cls.config}
        cls.cluster = Cluster(engine_arguments=cls.arguments, config=config)
        cls.addClassCleanup(cls.cluster.close)
        cls.sdk = openai.OpenAI(
            base_url=cls.cluster.base_url,
            api_key="none",
            max_retries=0,
            timeout=LIMIT_S,
            webhook_secret=SECRET,
            _strict_response_validation=True,
        )
        cls.addClassCleanup(cls.sdk.close)

    def upload(self, *lines):
        return self.sdk.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch")

    def begin(self, *lines, endpoint="/v1/chat/completions", **options):
        given = self.upload(*lines)
        return self.sdk.batches.create(
            input_file_id=given.id, endpoint=endpoint, completion_window="24h", **options
        )

    def ended(self, batch):
        def poll():
            polled = self.sdk.batches.retrieve(batch.id)
            return polled if polled.status in OVER else None

        return eventually("the batch ends", poll)

    def lines_of(self, file_id):
        """A file's lines by their custom ids. Fails if one comes twice."""
        if file_id is None:
            return {}
        text = self.sdk.files.content(file_id).text
        self.assertTrue(text.endswith("\n"))
        lines = [json.loads(each) for each in text.splitlines()]
        found = {each["custom_id"]: each for each in lines}
        self.assertEqual(len(found), len(lines))
        return found


class Files(WithBatches):
    def test_a_file_is_uploaded_read_and_deleted(self):
        content = line("a") + line("b")
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "in.jsonl"
            path.write_text(content)
            with path.open("rb") as opened:
                file = self.sdk.files.create(file=opened, purpose="batch")
        self.assertEqual((file.object, file.filename, file.purpose), ("file", "in.jsonl", "batch"))
        self.assertEqual((file.bytes, file.status), (len(content), "processed"))
        self.assertEqual(self.sdk.files.retrieve(file.id), file)
        self.assertEqual(self.sdk.files.wait_for_processing(file.id, max_wait_seconds=LIMIT_S), file)
        whole = self.sdk.files.content(file.id)
        self.assertEqual(whole.text, content)
        with self.sdk.files.with_streaming_response.content(file.id) as streamed:
            self.assertEqual(b"".join(streamed.iter_bytes()), content.encode())
        deleted = self.sdk.files.delete(file.id)
        self.assertEqual((deleted.id, deleted.deleted), (file.id, True))
        for call in (self.sdk.files.retrieve, self.sdk.files.content, self.sdk.files.delete):
            with self.assertRaises(openai.NotFoundError):
                call(file.id)

    def test_the_bytes_of_a_file_are_those_that_were_sent(self):
        # Also what looks like the end of a form.
        content = bytes(range(256)) * 5_000 + b"\r\n--boundary--\r\n" + b"\r\n-"
        for given in (("in.jsonl", content), ("in.jsonl", io.BytesIO(content), "application/jsonl")):
            file = self.sdk.files.create(file=given, purpose="batch")
            self.assertEqual(file.bytes, len(content))
            self.assertEqual(self.sdk.files.content(file.id).read(), content)

    def test_files_are_listed_in_pages_either_way(self):
        created = [self.upload(line(str(number))).id for number in range(5)]
        for order in ("asc", "desc"):
            listed = [file.id for file in self.sdk.files.list(limit=2, order=order)]
            self.assertEqual(len(listed), len(set(listed)))
            own = [id for id in listed if id in created]
            self.assertEqual(sorted(own), sorted(created))
        batch_files = self.sdk.files.list(purpose="batch")
        self.assertEqual({file.purpose for file in batch_files}, {"batch"})
        after = self.sdk.files.list(after=created[0], limit=1, order="asc")
        self.assertEqual(len(after.data), 1)
        self.assertNotEqual(after.data[0].id, created[0])

    def test_a_file_may_expire(self):
        expires = {"anchor": "created_at", "seconds": 3_600}
        file = self.sdk.files.create(file=("in.jsonl", b"{}"), purpose="batch", expires_after=expires)
        self.assertEqual(file.expires_at, file.created_at + 3_600)

    def test_what_is_no_file_is_refused(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.sdk.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
        self.assertEqual(caught.exception.param, "purpose")
        answer = wire.ask("POST", f"{self.cluster.base_url}/files", {"purpose": "batch"})
        self.assertEqual(answer.status, 400)
        shapes.check_error(answer.error)


class Batches(WithBatches):
    def test_a_batch_runs_from_its_input_to_its_results(self):
        lines = [line(f"l{number}", max_tokens=1 + number % 5) for number in range(40)]
        bad = line("bad", max_tokens=TOO_MANY_TOKENS)
        created = self.begin(*lines, bad, metadata={"job": "nightly"})
        self.assertEqual((created.object, created.endpoint), ("batch", "/v1/chat/completions"))
        self.assertEqual((created.completion_window, created.metadata), ("24h", {"job": "nightly"}))
        self.assertIn(created.status, ("validating", "in_progress", "finalizing", "completed"))
        batch = self.ended(created)
        self.assertEqual(batch.status, "completed")
        counts = batch.request_counts
        self.assertEqual((counts.total, counts.completed, counts.failed), (41, 40, 1))
        times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        self.assertEqual(list(times), sorted(times))
        results, errors = self.lines_of(batch.output_file_id), self.lines_of(batch.error_file_id)
        self.assertEqual(set(results), {f"l{number}" for number in range(40)})
        self.assertEqual(len({result["id"] for result in results.values()}), 40)
        output_tokens = 0
        for result in results.values():
            self.assertEqual(set(result), {"id", "custom_id", "response", "error"})
            self.assertIsNone(result["error"])
            response = result["response"]
            self.assertEqual(response["status_code"], 200)
            self.assertTrue(response["request_id"])
            body = response["body"]
            shapes.adapter(ChatCompletion).validate_json(json.dumps(body), strict=True)
            output_tokens += body["usage"]["completion_tokens"]
        self.assertEqual(batch.usage.output_tokens, output_tokens)
        self.assertEqual(list(errors), ["bad"])
        failed = errors["bad"]
        self.assertEqual(failed["response"]["status_code"], 400)
        self.assertIn("max_model_len", failed["response"]["body"]["error"]["message"])
        output = self.sdk.files.retrieve(batch.output_file_id)
        self.assertEqual(output.purpose, "batch_output")
        # What has ended stays as it is.
        self.assertEqual(self.sdk.batches.retrieve(batch.id), batch)
        # No member that the types do not have.
        for kind, path in ((Batch, f"/batches/{batch.id}"), (FileObject, f"/files/{output.id}")):
            shapes.check(kind, wire.ask("GET", f"{self.cluster.base_url}{path}").response)

    def test_every_endpoint(self):
        for endpoint, kind, body in (
            ("/v1/chat/completions", ChatCompletion, {}),
            ("/v1/completions", Completion, {"prompt": "Once upon", "max_tokens": 5}),
            ("/v1/responses", Response, {"input": "Hello there", "max_output_tokens": 5}),
            ("/v1/embeddings", CreateEmbeddingResponse, {"input": ["one", "two"]}),
        ):
            with self.subTest(endpoint):
                batch = self.ended(self.begin(line("a", endpoint, **body), endpoint=endpoint))
                self.assertEqual((batch.status, batch.endpoint), ("completed", endpoint))
                response = self.lines_of(batch.output_file_id)["a"]["response"]
                shapes.adapter(kind).validate_json(json.dumps(response["body"]), strict=True)

    def test_messages_through_openais_batches(self):
        body = {"messages": HELLO, "max_tokens": 5}
        batch = self.ended(self.begin(line("a", "/v1/messages", **body), endpoint="/v1/messages"))
        message = self.lines_of(batch.output_file_id)["a"]["response"]["body"]
        self.assertEqual((message["type"], message["usage"]["output_tokens"]), ("message", 5))

    def test_batches_are_listed_in_pages_the_newest_first(self):
        created = [self.begin(line("a")) for _ in range(3)]
        for batch in created:
            self.ended(batch)
        listed = [batch.id for batch in self.sdk.batches.list(limit=1)]
        self.assertEqual(len(listed), len(set(listed)))
        own = [id for id in listed if id in {batch.id for batch in created}]
        self.assertEqual(len(own), 3)
        page = self.sdk.batches.list(after=listed[0], limit=2)
        self.assertEqual([batch.id for batch in page.data], listed[1:3])

    def test_bad_lines_fail_the_batch_by_their_numbers(self):
        mistakes = [
            line("a"),
            "nothing\n",
            line("a"),
            "\n",
            line("b", "/v1/completions", prompt="x"),
            line("c", model="none"),
            json.dumps({"method": "POST", "url": "/v1/chat/completions", "body": {}}) + "\n",
        ]
        batch = self.ended(self.begin(*mistakes))
        self.assertEqual((batch.status, batch.output_file_id), ("failed", None))
        self.assertIsNotNone(batch.failed_at)
        found = {error.line: error for error in batch.errors.data}
        self.assertEqual(sorted(found), [2, 3, 5, 6, 7])
        for error in found.values():
            self.assertTrue(error.code and error.message)
        self.assertEqual(found[3].param, "custom_id")

    def test_a_batch_that_cannot_be_is_refused(self):
        given = self.upload(line("a"))
        window = {"completion_window": "24h"}
        for options, param in (
            ({"input_file_id": given.id, "endpoint": "/v1/moderations", **window}, "endpoint"),
            ({"input_file_id": given.id, "endpoint": "/v1/completions", "completion_window": "soon"}, "completion_window"),
        ):
            with self.subTest(param=param), self.assertRaises(openai.BadRequestError) as caught:
                self.sdk.batches.create(**options)
            self.assertEqual(caught.exception.param, param)
        with self.assertRaises(openai.APIStatusError) as caught:
            self.sdk.batches.create(input_file_id="file-none", endpoint="/v1/completions", **window)
        self.assertIn(caught.exception.status_code, (400, 404))
        for call in (self.sdk.batches.retrieve, self.sdk.batches.cancel):
            with self.assertRaises(openai.NotFoundError):
                call("batch_none")


class Cancel(WithBatches):
    #: A batch takes longer than the test.
    arguments = ("--decode-time", "50ms")

    def test_what_ran_before_a_cancel_is_kept_and_every_line_has_one_result(self):
        short = [line(f"short{number}", max_tokens=1) for number in range(10)]
        long = [line(f"long{number}", max_tokens=4_000) for number in range(30)]
        batch = self.begin(*short, *long)
        eventually("it runs", lambda: self.sdk.batches.retrieve(batch.id).status == "in_progress")
        eventually("the engines work", lambda: self.cluster.seen("running") > 0)
        cancelled = self.sdk.batches.cancel(batch.id)
        self.assertIn(cancelled.status, ("cancelling", "cancelled"))
        self.assertIsNotNone(cancelled.cancelling_at)
        batch = self.ended(batch)
        self.assertEqual(batch.status, "cancelled")
        eventually("the engines have nothing to do", lambda: self.cluster.seen("running") == 0)
        results, errors = self.lines_of(batch.output_file_id), self.lines_of(batch.error_file_id)
        expected = {json.loads(each)["custom_id"] for each in short + long}
        self.assertEqual(set(results) | set(errors), expected)
        self.assertEqual(set(results) & set(errors), set())
        for failed in errors.values():
            self.assertTrue(failed["error"]["code"] and failed["error"]["message"])


class Events(WithBatches):
    @classmethod
    def setUpClass(cls):
        cls.receiver = Receiver()
        cls.addClassCleanup(cls.receiver.close)
        endpoint = {
            "name": "sdk",
            "url": cls.receiver.url,
            "secrets": [SECRET],
            "allow_http": True,
            "allowed_networks": ["127.0.0.1"],
        }
        cls.config = {"webhooks": {"endpoints": [endpoint]}}
        super().setUpClass()

    def test_the_end_of_a_batch_is_an_event(self):
        for lines, kind, class_name in (
            ([line("a")], "batch.completed", "BatchCompletedWebhookEvent"),
            (["nothing\n"], "batch.failed", "BatchFailedWebhookEvent"),
        ):
            with self.subTest(kind):
                self.receiver.events.clear()
                batch = self.ended(self.begin(*lines))
                eventually("an event", lambda: self.receiver.events)
                headers, body = self.receiver.events[-1]
                event = self.sdk.webhooks.unwrap(body, headers)
                self.assertEqual((event.type, event.object, event.data.id), (kind, "event", batch.id))
                self.assertEqual(type(event).__name__, class_name)


@unittest.skipUnless(anthropic, "anthropic is not installed")
class MessageBatches(WithBatches):
    arguments = ("--decode-time", "5ms")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = anthropic.Anthropic(
            base_url=cls.cluster.router.url,
            api_key="none",
            max_retries=0,
            timeout=LIMIT_S,
            _strict_response_validation=True,
        )
        cls.addClassCleanup(cls.client.close)
        cls.batches = cls.client.messages.batches

    @staticmethod
    def request(custom_id, **params):
        return {"custom_id": custom_id, "params": {"model": MODEL, "max_tokens": 5, "messages": HELLO, **params}}

    def poll(self, batch):
        def poll():
            polled = self.batches.retrieve(batch.id)
            return polled if polled.processing_status == "ended" else None

        return eventually("the batch ends", poll)

    def test_a_batch_of_messages_runs_from_its_requests_to_its_results(self):
        requests = [self.request(f"r{number}", max_tokens=1 + number) for number in range(5)]
        created = self.batches.create(requests=[*requests, self.request("bad", max_tokens=TOO_MANY_TOKENS)])
        self.assertEqual((created.type, created.processing_status), ("message_batch", "in_progress"))
        self.assertIsNone(created.results_url)
        counts = created.request_counts
        self.assertEqual((counts.processing, counts.succeeded), (6, 0))
        batch = self.poll(created)
        self.assertIsNotNone(batch.ended_at)
        counts = batch.request_counts
        found = (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired)
        self.assertEqual(found, (0, 5, 1, 0, 0))
        results = list(self.batches.results(batch.id))
        by_id = {result.custom_id: result.result for result in results}
        self.assertEqual(len(by_id), len(results))
        self.assertEqual(set(by_id), {"bad", *(f"r{number}" for number in range(5))})
        for number in range(5):
            result = by_id[f"r{number}"]
            self.assertEqual(result.type, "succeeded")
            self.assertEqual(result.message.usage.output_tokens, 1 + number)
        bad = by_id["bad"]
        self.assertEqual((bad.type, bad.error.type), ("errored", "error"))
        self.assertEqual(bad.error.error.type, "invalid_request_error")
        # It is no batch of the other API.
        self.assertNotIn(batch.id, [other.id for other in self.sdk.batches.list()])
        deleted = self.batches.delete(batch.id)
        self.assertEqual((deleted.id, deleted.type), (batch.id, "message_batch_deleted"))
        with self.assertRaises(anthropic.NotFoundError):
            self.batches.retrieve(batch.id)

    def test_batches_of_messages_are_listed(self):
        created = [self.batches.create(requests=[self.request("a")]).id for _ in range(3)]
        listed = [batch.id for batch in self.batches.list(limit=1)]
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual(set(created) - set(listed), set())

    def test_a_cancelled_batch_has_a_result_for_every_request(self):
        requests = [self.request(f"r{number}", max_tokens=4_000) for number in range(20)]
        batch = self.batches.create(requests=requests)
        cancelled = self.batches.cancel(batch.id)
        self.assertIn(cancelled.processing_status, ("canceling", "ended"))
        self.assertIsNotNone(cancelled.cancel_initiated_at)
        batch = self.poll(batch)
        results = list(self.batches.results(batch.id))
        self.assertEqual({result.custom_id for result in results}, {f"r{number}" for number in range(20)})
        self.assertEqual(len(results), 20)
        self.assertIn("canceled", {result.result.type for result in results})

    def test_what_is_no_batch_is_refused(self):
        for requests in ([], [self.request("a"), self.request("a")]):
            with self.subTest(requests=len(requests)), self.assertRaises(anthropic.BadRequestError) as caught:
                self.batches.create(requests=requests)
            self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")
        for call in (self.batches.retrieve, self.batches.cancel, self.batches.delete):
            with self.assertRaises(anthropic.NotFoundError):
                call("msgbatch_none")


if __name__ == "__main__":
    unittest.main()
