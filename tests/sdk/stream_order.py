"""What a stream of response events must be like, as a machine that is fed with them."""

from shapes import Mismatch, check_event, check_response

ENDS = {"response.completed", "response.incomplete", "response.failed"}
#: What may change between two snapshots of one response.
CHANGING = {"status", "output", "usage", "completed_at", "error", "incomplete_details", "service_tier"}
#: Members of an item that grow by events of their own, the prefix of these, and what a delta of them is called.
GROWING = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
#: The events of a part's text, by the type of the part.
PART_EVENTS = {
    "output_text": ("response.output_text", "text"),
    "refusal": ("response.refusal", "refusal"),
    "reasoning_text": ("response.reasoning_text", "text"),
}


def require(holds, what, event):
    if not holds:
        raise Mismatch(f"{what}: {event}")


class Item:
    """An item that has been announced, and what it has got since."""

    def __init__(self, item):
        self.announced = item
        self.parts = []
        self.open_part = None
        self.text = ""
        self.text_done = False
        self.done = None


class Part:
    def __init__(self, part):
        self.announced = part
        self.text = ""
        self.logprobs = []
        self.text_done = False


class StreamOrder:
    """Takes the events of one stream one by one, and fails at the first that is out of place."""

    def __init__(self, reasoning="response.reasoning_text"):
        self.number = 0
        self.first = None
        self.last = None
        self.began = False
        self.items = []
        # The id of the item that is being written in one go.
        self.compacting = None
        self.part_events = {**PART_EVENTS, "reasoning_text": (reasoning, "text")}

    def feed(self, event):
        check_event(event)
        require(self.last is None, "an event after the last", event)
        require(event["sequence_number"] == self.number, f"number {self.number} expected", event)
        self.number += 1
        kind = event["type"]
        if kind in ("response.created", "response.queued", "response.in_progress"):
            self.begin(event)
        elif kind in ENDS:
            self.end(event)
        else:
            require(self.began, "an event before response.in_progress", event)
            self.of_an_item(event)

    def begin(self, event):
        kind, response = event["type"], event["response"]
        if self.first is None:
            require(kind == "response.created", "the first event is response.created", event)
            self.first = response
        else:
            require(kind != "response.created" and not self.began, "a second beginning", event)
        self.began = kind == "response.in_progress"
        status = response["status"]
        expected = {"response.queued": ("queued",), "response.in_progress": ("in_progress",)}
        require(status in expected.get(kind, ("queued", "in_progress")), "status", event)
        require(response["output"] == [] and response["usage"] is None, "nothing is there yet", event)
        self.same_response(event)

    def same_response(self, event):
        check_response(event["response"])
        for name in (set(self.first) | set(event["response"])) - CHANGING:
            now = event["response"].get(name)
            require(self.first.get(name) == now, f"{name} was {self.first.get(name)!r}", event)

    def end(self, event):
        response = event["response"]
        self.last = response
        require(self.first is not None, "an end without a beginning", event)
        self.same_response(event)
        status = "incomplete" if response["status"] == "cancelled" else response["status"]
        require(event["type"] == f"response.{status}", "the status is that of the event", event)
        if event["type"] == "response.failed":
            done = [item.announced["id"] for item in self.items]
            require([item["id"] for item in response["output"]] == done[: len(response["output"])], "items", event)
            return
        for item in self.items:
            require(item.done is not None, f"an item without an end: {item.announced}", event)
        require(response["output"] == [item.done for item in self.items], "the output is the items", event)

    def of_an_item(self, event):
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            self.added(event)
            return
        if kind == "response.compaction.compacting":
            require(index == len(self.items) and self.compacting is None, "announced before its item", event)
            self.compacting = event["item_id"]
            return
        require(index < len(self.items), "an event of an item that is not announced", event)
        item = self.items[index]
        require(item.done is None, "an event after the end of its item", event)
        if kind == "response.output_item.done":
            self.item_done(item, event)
            return
        require(event["item_id"] == item.announced["id"], "the id of its item", event)
        if kind.startswith("response.content_part."):
            self.part(item, event)
        elif "content_index" in event:
            self.part_text(item, event)
        else:
            require(item.announced["type"] in GROWING, "an event that no item has", event)
            self.growing(item, event)

    def added(self, event):
        item = event["item"]
        require(event["output_index"] == len(self.items), "items come in order", event)
        ids = [other.announced["id"] for other in self.items]
        require(item["id"] and item["id"] not in ids, "an id of its own", event)
        for other in self.items:
            is_open_call = other.announced["type"] in GROWING and item["type"] in GROWING
            require(other.done is not None or is_open_call, "only calls are open side by side", event)
        require(self.compacting in (None, item["id"]), "the item that was announced", event)
        self.compacting = None
        if item["type"] == "message":
            require(item["content"] == [] and item["status"] == "in_progress", "an empty message", event)
        elif item["type"] == "reasoning":
            require(item["summary"] == [] and not item.get("content"), "empty reasoning", event)
        elif item["type"] in GROWING:
            member, _ = GROWING[item["type"]]
            require(item[member] == "" and item.get("status", "in_progress") == "in_progress", "an empty call", event)
        self.items.append(Item(item))

    def part(self, item, event):
        index, part = event["content_index"], event["part"]
        _, member = self.part_events[part["type"]]
        if event["type"] == "response.content_part.added":
            require(item.open_part is None and index == len(item.parts), "parts come one after the other", event)
            require(part[member] == "", "an empty part", event)
            item.open_part = Part(part)
            return
        require(item.open_part is not None and index == len(item.parts), "the part that is open", event)
        require(item.open_part.text_done, "a part ends after its text", event)
        require(part[member] == item.open_part.text, "the part has the text of its deltas", event)
        item.parts.append(part)
        item.open_part = None

    def part_text(self, item, event):
        open_part = item.open_part
        require(open_part is not None and event["content_index"] == len(item.parts), "the part that is open", event)
        require(not open_part.text_done, "text after its end", event)
        prefix, member = self.part_events[open_part.announced["type"]]
        if event["type"] == f"{prefix}.delta":
            require(event["delta"], "an empty delta", event)
            open_part.text += event["delta"]
            open_part.logprobs += event.get("logprobs") or []
        else:
            require(event["type"] == f"{prefix}.done", "an event that the part does not have", event)
            require(event[member] == open_part.text, "the text of the deltas", event)
            open_part.text_done = True

    def growing(self, item, event):
        member, prefix = GROWING[item.announced["type"]]
        require(not item.text_done, f"{member} after their end", event)
        if event["type"] == f"{prefix}.delta":
            require(event["delta"], "an empty delta", event)
            item.text += event["delta"]
        else:
            require(event["type"] == f"{prefix}.done", "an event that the item does not have", event)
            require(event[member] == item.text, f"the {member} of the deltas", event)
            item.text_done = True

    def item_done(self, item, event):
        done = event["item"]
        require(item.open_part is None, "an item ends after its parts", event)
        for name in ("id", "type", "role", "call_id", "name"):
            require(done.get(name) == item.announced.get(name), f"the same {name}", event)
        if done["type"] in ("message", "reasoning"):
            require((done.get("content") or []) == item.parts, "its parts", event)
        elif done["type"] in GROWING:
            member, _ = GROWING[done["type"]]
            require(item.text_done and done[member] == item.text, f"its {member}", event)
        require(done.get("status") != "in_progress", "an item that has ended", event)
        item.done = done
