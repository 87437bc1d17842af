# SPDX-License-Identifier: Apache-2.0
"""Speed of llama.cpp on a GGUF file, by llama-cpp-python: llama_peer.py FILE PROMPT TOKENS ROUNDS SESSIONS

Reads a prompt of random ids in one batch, generates after it in one stream, then in SESSIONS streams from nothing; two
threads; ids are given, so that nothing is drawn and only the logits are fetched. Medians over the rounds and ranges; the
first round is not counted.
"""
import ctypes
import random
import statistics
import sys
import time

import llama_cpp as api


def batch(items):
    """items: (id, position, stream, whether its logits are wanted)"""
    made = api.llama_batch_init(len(items), 0, 1)
    made.n_tokens = len(items)
    for i, (token, position, stream, wanted) in enumerate(items):
        made.token[i], made.pos[i], made.logits[i] = token, position, wanted
        made.n_seq_id[i], made.seq_id[i][0] = 1, stream
    return made


def run(context, batches):
    start = time.perf_counter()
    for one in batches:
        if api.llama_decode(context, one) != 0:
            sys.exit('llama_decode failed')
        api.llama_get_logits(context)
    seconds = time.perf_counter() - start
    for one in batches:
        api.llama_batch_free(one)
    return seconds


@api.llama_log_callback
def silent(*_):
    pass


def main():
    path = sys.argv[1]
    prompt, tokens, rounds, sessions = map(int, sys.argv[2:6])
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    options = api.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = (prompt + tokens + 64) * sessions, prompt, prompt
    options.n_threads = options.n_threads_batch = 2
    options.n_seq_max, options.kv_unified = sessions, True
    context = api.llama_init_from_model(model, options)
    memory = api.llama_get_memory(context)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    draw = random.Random(1).randrange
    rates = {f'prefill {prompt}': [], 'one stream': [], f'{sessions} streams': []}
    for counted in range(rounds + 1):
        api.llama_memory_clear(memory, True)
        times = [run(context, [batch([(draw(vocabulary), i, 0, i == prompt - 1) for i in range(prompt)])]),
                 run(context, [batch([(draw(vocabulary), prompt + i, 0, True)]) for i in range(tokens)])]
        api.llama_memory_clear(memory, True)
        times.append(run(context, [batch([(draw(vocabulary), i, s, True) for s in range(sessions)])
                                   for i in range(tokens)]))
        for rate, seconds, count in zip(rates.values(), times, (prompt, tokens, tokens * sessions)):
            if counted:
                rate.append(count / seconds)
    print(', '.join(f'{name} {statistics.median(rate):.0f} ({min(rate):.0f}-{max(rate):.0f})'
                    for name, rate in rates.items()), 'tokens/s')


main()
