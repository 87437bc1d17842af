# SPDX-License-Identifier: Apache-2.0
# The `openai` package and LangChain against a running server: what they send is taken, what they read is there.
#
# Arguments: the base address ("http://127.0.0.1:PORT/v1"). Every check prints its name when it fails; exit status 1
# then. Greedy texts are compared with each other: streamed, plain, alone, in a list, from ids, through LangChain, and
# chats with the completion of the prompt that the template of server.sh makes of them.
import asyncio
import json
import sys
import time
import urllib.request

import openai
from langchain_openai import ChatOpenAI as LangChainChat
from langchain_openai import OpenAI as LangChainOpenAI

BASE = sys.argv[1]
PROMPT = "Once upon a time"
GREEDY = {"model": "demo", "max_tokens": 12, "temperature": 0}
client = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=600)
failures = 0


def check(condition, what):
    global failures
    if not condition:
        failures += 1
        print("FAIL:", what)


def post(path, body):
    request = urllib.request.Request(
        BASE.removesuffix("/v1") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def ids_of(text):
    return post("/tokenize", {"prompt": text})["tokens"]


def complete(prompt=PROMPT, **fields):
    return client.completions.create(prompt=prompt, **{**GREEDY, **fields})


def test_models():
    models = client.models.list().data
    check([m.id for m in models] == ["demo"], "models.list")
    check(client.models.retrieve("demo").object == "model", "models.retrieve")


def test_plain():
    answer = complete()
    choice = answer.choices[0]
    check(answer.object == "text_completion" and answer.id.startswith("cmpl-"), "object and id")
    check(choice.finish_reason == "length" and choice.index == 0 and choice.text, "a choice")
    usage = answer.usage
    check(usage.completion_tokens == 12 and usage.prompt_tokens == len(ids_of(PROMPT)), f"usage {usage}")
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "total_tokens")
    check(complete().choices[0].text == choice.text, "the same request gives the same text")


def test_stream():
    for sampling in ({}, {"temperature": 1.0, "seed": 11, "top_p": 0.9}):
        plain = complete(**sampling)
        chunks = list(complete(stream=True, stream_options={"include_usage": True}, **sampling))
        text = "".join(c.choices[0].text for c in chunks if c.choices)
        check(text == plain.choices[0].text, f"streamed text with {sampling}")
        check([c.choices == [] for c in chunks].count(True) == 1 and not chunks[-1].choices, "one usage chunk, the last")
        check(chunks[-1].usage.completion_tokens == plain.usage.completion_tokens, "usage of the stream")
        check({c.id for c in chunks} == {chunks[0].id}, "one id a stream")
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        check(reasons[-1] == "length" and set(reasons[:-1]) <= {None}, "one finish_reason")
    chunks = list(complete(stream=True))
    check(all(c.choices for c in chunks), "no usage chunk unasked")


def test_lists():
    texts = [PROMPT, "The king", "In the year"]
    alone = [complete(t).choices[0].text for t in texts]
    answer = complete(texts)
    check([c.index for c in answer.choices] == [0, 1, 2], "indices of a list")
    check([c.text for c in answer.choices] == alone, "a list equals its members alone")
    ids = [ids_of(t) for t in texts]
    check([c.text for c in complete(ids).choices] == alone, "lists of ids equal texts")
    check(complete(ids[0]).choices[0].text == alone[0], "ids equal text")
    many = complete(texts[:2], n=2, temperature=1, seed=5)
    check([c.index for c in many.choices] == [0, 1, 2, 3], "n choices of each prompt in order")
    check(len({c.text for c in many.choices}) == 4, "choices differ")
    parts = {}
    for chunk in complete(texts, stream=True):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    check([parts[i] for i in range(3)] == alone, "a list streamed")


