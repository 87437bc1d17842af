# SPDX-License-Identifier: Apache-2.0
# What JSON Schema cannot say of a completion or a chat: rules between two fields, no NUL in a key, integers of 64
# bits. Bodies that break one are not generated, since the document permits them and the server rightly does not.
import schemathesis

VOCABULARY = 4096  # of the demo model
DEFAULTS = {"max_tokens": 16, "min_tokens": 0, "n": 1, "stream": False, "prompt": "", "add_special_tokens": True}


def is_coherent_chat(body):
    names = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    most = [value for value in names if value is not None]
    return (
        len(body["messages"]) <= 500  # the template writes words around each, and the test's server takes 4096 tokens
        and len(set(most)) < 2
        and (body.get("min_tokens") or 0) <= (most[0] if most else 4)
        and (not body.get("top_logprobs") or body.get("logprobs") is True)
        and (body.get("stream_options") is None or body.get("stream"))
    )


def is_beyond_json(value):
    """A key that holds a NUL, or an integer of more than 64 bits."""
    if isinstance(value, dict):
        return any("\0" in key or is_beyond_json(item) for key, item in value.items())
    if isinstance(value, list):
        return any(map(is_beyond_json, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


@schemathesis.hook
def filter_case(context, case):
    body = case.body
    if is_beyond_json(body):
        return False
    if not isinstance(body, dict):
        return True

    def field(name):
        value = body.get(name)
        return DEFAULTS.get(name) if value is None else value

    try:
        if "messages" in body:
            return is_coherent_chat(body)
        prompts = field("prompt") if isinstance(field("prompt"), list) else [field("prompt")]
        choices = field("n") if body.get("best_of") is None else body["best_of"]
        return (
            field("min_tokens") <= field("max_tokens")
            and choices >= field("n")
            and not (field("stream") and choices > field("n"))
            and (body.get("stream_options") is None or field("stream"))
            and (field("add_special_tokens") or "" not in prompts)
            and (body.get("session") is None or (choices == 1 and not isinstance(field("prompt"), list)))
            and all(int(key) < VOCABULARY for key in body.get("logit_bias") or {} if str(key).isdigit())
        )
    except TypeError:  # a field of another type: to be refused for that
        return True
