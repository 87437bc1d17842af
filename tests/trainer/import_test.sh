#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# mesa-trainer import of GGUF files: what it prints, what it writes, its exit statuses.
#
# The file is a model of one layer with weights that count up, written here byte by byte.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
need_installed python3
trainer=$build/mesa-trainer

# FILE WIDTH-OF-THE-VALUES
make_gguf() {
    python3 - "$1" "$2" <<'END'
import struct
import sys

path, rows = sys.argv[1], int(sys.argv[2])
text = lambda t: struct.pack("<Q", len(t)) + t.encode()
u32, f32 = (lambda n: struct.pack("<II", 4, n)), (lambda x: struct.pack("<If", 6, x))
keys = {"general.architecture": struct.pack("<I", 8) + text("llama"), "llama.block_count": u32(1),
        "llama.context_length": u32(64), "llama.embedding_length": u32(8), "llama.feed_forward_length": u32(16),
        "llama.attention.head_count": u32(2), "llama.attention.layer_norm_rms_epsilon": f32(1e-5)}
tensors = {"token_embd.weight": (8, 5), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
           "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (8, 8), "blk.0.attn_v.weight": (8, rows),
           "blk.0.attn_output.weight": (8, 8), "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate.weight": (8, 16),
           "blk.0.ffn_up.weight": (8, 16), "blk.0.ffn_down.weight": (16, 8)}
head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
head += b"".join(text(key) + value for key, value in keys.items())
data = b""
for name, shape in tensors.items():
    head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    head += struct.pack("<IQ", 0, len(data))
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    data += struct.pack(f"<{count}f", *(i / 256 for i in range(count)))
    data += bytes(-len(data) % 32)
open(path, "wb").write(head + bytes(-len(head) % 32) + data)
END
}

make_gguf "$folder/model.gguf" 8
told=$("$trainer" import "$folder/model.gguf" --out "$folder/model" 2>&1) || fail "import: $told"
grep -qE ': 704 parameters in F32, no tokenizer, no chat template$' <<<"$told" || fail "import says: $told"
"$trainer" import "$folder/model.gguf" --out "$folder/model" --dtype bf16 | grep -q 'in BF16' || fail '--dtype bf16'
"$trainer" inspect "$folder/model" | grep -qE 'self_attn\.q_proj\.weight +8 x 8 +BF16' || fail 'what was written'
# Row 1 of the first head's queries is row 2 of the file: the file has the rows of a head's two halves in turn.
"$trainer" import "$folder/model" --out "$folder/again" --dtype f32 >/dev/null || fail 'a folder is imported as before'
python3 - "$folder/again/model.safetensors" <<'END' || fail 'the rows of the queries'
import json
import struct
import sys

file = open(sys.argv[1], "rb").read()
length = struct.unpack("<Q", file[:8])[0]
begin = json.loads(file[8 : 8 + length])["model.layers.0.self_attn.q_proj.weight"]["data_offsets"][0] + 8 + length
first = [struct.unpack_from("<f", file, begin + 4 * 8 * row)[0] * 256 / 8 for row in range(8)]
sys.exit(first != [0, 2, 1, 3, 4, 6, 5, 7])
END

refused() { # WORDS ARGUMENT...
    local words=$1 status
    shift
    told=$("$trainer" import "$@" 2>&1)
    status=$?
    [ $status -eq 2 ] || fail "status $status: import $*"
    grep -qF -e "$words" <<<"$told" || fail "import $* says: $told"
}
make_gguf "$folder/odd.gguf" 7
refused "blk.0.attn_v.weight" "$folder/odd.gguf" --out "$folder/new"
refused '--dtype' "$folder/model.gguf" --out "$folder/new" --dtype f16
refused 'no GGUF file' "$source_dir/README.md" --out "$folder/new"
refused '--out is needed' "$folder/model.gguf"
refused 'No such file' "$folder/none.gguf" --out "$folder/new"
head -c 200 "$folder/model.gguf" >"$folder/cut.gguf"
refused 'cut.gguf' "$folder/cut.gguf" --out "$folder/new"
[ ! -e "$folder/new" ] || fail 'a refused import left a folder'
exit $((failures > 0))