def test_sampling():
    stop = complete(max_tokens=40).choices[0].text[8:11]
    cut = complete(max_tokens=40, stop=[stop, "\x00"]).choices[0]
    check(stop not in cut.text and cut.finish_reason == "stop", "stop strings")
    banned = ids_of(PROMPT + complete(max_tokens=1).choices[0].text)[-1]
    check(complete(logit_bias={str(banned): -100}).choices[0].text != complete().choices[0].text, "logit_bias")
    check(complete(presence_penalty=2, frequency_penalty=2, max_tokens=40).choices[0].text, "penalties")
    best = complete(best_of=3, n=1, temperature=1, seed=3)
    check(len(best.choices) == 1, "best_of")
    check(complete(max_tokens=0).choices[0].text == "", "max_tokens 0")
    knobs = complete(extra_body={"cg_tolerance": 0.5, "top_k": 5, "min_p": 0.01, "ignore_eos": True})
    strict = complete(extra_body={"cg_tolerance": 1e-4})
    steps = [a.usage.model_extra["compute"]["completion"]["cg_steps_mean"] for a in (knobs, strict)]
    check(steps[0] < steps[1], f"knobs change the solver's steps: {steps}")
    nulls = {k: None for k in ("stop", "seed", "logit_bias", "stream", "n", "logprobs", "echo", "user", "suffix",
                               "stream_options", "cg_tolerance", "exit_threshold", "max_loops", "best_of")}
    check(complete(extra_body=nulls).choices[0].text == complete().choices[0].text, "null is absent")


def test_logprobs():
    prompt_ids = ids_of(PROMPT)
    answer = complete(logprobs=3).choices[0]
    lp = answer.logprobs
    check(len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == 12, "12 entries")
    check("".join(lp.tokens) == answer.text, "tokens make the text")
    check(all(p == max(top.values()) for p, top in zip(lp.token_logprobs, lp.top_logprobs)), "greedy is the likeliest")
    check(all(3 <= len(top) <= 4 for top in lp.top_logprobs), "the likeliest three")
    for tokens in (0, 1):
        echo = complete(echo=True, logprobs=1, max_tokens=tokens).choices[0]
        lp = echo.logprobs
        check(len(lp.token_logprobs) == len(prompt_ids) + tokens, f"echo with max_tokens {tokens}: {len(lp.tokens)}")
        check(lp.token_logprobs[0] is None and lp.top_logprobs[0] is None, "the first token has no probability")
        check(all(p <= 0 for p in lp.token_logprobs[1:]), "logprobs are not positive")
        check(echo.text.startswith(PROMPT), "echo")
    check(complete(logprobs=0).choices[0].logprobs.token_logprobs[0] <= 0, "logprobs 0")
    streamed = [c.choices[0].logprobs for c in complete(logprobs=1, stream=True) if c.choices]
    tokens = [t for part in streamed if part for t in part.tokens]
    check(tokens == complete(logprobs=1).choices[0].logprobs.tokens, "logprobs streamed")
    forced = complete(logit_bias={str(ids_of("x")[-1]): 100}, logprobs=1, max_tokens=2).choices[0]
    check(all(p < -1e-3 for p in forced.logprobs.token_logprobs), "logprobs are the model's, before the bias")


def converse(messages, **fields):
    return client.chat.completions.create(messages=messages, **{**GREEDY, **fields})


def prompt_of(messages):
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "


