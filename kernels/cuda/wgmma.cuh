// SPDX-License-Identifier: Apache-2.0
// Products by a warpgroup (wgmma, sm_90a): d (64 x N, float32) += a (64 x 16) b (16 x N), both bf16.
//
// a lies in registers: warp w of the four has rows 16 w .. 16 w + 15 as the A operand of mma.m16n8k16. b lies in shared
// memory as core matrices of 8 vectors x 8 columns, 128 bytes each, without swizzling: the two of a vector group's 16
// columns lie side by side, the groups of 8 vectors `group_bytes` apart. d: a lane l has rows l / 4 and l / 4 + 8 of
// its warp's and vectors 8 j + 2 (l % 4), + 1; d[4 j + 2 r + c] is row half r, vector c of group j.
//
// A sum of several products in order has the bits of mma.m16n8k16 in that order. Registers of d and a belong to the
// tensor cores from cuda_wgmma_begin until the group that cuda_wgmma_commit ends has been waited for.
#ifndef KERNELS_CUDA_WGMMA_CUH
#define KERNELS_CUDA_WGMMA_CUH

#include "kernels/cuda/bulk.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// b, and the same `bytes` further on.
struct cuda_wgmma_operand {
    uint32_t low, high;

    // next_columns: from one core matrix to that of the next 8 columns of its rows.
    __device__ __forceinline__ cuda_wgmma_operand(const void *shared, uint32_t group_bytes,
                                                  uint32_t next_columns = 128) {
        low = (cuda_shared_address(shared) & 0x3ffff) >> 4 | (next_columns >> 4) << 16;
        high = group_bytes >> 4;
    }
    __device__ __forceinline__ uint64_t at(uint32_t bytes) const { return (uint64_t)high << 32 | (low + (bytes >> 4)); }
};

static __device__ __forceinline__ void cuda_wgmma_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cuda_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All groups but the last LEFT are done.
template <int LEFT> static __device__ __forceinline__ void cuda_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Registers of each thread of a warpgroup from here on, as the kernel's bounds leave room for; LESS of one that fills.
template <int LESS> static __device__ __forceinline__ void cuda_wgmma_give_registers(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LESS));
}
template <int MORE> static __device__ __forceinline__ void cuda_wgmma_take_registers(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
}
// Nothing touches the register before what stands before this.
static __device__ __forceinline__ void cuda_wgmma_hold(float &x) {
    asm volatile("" : "+f"(x)::"memory");
}
static __device__ __forceinline__ void cuda_wgmma_hold(uint32_t &x) {
    asm volatile("" : "+r"(x)::"memory");
}
static __device__ __forceinline__ void cuda_wgmma_hold(uint4 &x) {
    asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)::"memory");
}

// clang-format off
#define CUDA_WGMMA_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])

static __device__ __forceinline__ void cuda_wgmma(float (&d)[8], const uint4 &a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %13, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, {%8, %9, %10, %11}, %12, add, 1, 1, 0;\n\t}"
                 : CUDA_WGMMA_8(d, 0)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(1));
}

static __device__ __forceinline__ void cuda_wgmma(float (&d)[16], const uint4 &a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %21, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(1));
}

// TURNED: core matrices of b hold 8 columns (of k) x 8 vectors.
template <bool TURNED = false>
static __device__ __forceinline__ void cuda_wgmma(float (&d)[32], const uint4 &a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(1), "n"(TURNED));
}

static __device__ __forceinline__ void cuda_wgmma(float (&d)[48], const uint4 &a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %53, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
                 "}, {%48, %49, %50, %51}, %52, add, 1, 1, 0;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24),
                   CUDA_WGMMA_8(d, 32), CUDA_WGMMA_8(d, 40)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(1));
}

template <bool TURNED = false>
static __device__ __forceinline__ void cuda_wgmma(float (&d)[64], const uint4 &a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %69, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24),
                   CUDA_WGMMA_8(d, 32), CUDA_WGMMA_8(d, 40), CUDA_WGMMA_8(d, 48), CUDA_WGMMA_8(d, 56)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(1), "n"(TURNED));
}

// Both operands from shared memory, a as b is laid out, its rows for vectors. TURNED: core matrices hold 8 columns (of
// k) x 8 rows or vectors.
template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void cuda_wgmma_shared(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, add, 1, 1, %67, %68;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24),
                   CUDA_WGMMA_8(d, 32), CUDA_WGMMA_8(d, 40), CUDA_WGMMA_8(d, 48), CUDA_WGMMA_8(d, 56)
                 : "l"(a), "l"(b), "r"(1), "n"(A_TURNED), "n"(B_TURNED));
}
template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void cuda_wgmma_shared(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, add, 1, 1, %35, %36;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24)
                 : "l"(a), "l"(b), "r"(1), "n"(A_TURNED), "n"(B_TURNED));
}

// The same of float16, a as split.cuh has it; d = a b where not `add`. TURNED: core matrices of b hold 8 columns (of k)
// x 8 vectors.
template <bool TURNED>
static __device__ __forceinline__ void cuda_wgmma_half(float (&d)[8], const uint32_t (&a)[4], uint64_t b,
                                                       bool add = true) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %13, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, {%8, %9, %10, %11}, %12, add, 1, 1, %14;\n\t}"
                 : CUDA_WGMMA_8(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(TURNED));
}
template <bool TURNED>
static __device__ __forceinline__ void cuda_wgmma_half(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                                       bool add = true) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(TURNED));
}
template <bool TURNED>
static __device__ __forceinline__ void cuda_wgmma_half(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                                       bool add = true) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %69, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24),
                   CUDA_WGMMA_8(d, 32), CUDA_WGMMA_8(d, 40), CUDA_WGMMA_8(d, 48), CUDA_WGMMA_8(d, 56)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(TURNED));
}

// Both operands of float16 from shared memory.
template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void cuda_wgmma_half_shared(float (&d)[16], uint64_t a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %18, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, %16, %17, add, 1, 1, %19, %20;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8)
                 : "l"(a), "l"(b), "r"(1), "n"(A_TURNED), "n"(B_TURNED));
}
template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void cuda_wgmma_half_shared(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, add, 1, 1, %35, %36;\n\t}"
                 : CUDA_WGMMA_8(d, 0), CUDA_WGMMA_8(d, 8), CUDA_WGMMA_8(d, 16), CUDA_WGMMA_8(d, 24)
                 : "l"(a), "l"(b), "r"(1), "n"(A_TURNED), "n"(B_TURNED));
}
// clang-format on

#undef CUDA_WGMMA_8

#endif
#endif
