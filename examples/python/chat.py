"""A conversation through the router with OpenAI's own client.

    pip install openai
    OPENAI_BASE_URL=http://localhost:8080/v1 python chat.py
"""

import os
import sys

import openai

client = openai.OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
    # The client requires a key; the router has the engines' keys.
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)


def main() -> None:
    models = [model.id for model in client.models.list()]
    if not models:
        sys.exit("no worker is healthy yet, so no model is served")
    model = os.environ.get("MODEL", models[0])
    print("models:", ", ".join(models))

    # Each turn repeats the conversation so far; the router sends it to the worker that has it cached.
    messages = [{"role": "system", "content": "You are a patient librarian. Answer in a sentence."}]
    for question in ("What is a trie?", "And how does a radix tree differ?", "When would I use one?"):
        messages.append({"role": "user", "content": question})
        answer = stream(model, messages)
        messages.append({"role": "assistant", "content": answer})

    whole = client.chat.completions.create(model=model, messages=messages[:2], max_tokens=16)
    print("\nnot streamed:", whole.choices[0].message.content)
    print("request id, as in the router's log:", whole._request_id)

    try:
        client.chat.completions.create(model="no-such-model", messages=messages)
    except openai.NotFoundError as error:
        print("expected error:", error.code, "-", error.body["message"])


def stream(model: str, messages: list) -> str:
    """Prints an answer while it is streamed, and returns it."""
    print("\n>", messages[-1]["content"])
    chunks = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer = ""
    for chunk in chunks:
        if chunk.choices:
            text = chunk.choices[0].delta.content or ""
            answer += text
            print(text, end="", flush=True)
        if chunk.usage:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            print(f"\n  [{cached} of {chunk.usage.prompt_tokens} prompt tokens were cached]")
    return answer


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"no router at {client.base_url}: {error.__cause__ or error}")
    except openai.APIStatusError as error:
        # 503 with code no_healthy_worker has been tried three times by now: the client retries it.
        sys.exit(f"{error.status_code} {error.code}: {error.message} (request {error.request_id})")
    except openai.APIError as error:
        # The engine was lost in the middle of an answer.
        sys.exit(f"the answer broke off: {error.message}")
