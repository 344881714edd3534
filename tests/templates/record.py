"""Records what the templates of the corpus render to: `python record.py FOLDER` writes expected.json.

FOLDER is what fetch.py made. The texts are those of transformers' own apply_chat_template; only their hashes are kept, because
they contain the templates' own words. `python record.py FOLDER TEMPLATE CONVERSATION` prints one of them.
"""

import datetime
import hashlib
import json
import pathlib
import sys

import jinja2
import transformers
import transformers.utils.chat_template_utils as reference

from conversations import CONVERSATIONS

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def render(template, conversation):
    texts, _ = reference.render_jinja_template(
        conversations=[conversation["messages"]],
        tools=conversation.get("tools"),
        documents=conversation.get("documents"),
        chat_template=template,
        add_generation_prompt=conversation.get("add_generation_prompt", True),
        continue_final_message=conversation.get("continue_final_message", False),
        **{**SPECIAL, **conversation.get("kwargs", {})},
    )
    return texts[0]


def hash_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expected(template, conversation):
    """A text's hash, or none where transformers refuses."""
    try:
        return hash_of(render(template, conversation))
    except Exception:
        return None


def main():
    reference.datetime = Clock
    folder = pathlib.Path(sys.argv[1])
    if len(sys.argv) > 2:
        sys.stdout.write(render((folder / sys.argv[2]).read_text(encoding="utf-8"), CONVERSATIONS[sys.argv[3]]))
        return
    templates = {}
    for path in sorted(folder.glob("*/*.jinja")):
        template = path.read_text(encoding="utf-8")
        rendered = {name: expected(template, conversation) for name, conversation in CONVERSATIONS.items()}
        templates[str(path.relative_to(folder))] = {"hash": hash_of(template), "rendered": rendered}
    recorded = {
        "made_with": {"transformers": transformers.__version__, "jinja2": jinja2.__version__},
        "now_s": int(NOW.timestamp()),
        "special": SPECIAL,
        "conversations": CONVERSATIONS,
        "templates": templates,
    }
    text = json.dumps(recorded, ensure_ascii=False, indent=1)
    (HERE / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
