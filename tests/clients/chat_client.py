# SPDX-License-Identifier: Apache-2.0
# A conversation of ten turns with a running server through OpenAI's own client, streamed, for a person to read.
#
#   chat_client.py http://127.0.0.1:PORT/v1 MODEL
# Greedy. Prints the conversation. Exit status 1 when an answer is empty or is not ended by the model within its limit,
# when the last is not that of the same request unstreamed, or when the model does not know the first thing asked, which
# any model that chats does.
import sys

import openai

BASE, MODEL = sys.argv[1:]
QUESTIONS = [
    "Hello! What is the capital of France?",
    "Which river runs through it?",
    "Name three things that a visitor should see there.",
    "Tell me more about the first of them, in one sentence.",
    "How do I say 'thank you' in French?",
    "My name is Anna, and I have a dog. Suggest a name for him.",
    "What is my name?",
    "Write a haiku about the sea.",
    "Write a Python function that adds two numbers.",
    "Thank you, that is all. Goodbye!",
]
LIMIT = 400

client = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=600)
messages = [{"role": "system", "content": "You are a helpful assistant. Your answers are short."}]
failures = 0


def check(condition, what):
    global failures
    failures += not condition
    if not condition:
        print("FAIL:", what)


def ask():
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": LIMIT}


for turn, question in enumerate(QUESTIONS):
    messages.append({"role": "user", "content": question})
    pieces, reason, usage = [], None, None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask()):
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
        usage = chunk.usage or usage
    text = "".join(pieces)
    print(f"> {question}\n{text}\n[{usage.prompt_tokens} read, {usage.completion_tokens} written, {reason}]", flush=True)
    check(text.strip(), f"turn {turn}: an empty answer")
    check(reason == "stop", f"turn {turn}: ended by {reason}")
    check(turn > 0 or "Paris" in text, "the capital of France")
    if turn + 1 == len(QUESTIONS):
        check(client.chat.completions.create(**ask()).choices[0].message.content == text, "unstreamed it is another")
    messages.append({"role": "assistant", "content": text})
print(f"{len(QUESTIONS)} turns, {failures} failures")
sys.exit(failures > 0)
