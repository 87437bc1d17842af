# SPDX-License-Identifier: Apache-2.0
# The two halves of benchmarks.sh that are Python: which items are read, and lm-evaluation-harness against what eval says.
#
# draw DATA FOLDER ITEMS TASK...: NAME.jsonl with the items, NAME.choices.jsonl with a record a choice.
# compare FOLDER ADDRESS TASK...: the harness over the same items through the server, item by item against eval's results.
# An item with one continuation has the choice between "greedy" and "not"; the others choose the likeliest.
import json
import os
import sys
import time


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def write_lines(path, records):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def pairs_of(record):
    if "target" in record:
        return [(record["ctx"], record["target"])]
    if "ctxs" in record:
        return [(context, record["cont"]) for context in record["ctxs"]]
    return [(record["ctx"], choice) for choice in record["choices"]]


def joined(context, continuation):
    """Context and continuation as eval joins them: spaces go to the continuation, one is put where there is none."""
    kept = context.rstrip(" ")
    space = context[len(kept) :]
    if not space and kept and not kept[-1].isspace() and not continuation[0].isspace():
        space = " "
    return kept, space + continuation


def draw(data, folder, items, *tasks):
    for task in tasks:
        records = read_lines(os.path.join(data, task + ".jsonl"))
        count = min(int(items), len(records))
        records = [records[i * len(records) // count] for i in range(count)]
        write_lines(os.path.join(folder, task + ".jsonl"), records)
        pairs = [{"ctx": context, "target": text} for record in records for context, text in pairs_of(record)]
        write_lines(os.path.join(folder, task + ".choices.jsonl"), pairs)


def results_of(path):
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    return {row["task"]: {metric["name"]: metric for metric in row["metrics"]} | {"row": row} for row in rows}


def run_harness(folder, address, task, records):
    """One response for each continuation: (sum of log-probabilities, whether it is what greedy decoding gives)."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=os.path.join(folder, "hf"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval

    documents = []
    for record in records:
        parts = [joined(*pair) for pair in pairs_of(record)]
        if "ctxs" in record or "target" in record:
            documents += [{"context": context, "ending": ending} for context, ending in parts]
        else:
            documents.append({"context": parts[0][0], "endings": [e for _, e in parts], "gold": record["gold"]})
    path = os.path.join(folder, task + ".harness.jsonl")
    write_lines(path, documents)
    choice = "endings" in documents[0]
    config = {
        "task": "mesa_" + task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": path}},
        "test_split": "test",
        "output_type": "multiple_choice" if choice else "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "gold" if choice else "{{ending}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    } | ({"doc_to_choice": "{{endings}}"} if choice else {})
    arguments = {
        "model": "model",
        "base_url": address + "/v1/completions",
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenizer_backend": "remote",
        "batch_size": 8,
    }
    start = time.time()
    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[config],
        log_samples=True,
        bootstrap_iters=0,
        cache_requests=False,
    )
    seconds = time.time() - start
    samples = sorted(result["samples"]["mesa_" + task], key=lambda sample: sample["doc_id"])
    return [(float(r[0][0]), str(r[0][1]) == "True") for s in samples for r in s["resps"]], seconds


def best(values):
    return max(range(len(values)), key=lambda i: values[i])


def compare_task(task, records, ours, choices, theirs):
    """Prints a row; returns how many choices are equal."""
    at = equal = equal_norm = right = 0
    worst = 0.0
    notes = []
    for place, record in enumerate(records):
        pairs = pairs_of(record)
        mine = choices["logprob"]["values"][at : at + len(pairs)]
        other = theirs[at : at + len(pairs)]
        worst = max([worst] + [abs(m - o[0]) for m, o in zip(mine, other)])
        if len(pairs) == 1:
            a, b, correct = bool(choices["exact"]["values"][at]), other[0][1], True
            same_norm = a == b
        else:
            sums, lengths = [o[0] for o in other], [len(text.encode()) for _, text in pairs]
            a, b, correct = best(mine), best(sums), record["gold"]
            norm = [best([v / n for v, n in zip(values, lengths)]) for values in (mine, sums)]
            same_norm = norm[0] == norm[1]
            assert (a == correct) == (ours["acc"]["values"][place] == 1), f"{task} {place}: eval chose otherwise"
            if a != b:
                gap = (abs(mine[a] - mine[b]), abs(sums[a] - sums[b]))
                notes.append(f"{task} item {place}: {a} and {b}, apart by {gap[0]:.2g} and {gap[1]:.2g} nats")
        equal += a == b
        equal_norm += same_norm
        right += b == correct
        at += len(pairs)
    accuracy = ours["exact" if "exact" in ours else "acc"]
    print(
        f"| {task} | {len(records)} | {100 * accuracy['mean']:.1f} ± {100 * accuracy['error']:.1f} | "
        f"{100 * right / len(records):.1f} | {equal} | {equal_norm} | {worst:.1e} | {ours['row']['seconds']:.1f} |",
        end="",
    )
    return equal, notes


def compare(folder, address, *tasks):
    ours, choices = results_of(os.path.join(folder, "eval.json")), results_of(os.path.join(folder, "choices.json"))
    print("| task | items | eval, % right | harness | same choice | by bytes | largest difference of a sum, nats | eval, s "
          "| harness, s |\n|---|---|---|---|---|---|---|---|---|")
    same = items = 0
    spent = [0.0, 0.0]
    differences = []
    for task in tasks:
        records = read_lines(os.path.join(folder, task + ".jsonl"))
        theirs, seconds = run_harness(folder, address, task, records)
        equal, notes = compare_task(task, records, ours[task], choices[task + ".choices"], theirs)
        print(f" {seconds:.1f} |", flush=True)
        same, items = same + equal, items + len(records)
        spent = [spent[0] + ours[task]["row"]["seconds"], spent[1] + seconds]
        differences += notes
    print(f"{same} of {items} choices are the same ({100 * same / items:.2f} %); eval {spent[0]:.1f} s, "
          f"harness {spent[1]:.1f} s")
    for difference in differences:
        print(difference)
    if same < 0.995 * items:
        sys.exit("FAIL: fewer than 99.5 %")


if __name__ == "__main__":
    {"draw": draw, "compare": compare}[sys.argv[1]](*sys.argv[2:])
