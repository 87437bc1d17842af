# SPDX-License-Identifier: Apache-2.0
# lm-evaluation-harness against a running server: 300 questions with four answers each, scored over HTTP, against the
# same log-likelihoods from the trainer's own forward pass.
#
# Arguments: base address, folder of texts (*.md and *.h are cut into questions), folder for files, mesa-trainer, model
# folder. A question is the first words of a paragraph; its answers are how it goes on and how three others do. The
# trainer sees the ids that the harness sends, so that only the scoring is compared: which answer is likeliest, and
# each sum within a tolerance.
import glob
import json
import os
import re
import struct
import subprocess
import sys
import urllib.request

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=os.path.join(sys.argv[3], "hf"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import lm_eval  # noqa: E402  the variables above come first
import numpy  # noqa: E402

BASE, TEXTS, WORK, TRAINER, MODEL = sys.argv[1:]
QUESTIONS, CHOICES, TOLERANCE, BATCH = 300, 4, 2e-3, 150


def paragraphs():
    found = []
    for pattern in ("**/*.md", "**/*.h"):
        for path in sorted(glob.glob(os.path.join(TEXTS, pattern), recursive=True)):
            if os.sep + "build" in path:
                continue
            text = re.sub(r"(?m)^// ?", "", open(path, encoding="utf-8").read())
            for paragraph in re.split(r"\n\s*\n", text):
                words = re.sub(r"\s+", " ", paragraph).strip().split(" ")
                if len(words) >= 14 and all(len(w) < 40 for w in words):
                    found.append(words[:16])
    return found[:: max(1, len(found) // QUESTIONS)][:QUESTIONS]


def write_task(path):
    parts = [(" ".join(w[:8]), " " + " ".join(w[8:])) for w in paragraphs()]
    assert len(parts) == QUESTIONS, f"the texts give {len(parts)} questions"
    with open(path, "w", encoding="utf-8") as file:
        for i, (context, ending) in enumerate(parts):
            choices = [parts[(i + k * 71) % QUESTIONS][1] for k in range(CHOICES)]
            gold = i % CHOICES
            choices[0], choices[gold] = choices[gold], choices[0]
            file.write(json.dumps({"ctx": context, "choices": choices, "gold": gold}) + "\n")
    return parts


def evaluate(path):
    task = {
        "task": "mesa_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": path}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{ctx}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    arguments = {
        "model": "demo",
        "base_url": BASE + "/v1/completions",
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenizer_backend": "remote",
        "batch_size": 8,
    }
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
        cache_requests=False,
    )


def ids_of(text):
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(BASE + "/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["tokens"]


def read_tensors(path):
    data = open(path, "rb").read()
    length = struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            yield name, numpy.frombuffer(data[begin:end], "<f4").reshape(entry["shape"]).astype(numpy.float64)


def trainer_sums(pairs):
    """For each (ids, length of the context) the sum of log-probabilities of the ids after it, by the trainer."""
    names = os.path.join(WORK, "ids.txt"), os.path.join(WORK, "logits.safetensors")
    with open(names[0], "w") as file:
        file.writelines(",".join(map(str, ids)) + "\n" for ids, _ in pairs)
    command = [TRAINER, "logits", MODEL, "--lines", "--tokens", "@" + names[0], "--out", names[1]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    logits = dict(read_tensors(names[1]))
    sums = []
    for i, (ids, context) in enumerate(pairs):
        rows = logits[f"logits.{i}"]
        assert rows.shape[0] == len(ids)
        rows = rows - rows.max(axis=1, keepdims=True)
        rows -= numpy.log(numpy.exp(rows).sum(axis=1, keepdims=True))
        sums.append(sum(rows[at - 1, ids[at]] for at in range(context, len(ids))))
    return sums


path = os.path.join(WORK, "questions.jsonl")
write_task(path)
result = evaluate(path)
samples = sorted(result["samples"]["mesa_choice"], key=lambda sample: sample["doc_id"])
assert len(samples) == QUESTIONS, f"{len(samples)} samples"

pairs = [(ids_of(s["doc"]["ctx"] + c), len(ids_of(s["doc"]["ctx"]))) for s in samples for c in s["doc"]["choices"]]
sums = [value for at in range(0, len(pairs), BATCH) for value in trainer_sums(pairs[at : at + BATCH])]
wanted = [sums[at : at + CHOICES] for at in range(0, len(sums), CHOICES)]

equal = apart = 0
worst = 0.0
for sample, row in zip(samples, wanted):
    got = [float(response[0]) for response in sample["filtered_resps"]]
    equal += int(numpy.argmax(got)) == int(numpy.argmax(row))
    error = max(abs(g - w) / max(1.0, abs(w)) for g, w in zip(got, row))
    apart += error > TOLERANCE
    worst = max(worst, error)
right = result["results"]["mesa_choice"]["acc,none"]
chosen = sum(int(numpy.argmax(row)) == s["doc"]["gold"] for s, row in zip(samples, wanted)) / QUESTIONS
print(f"{equal} of {QUESTIONS} choices equal the trainer's; accuracy {right:.4f} over HTTP, {chosen:.4f} by the trainer; "
      f"largest relative error of a sum {worst:.2e}")
if equal < 0.995 * QUESTIONS or apart > 0 or abs(right - chosen) > 0.005:
    print("FAIL: the choices are not the trainer's, or a sum is off")
    sys.exit(1)
if len({int(numpy.argmax(row)) for row in wanted}) < CHOICES:
    print("FAIL: some place is never chosen: the questions tell nothing")
    sys.exit(1)
