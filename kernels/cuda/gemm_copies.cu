// SPDX-License-Identifier: Apache-2.0
// Rounding of operands and what of it is kept; gemm_copies.cuh. A thread reads eight columns and writes 16 bytes.
// Copies go around the room; one that is written over is forgotten.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/gemm_copies.cuh"
#include "kernels/cuda/gemm_tile.cuh"

enum { PLACE = 256 }; // what a copy's place is a multiple of

struct rounding {
    cuda_operand from;
    int64_t row0;
    int32_t rows, columns, eights; // eights: of a row of the copy
    bool wide;
    uint4 *to;
};

static __global__ void __launch_bounds__(256) round_kernel(const rounding job) {
    cuda_begin();
    cuda_await();
    const int32_t row = cuda_plane_item(), eight = cuda_plane_column();
    if (row >= job.rows || eight >= job.eights)
        return;
    float x[CUDA_COPY_EIGHT];
    cuda_operand_eight(job.from, job.row0 + row, (int64_t)eight * CUDA_COPY_EIGHT,
                       job.columns - eight * CUDA_COPY_EIGHT, job.wide, x);
    job.to[(int64_t)row * job.eights + eight] = cuda_round_eight(x);
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && (const char *)a < (const char *)b + b_bytes &&
           (const char *)b < (const char *)a + a_bytes;
}

static void drop(cuda_copies *copies, const void *p, size_t bytes) {
    int kept = 0;
    for (int i = 0; i < copies->count; i++) {
        const cuda_copy &copy = copies->copy[i];
        const float *from = (const float *)copy.p + copy.row0 * copy.ld;
        const size_t span = copy.bf16 ? 0 : sizeof(float) * ((size_t)(copy.rows - 1) * (size_t)copy.ld + copy.columns);
        if (!overlap(from, span, p, bytes) && !overlap(copy.place, copy.bytes, p, bytes))
            copies->copy[kept++] = copy;
    }
    copies->count = kept;
}

void cuda_copies_written(const cuda_step *step, const void *p, size_t bytes) {
    if (step->copies)
        drop(step->copies, p, bytes);
}

void cuda_copies_forget(const cuda_step *step) {
    if (step->copies)
        step->copies->count = 0;
}

static bool is_same(const cuda_copy &a, const cuda_copy &b) {
    return a.p == b.p && a.row0 == b.row0 && a.ld == b.ld && a.rows == b.rows && a.columns == b.columns &&
           a.bf16 == b.bf16;
}

// Behind the last one or at the beginning, but not where `keep` is: there is room for three.
static char *place_for(const cuda_copies *copies, char *room, size_t bytes, const cuda_copy *keep) {
    char *const end = room + cuda_copies_bytes();
    char *place = room + copies->next;
    if (bytes > (size_t)(end - place))
        place = room;
    if (keep && overlap(place, bytes, keep->place, keep->bytes)) {
        place = keep->place + keep->bytes;
        if (bytes > (size_t)(end - place))
            place = room;
    }
    return place;
}

static size_t bytes_of(const cuda_copy &copy) {
    return (size_t)copy.rows * (size_t)cuda_copy_ld(copy.columns) * sizeof(__nv_bfloat16);
}

static kern_status round_operand(const cuda_step *step, const cuda_copy &copy) {
    const cuda_operand from = {copy.p, copy.ld, false, copy.bf16};
    const int32_t eights = (int32_t)(cuda_copy_ld(copy.columns) / CUDA_COPY_EIGHT);
    const rounding job = {
        from, copy.row0, copy.rows, copy.columns, eights, cuda_operand_is_wide(from), (uint4 *)copy.place};
    const cuda_plane plane = cuda_plane_of(copy.rows, eights);
    return cuda_start(step, round_kernel, plane.grid, plane.block, 0, job);
}

// A place for a copy, which is from now on one of them.
static void place(cuda_copies *copies, char *room, cuda_copy *wanted, const cuda_copy *keep) {
    const size_t bytes = bytes_of(*wanted);
    wanted->bytes = (bytes + PLACE - 1) & ~(size_t)(PLACE - 1);
    wanted->place = place_for(copies, room, wanted->bytes, keep);
    drop(copies, wanted->place, wanted->bytes);
    if (copies->count == CUDA_COPIES) {
        for (int i = 1; i < CUDA_COPIES; i++)
            copies->copy[i - 1] = copies->copy[i];
        copies->count--;
    }
    copies->copy[copies->count++] = *wanted;
    copies->next = (size_t)(wanted->place - room) + wanted->bytes;
}

kern_status cuda_copy_operand(const cuda_step *step, cuda_copies *copies, char *room, cuda_copy *wanted,
                              const cuda_copy *keep) {
    for (int i = 0; i < copies->count; i++)
        if (is_same(copies->copy[i], *wanted)) {
            *wanted = copies->copy[i];
            return KERN_OK;
        }
    if (bytes_of(*wanted) > CUDA_COPY_MOST)
        return KERN_UNSUPPORTED;
    place(copies, room, wanted, keep);
    return round_operand(step, *wanted);
}

__nv_bfloat16 *cuda_copies_offer(const cuda_step *step, const float *p, int32_t rows, int64_t columns) {
    cuda_copies *copies = step->copies;
    if (!copies || !step->cuda->cublas || columns % CUDA_COPY_EIGHT != 0 || rows > cuda_copy_rows(columns))
        return NULL;
    cuda_copy wanted = {p, 0, columns, rows, (int32_t)columns, false, NULL, 0};
    const cuda_copy last = copies->count ? copies->copy[copies->count - 1] : cuda_copy();
    place(copies, cuda_copies_room(step->cuda->workspace), &wanted, &last);
    return (__nv_bfloat16 *)wanted.place;
}

__nv_bfloat16 *cuda_copies_offer_expected(const cuda_step *step, const float *p, int64_t columns, size_t workspace) {
    const cuda_copies *copies = step->copies;
    const bool expected = copies && (p == copies->expected[0] || p == copies->expected[1]);
    const bool apart = workspace <= cuda_cublas_bytes() - cuda_copies_bytes();
    return expected && apart ? cuda_copies_offer(step, p, step->tokens, columns) : NULL;
}
