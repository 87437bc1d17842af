# SPDX-License-Identifier: Apache-2.0
# What JSON Schema cannot say of a completion: rules between two fields, and that no key holds a NUL. Bodies that break
# one are not generated, since the document permits them and the server rightly does not.
import schemathesis

DEFAULTS = {"max_tokens": 16, "min_tokens": 0, "n": 1, "stream": False, "prompt": "", "add_special_tokens": True}


def has_nul_key(value):
    if isinstance(value, dict):
        return any("\0" in key or has_nul_key(item) for key, item in value.items())
    return isinstance(value, list) and any(map(has_nul_key, value))


@schemathesis.hook
def filter_case(context, case):
    body = case.body
    if has_nul_key(body):
        return False
    if not isinstance(body, dict):
        return True

    def field(name):
        value = body.get(name)
        return DEFAULTS.get(name) if value is None else value

    try:
        prompts = field("prompt") if isinstance(field("prompt"), list) else [field("prompt")]
        choices = field("n") if body.get("best_of") is None else body["best_of"]
        return (
            field("min_tokens") <= field("max_tokens")
            and choices >= field("n")
            and not (field("stream") and choices > field("n"))
            and (body.get("stream_options") is None or field("stream"))
            and (field("add_special_tokens") or "" not in prompts)
        )
    except TypeError:  # a field of another type: to be refused for that
        return True
