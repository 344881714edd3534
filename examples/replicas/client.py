"""A response that runs in the background, followed and cancelled through whichever router answers.

    pip install openai
    sh up.sh &
    RESOLVE=127.0.0.2,127.0.0.3,127.0.0.4 python client.py

All routers have one name, as pods behind a headless Service have. RESOLVE has that name's addresses; without it
the system's resolver is asked. Kill the router that is being read (up.sh prints its process): the text goes on, at once
or, if that router ran the response, within about 20 s. The latter takes `stream_continuation` and a worker that is sent
chat completions, as in router.yaml; without, such a response fails with the text that it has.
"""

import itertools
import os
import socket
import sys

import openai

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://routers.example:8080/v1")
TOKENS = int(os.environ.get("TOKENS", "200"))
ENDS = ("response.completed", "response.incomplete", "response.failed")


def connect() -> openai.OpenAI:
    """Another client each time, as if on another machine: it has no connection yet and asks for an address.

    What cannot connect, and whatever is answered with 503, it tries again by itself.
    """
    return openai.OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=5)


def main() -> None:
    with connect() as client:
        models = client.models.list().data
        model = os.environ.get("MODEL") or models[0].id

    events = begin_and_leave(model)
    id = events[0].response.id
    print(f"[{id}: left after event {events[-1].sequence_number}]")
    for event in follow(id, events[-1].sequence_number):
        events.append(event)
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)

    last = events[-1].response
    numbers = [event.sequence_number for event in events]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert numbers == list(range(len(events))), "an event is missing, or came twice"
    assert text == last.output_text, "the deltas are not the text"
    print(f"\n[{last.status}: events 0 to {numbers[-1]}, each once]")

    cancel_elsewhere(model)


def begin_and_leave(model: str) -> list:
    """The first events. The response goes on without its client."""
    with connect() as client:
        stream = client.responses.create(
            model=model,
            input="Tell me of the sea, at some length, if you would.",
            max_output_tokens=TOKENS,
            background=True,
            stream=True,
        )
        return list(itertools.islice(stream, 10))


def follow(id: str, after: int):
    """The events after that number, to the end, over as many connections as that takes."""
    while True:
        with connect() as client:
            try:
                for event in client.responses.retrieve(id, stream=True, starting_after=after):
                    after = event.sequence_number
                    yield event
                    if event.type in ENDS:
                        return
            except openai.APIConnectionError:
                pass
            except Exception as error:
                # A stream that breaks off raises an exception of the HTTP library below.
                if not type(error).__module__.startswith("httpx"):
                    raise
        print(f"\n[broke off after event {after}; going on]", flush=True)


def cancel_elsewhere(model: str) -> None:
    """Three calls, three routers."""
    with connect() as client:
        running = client.responses.create(
            model=model, input="Count to a million.", background=True, max_output_tokens=4_000
        )
    for _ in range(2):
        with connect() as client:
            cancelled = client.responses.cancel(running.id)
            print(f"[{running.id}: {running.status}, then {cancelled.status}]")


def resolve(name: str, addresses: list) -> None:
    """Answers for a name as its DNS server would: all addresses, each time another one first."""
    system, turns = socket.getaddrinfo, itertools.count()

    def getaddrinfo(host, *arguments, **options):
        if host not in (name, name.encode()):
            return system(host, *arguments, **options)
        turn = next(turns) % len(addresses)
        found = [system(address, *arguments, **options) for address in addresses[turn:] + addresses[:turn]]
        return list(itertools.chain(*found))

    socket.getaddrinfo = getaddrinfo


if __name__ == "__main__":
    if "RESOLVE" in os.environ:
        resolve(openai.OpenAI(base_url=BASE_URL, api_key="none").base_url.host, os.environ["RESOLVE"].split(","))
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"no router at {BASE_URL}: {error.__cause__ or error}")
    except openai.APIStatusError as error:
        sys.exit(f"{error.status_code} {error.code}: {error.message} (request {error.request_id})")
