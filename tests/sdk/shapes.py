"""What answers must look like: OpenAI's own types, held to the letter, and those of the public Open Responses document.

The SDK reads leniently: it takes "1" for 1, ignores members that it does not know and lets half of the members be absent.
Here every value has its type, every member is known, and every member of the public document is there."""

import enum
import functools
import json
import typing

import pydantic

try:
    import openresponses_types.types as document
except ImportError:
    # They want Python 3.11.
    document = None

from openai.types.responses import response as sdk_response
from openai.types.responses import response_stream_event

#: Members that the public document or vLLM has and the SDK's types do not.
BESIDES_THE_SDK = {
    "Response": {"store", "presence_penalty", "frequency_penalty"},
    # Releases of the SDK before 3 demand it.
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},
    # OpenAI's examples have it.
    "ResponseCustomToolCall": {"status"},
    # Of the deltas of a text; its part has them in the SDK's types too.
    "Logprob": {"bytes"},
    "LogprobTopLogprob": {"bytes"},
}
#: Kinds of items, parts and tools that are OpenAI's alone. What has one is held to the SDK's types only.
OPENAI_ALONE = {"custom", "custom_tool_call", "custom_tool_call_output", "namespace"}
#: Events that the public document has under another name.
RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


class Mismatch(AssertionError):
    """An answer that is not as its type says."""


@functools.lru_cache(maxsize=None)
def adapter(kind):
    return pydantic.TypeAdapter(kind)


def check(kind, value):
    """Fails unless `value` is a `kind`: no other types, nothing missing, nothing unknown."""
    try:
        model = adapter(kind).validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError as error:
        problems = {f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()}
        raise Mismatch(f"{sorted(problems)} in {json.dumps(value)}") from None
    unknown = sorted(unknown_members(model))
    if unknown:
        raise Mismatch(f"unknown: {unknown} in {json.dumps(value)}")
    return model


def unknown_members(value, place=""):
    """The places of members that the types do not have."""
    if isinstance(value, pydantic.BaseModel):
        allowed = BESIDES_THE_SDK.get(type(value).__name__, ())
        yield from (f"{place}.{name}" for name in value.model_extra or () if name not in allowed)
        for name in type(value).model_fields:
            yield from unknown_members(getattr(value, name, None), f"{place}.{name}")
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from unknown_members(member, f"{place}[{index}]")


def variants(union):
    """The members of a union by the value of their `type`."""
    found = {}
    members = typing.get_args(union)
    while len(members) > 1 and typing.get_origin(members[0]) is typing.Union:
        members = typing.get_args(members[0])
    for member in members:
        for name in typing.get_args(member.model_fields["type"].annotation):
            found[name] = member
    return found


SDK_EVENTS = variants(response_stream_event.ResponseStreamEvent)


def document_events():
    """The events of the public document, by type."""
    found = {}
    for name, kind in vars(document).items():
        if name.endswith("StreamingEvent"):
            kinds = kind.model_fields["type"].annotation
            assert issubclass(kinds, enum.Enum), name
            found.update({member.value: kind for member in kinds})
    return found


DOCUMENT_EVENTS = document_events() if document else {}


def is_openai_alone(value):
    """Whether something in it is no part of the public document."""
    if isinstance(value, dict):
        return value.get("type") in OPENAI_ALONE or any(map(is_openai_alone, value.values()))
    return isinstance(value, list) and any(map(is_openai_alone, value))


def fits_document(kind, value):
    """Fails if something that the public document demands is missing or of another type."""
    try:
        # Its enumerations are classes of their own, which strict reading does not take texts for.
        adapter(kind).validate_json(json.dumps(value))
    except pydantic.ValidationError as error:
        problems = {f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()}
        raise Mismatch(f"the public document: {sorted(problems)} in {json.dumps(value)}") from None


def check_response(value):
    check(sdk_response.Response, value)
    if not is_openai_alone(value):
        fits_document(document.ResponseResource, without_schemas(value))


def without_schemas(response):
    """The public document has no type for the schema of a format, and wants `strict` to be a boolean."""
    form = response.get("text", {}).get("format", {})
    if form.get("type") != "json_schema":
        return response
    return {**response, "text": {**response["text"], "format": {"type": "text"}}}


def check_event(event):
    kind = SDK_EVENTS.get(event["type"])
    if kind:
        check(kind, event)
    elif event["type"] not in RENAMED.values():
        raise Mismatch(f"an event of no known type: {event}")
    name = RENAMED.get(event["type"], event["type"])
    if name in DOCUMENT_EVENTS and not is_openai_alone(event):
        if event.get("logprobs"):
            # Those of an engine's deltas have no bytes, as in the SDK's types.
            event = {**event, "logprobs": []}
        if "response" in event:
            event = {**event, "response": without_schemas(event["response"])}
        fits_document(DOCUMENT_EVENTS[name], {**event, "type": name})


#: All members of an error, none absent.
ERROR_MEMBERS = {"message", "type", "param", "code"}


def check_error(error):
    if set(error) != ERROR_MEMBERS:
        raise Mismatch(f"an error has {sorted(ERROR_MEMBERS)}: {error}")
    for name in ("message", "type"):
        if not (isinstance(error[name], str) and error[name]):
            raise Mismatch(f"{name} is a text: {error}")
    for name in ("param", "code"):
        if not (error[name] is None or (isinstance(error[name], str) and error[name])):
            raise Mismatch(f"{name} is a text or null: {error}")
