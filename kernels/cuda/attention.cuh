// SPDX-License-Identifier: Apache-2.0
// What both kernels of attention share: where a document's keys and values are. Keys of this launch are read from k and
// v, earlier ones from the row's pages or from the ring in its slot.
#ifndef KERNELS_CUDA_ATTENTION_CUH
#define KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/cuda.cuh"

struct attention_call {
    const float *q, *k, *v;
    kern_ptr ring, pages;
    float *o, *lse;
    kern_attention shape;
    int64_t page_offset;
    int32_t first_token, last_token; // whose queries: [first_token, last_token)
    int32_t queries;                 // of a block
    int32_t pieces;                  // blocks of a head, or of a kv head
    int32_t splits;                  // blocks that share the spans of a token, where it has several
    int32_t max_spans;               // of a head that `partial` has room for
    float *partial;                  // (tokens, heads, max_spans, [max, sum, o]) of a span
};

// ------------------------------------------------------------------------------------------------ where keys are kept

// The keys of one document and kv head: positions [first, start) in pages or ring, from start on in k and v.
struct document {
    int64_t first, start;
    int32_t start_token;
    const kern_row *row;
};

static __device__ bool has_history(const attention_call &c, const kern_row *row) {
    return c.shape.window > 0 ? c.ring.p && row->slot >= 0 : c.pages.p && row->page0 >= 0;
}

static __device__ document document_of(const cuda_table *table, const attention_call &c, int32_t token) {
    document d;
    d.start_token = table->token_start[token];
    d.row = &table->row[table->token_row[token]];
    d.start = table->token_position[d.start_token];
    d.first = d.start_token == d.row->token0 && has_history(c, d.row) ? 0 : d.start;
    return d;
}

struct key_value {
    float *k, *v;
};

// Where the row keeps the key of a position.
static __device__ key_value kept_at(const cuda_table *table, const attention_call &c, const kern_row *row,
                                    int32_t kv_head, int64_t position) {
    const kern_attention &s = c.shape;
    float *memory;
    int64_t capacity, entry;
    if (s.window > 0) {
        capacity = s.window;
        entry = position % s.window;
        memory = cuda_slot(table, c.ring, row->slot);
    } else {
        capacity = KERN_PAGE_TOKENS;
        entry = position % KERN_PAGE_TOKENS;
        const int64_t page = table->page[row->page0 + position / KERN_PAGE_TOKENS];
        memory = (float *)((char *)c.pages.p + c.page_offset + page * table->page_stride);
    }
    key_value at;
    at.k = memory + (kv_head * capacity + entry) * s.head_width;
    at.v = at.k + s.kv_heads * capacity * s.head_width;
    return at;
}

// attention_prompt.cu: the tokens of prompt rows, where the chip and the shape allow.
bool cuda_attention_has_prompts(const kern_cuda *cuda, const kern_attention *shape);
kern_status cuda_attention_prompts(const cuda_step *step, attention_call c);

#endif