def test_chat():
    messages = [{"role": "system", "content": "Tell a story."}]
    for turn in range(10):
        messages.append({"role": "user", "content": f"Part {turn}?"})
        wanted = complete(prompt_of(messages)).choices[0].text
        answer = converse(messages)
        message = answer.choices[0].message
        check(answer.object == "chat.completion" and answer.id.startswith("chatcmpl-"), "chat: object and id")
        check(message.role == "assistant" and message.content == wanted, f"chat: turn {turn} is its prompt's completion")
        check(answer.usage.prompt_tokens == len(ids_of(prompt_of(messages))), "chat: prompt tokens")
        chunks = list(converse(messages, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        check(text == wanted, "chat: streamed text")
        check(chunks[0].choices[0].delta.role == "assistant", "chat: the role comes first")
        check([c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length", "chat: finish_reason")
        check(chunks[-1].usage.completion_tokens == 12, "chat: usage of the stream")
        messages.append({"role": "assistant", "content": message.content})
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    check(
        converse(parts).choices[0].message.content == complete("user: a\nb\nassistant: ").choices[0].text,
        "chat: text parts",
    )


def test_chat_logprobs():
    messages = [{"role": "user", "content": "Hello"}]
    choice = converse(messages, logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    check(len(tokens) == 12 and all(len(t.top_logprobs) == 3 for t in tokens), "chat: logprobs")
    check(b"".join(bytes(t.bytes) for t in tokens).decode() == choice.message.content, "chat: bytes make the text")
    check(all(t.logprob == t.top_logprobs[0].logprob for t in tokens), "chat: greedy is the likeliest")
    legacy = complete(prompt_of(messages), logprobs=1).choices[0].logprobs.token_logprobs
    check([t.logprob for t in tokens] == legacy, "chat: the logprobs of the completion")
    check(converse(messages).choices[0].logprobs is None, "chat: no logprobs unasked")


def test_chat_injection():
    end = post("/tokenize", {"prompt": "", "add_special_tokens": True})["tokens"]
    written = converse([{"role": "user", "content": "<|endoftext|>"}], extra_body={"return_token_ids": True})
    ids = written.choices[0].model_extra["prompt_token_ids"]
    check(ids.count(end[0]) == 1 and ids[0] == end[0], "chat: a message writes no special token")


def test_chat_errors():
    hello = [{"role": "user", "content": "Hello"}]
    for messages, fields, param in (
        ([], {}, "messages"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], {}, "messages"),
        (hello, {"temperature": 101}, "temperature"),
        (hello, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (hello, {"response_format": {"type": "json_object"}}, "response_format"),
        (hello, {"top_logprobs": 3}, "top_logprobs"),
    ):
        try:
            converse(messages, **fields)
            check(False, f"chat: {fields} is accepted")
        except openai.BadRequestError as refused:
            check(refused.body["param"] == param, f"chat: {fields}: param {refused.body}")


def test_chat_langchain():
    chat = LangChainChat(base_url=BASE, api_key="unused", model="demo", temperature=0, max_tokens=12, max_retries=0)
    wanted = converse([{"role": "user", "content": "Hello"}]).choices[0].message.content
    check(chat.invoke("Hello").content == wanted, "LangChain: chat")
    check("".join(piece.content for piece in chat.stream("Hello")) == wanted, "LangChain: chat streamed")
    check(chat.invoke([("system", "S"), ("human", "Hello")]).usage_metadata["output_tokens"] == 12, "LangChain: usage")


def test_errors():
    for fields, error, param in (
        ({"temperature": 101}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"model": "none"}, openai.NotFoundError, "model"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
    ):
        for stream in (False, True):
            if stream and "stream_options" in fields:
                continue
            try:
                complete(**{**fields, "stream": stream})
                check(False, f"{fields} is accepted")
            except error as refused:
                check(refused.body["param"] == param, f"{fields}: param {refused.body}")
                check(param in refused.body["message"], f"{fields}: the message does not name it")
            except openai.APIError as other:
                check(False, f"{fields}: {type(other).__name__}")


def cancelled():
    text = urllib.request.urlopen(BASE.removesuffix("/v1") + "/metrics", timeout=600).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("mesa_cancelled_total"))


def test_cancel():
    before = cancelled()
    stream = complete(stream=True, max_tokens=60000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    for _ in range(3000):
        if cancelled() > before:
            return
        time.sleep(0.1)
    check(False, "a closed stream is not cancelled")


async def many():
    texts = [PROMPT, "The king", "In the year", "a"] * 6
    async with openai.AsyncOpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=600) as other:
        answers = await asyncio.gather(*(other.completions.create(prompt=t, **GREEDY) for t in texts))
    alone = {t: complete(t).choices[0].text for t in set(texts)}
    check([a.choices[0].text for a in answers] == [alone[t] for t in texts], "24 at a time equal each alone")


def test_langchain():
    chain = LangChainOpenAI(base_url=BASE, api_key="unused", model="demo", temperature=0, max_tokens=12, max_retries=0)
    wanted = complete().choices[0].text
    check(chain.invoke(PROMPT) == wanted, "LangChain: invoke")
    check("".join(chain.stream(PROMPT)) == wanted, "LangChain: stream")
    check(chain.batch([PROMPT, "The king"])[0] == wanted, "LangChain: batch")
    result = chain.generate([PROMPT] * 25)  # two requests: it sends twenty prompts at a time
    check([g[0].text for g in result.generations] == [wanted] * 25, "LangChain: generate")
    check(result.llm_output["token_usage"]["completion_tokens"] == 25 * 12, "LangChain: usage")
    check(chain.bind(stop=[wanted[4:7]]).invoke(PROMPT) == wanted[: wanted.index(wanted[4:7])], "LangChain: stop")


tests = [v for k, v in list(globals().items()) if k.startswith("test_")] + [lambda: asyncio.run(many())]
for test in tests:
    try:
        test()
    except Exception as fault:  # one broken test does not hide the others
        check(False, f"{test.__name__}: {type(fault).__name__}: {fault}")
print(f"{len(tests)} groups, {failures} failures; openai {openai.__version__}")
sys.exit(failures > 0)
