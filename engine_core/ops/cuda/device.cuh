// What the kernels share: bf16 in registers, tensor-core and memory instructions of sm_90, reductions, launch overlap.
//
// The kernel sources use PTX through these functions alone, so that a test can put another device.cuh, written in plain
// C++, in front of this one and run the same kernels on a CPU.
//
// Launch overlap (programmatic dependent launch), the one rule: every kernel calls wait_for_previous() in every thread
// before it writes anything or reads what its predecessor writes, and allow_next() only after that. So when a kernel
// starts, all launches before its predecessor are complete (but for allow_product, below): until the wait it may read what
// those wrote, and constants.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Words {  // 16 bytes: eight bf16, the lower half of a word first
  u32 w[4];
};
struct alignas(8) Pair {
  float a, b;
};
struct alignas(16) Quad {
  float v[4];
};

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY (__int_as_float(static_cast<int>(0xff800000u)))

// ------------------------------ launch overlap

// In a loop of one turn (no grid here has a third dimension), because within a block of code the assembler moves the wait
// ahead of the loads before it, which are there to be in flight during the wait.
__device__ inline void wait_for_previous() {
#pragma unroll 1
  for (u32 turn = 0; turn < gridDim.z; ++turn) asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The exception: who adds up a product's parts calls this before its own wait, so that the next kernel begins at the
// product's end to fill its shared memory. Until its wait that one may read what launches before the product wrote.
__device__ inline void allow_product() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void allow_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ------------------------------ memory

// Weights: never written while the process serves, each byte read once a step.
__device__ inline Words load_weights(const void* p) {
  Words r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
               : "l"(p));
  return r;
}
// Activations: written by earlier kernels, read by several warps.
__device__ inline Words load_words(const void* p) {
  Words r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
               : "l"(p)
               : "memory");
  return r;
}

// 16 bytes to shared memory, not waited for. What a thread has copied becomes readable to that thread by
// wait_for_copies<N>(), which leaves the N groups committed last in flight; to others by a barrier after that.
__device__ inline void copy_async(Words* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
// What createpolicy.fractional.L2::evict_first makes on sm_90, for all that is read with it: the second-level cache gives it
// up first, and what the other lane reads again stays there.
constexpr u64 READ_ONCE = 0x12f0000000000000;
// The same of what is read once and then not for a whole step: weights and KV. `to` is best kept in a variable from copy to
// copy: where the assembler (13.0) sees a sum of something uniform and something not, it makes an illegal instruction.
__device__ inline void copy_once(Words* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from), "l"(READ_ONCE)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The block's dynamic shared memory.
template <class T>
__device__ inline T* shared_memory() {
  extern __shared__ __align__(1024) Words dynamic_shared[];
  return reinterpret_cast<T*>(dynamic_shared);
}

// ------------------------------ bf16

__device__ inline float low(u32 word) { return __uint_as_float(word << 16); }
__device__ inline float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
__device__ inline float widen(u16 value) { return __uint_as_float(static_cast<u32>(value) << 16); }
__device__ inline u32 pack(float lower, float upper) {  // rounds to nearest even
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
  return r;
}
__device__ inline u16 narrow(float value) { return static_cast<u16>(pack(value, 0.0f)); }
// (lower half of a, lower half of b) and (upper half of a, upper half of b)
__device__ inline u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ inline u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Both halves multiplied, rounded to nearest even.
__device__ inline u32 multiply_halves(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ inline float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// ------------------------------ tensor cores

// d[16 x 8] += a[16 x 16] b[16 x 8], bf16 in, f32 out. Lane = 4 g + t holds
//   a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t, 2t+1], a[2] = A[g][2t+8, 2t+9], a[3] = A[g+8][2t+8, 2t+9]
//   b[0] = B[2t, 2t+1][g], b[1] = B[2t+8, 2t+9][g]
//   d[0, 1] = D[g][2t, 2t+1], d[2, 3] = D[g+8][2t, 2t+1]
__device__ inline void multiply_accumulate(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d[64 x 8 N] (+)= a[64 x 16] b[16 x 8 N] by a warpgroup, its operands in shared memory: begun here, there after a wait. An
// operand is a multiple of eight rows of 64 bf16 (128 bytes), at a multiple of 1024 bytes, with its pieces of 16 bytes where
// operand_place says (wgmma's swizzle of 128 bytes); `step` names the 16 columns. What threads copied there is seen after
// show_copies() by them and a barrier. Warp w's lane 4 g + t holds
//   d[4 j + 0, 1] = D[16 w + g][8 j + 2t, 2t+1], d[4 j + 2, 3] = D[16 w + g + 8][8 j + 2t, 2t+1]
// and touches none of them between begin_products() and a wait.
__device__ inline int operand_place(int row, int piece) { return row * 8 + (piece ^ (row % 8)); }
__device__ inline void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>  // leaves the N groups committed last in flight
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ inline u64 operand(const Words* first, int step) {
  const u64 place = static_cast<u32>(__cvta_generic_to_shared(first)) / 16 + 2 * step;
  constexpr u64 ROWS_APART = u64{1024 / 16} << 32, SWIZZLE = u64{1} << 62;
  return place | u64{1} << 16 | ROWS_APART | SWIZZLE;
}
// wgmma's registers: their names in the instruction, and their variables.
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 4)
#define MULTIPLY_TILE(shape, sums, a, b, adds, ...)                                                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" adds ", 0; wgmma.mma_async.sync.aligned." shape                \
               "k16.f32.bf16.bf16 {" sums "}, %" a ", %" b ", p, 1, 1, 0, 0;}"                                   \
               : __VA_ARGS__                                                                                     \
               : "l"(operand(rows, step)), "l"(operand(tokens, step)), "r"(static_cast<int>(add)))
template <int N>
__device__ inline void multiply_tile(float (&d)[4 * N], const Words* rows, const Words* tokens, int step, bool add) {
  static_assert(N == 2 || N == 4 || N == 6 || N == 8, "no such tile");
  if constexpr (N == 2) {
    MULTIPLY_TILE("m64n16", NAMES_8, "8", "9", "10", EIGHT(d, 0));
  } else if constexpr (N == 4) {
    MULTIPLY_TILE("m64n32", NAMES_16, "16", "17", "18", EIGHT(d, 0), EIGHT(d, 8));
  } else if constexpr (N == 6) {
    MULTIPLY_TILE("m64n48", NAMES_24, "24", "25", "26", EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16));
  } else {
    MULTIPLY_TILE("m64n64", NAMES_32, "32", "33", "34", EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24));
  }
}

// ------------------------------ reductions over a warp's lanes

template <int FIRST, int LAST>  // over the lanes that differ in the bits FIRST, 2 FIRST ... LAST
__device__ inline float sum_lanes(float value) {
#pragma unroll
  for (int mask = FIRST; mask <= LAST; mask *= 2) value += __shfl_xor_sync(ALL_LANES, value, mask);
  return value;
}
template <int FIRST, int LAST>
__device__ inline float max_lanes(float value) {
#pragma unroll
  for (int mask = FIRST; mask <= LAST; mask *= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}
__device__ inline int sum_lanes(int value) { return __reduce_add_sync(ALL_LANES, value); }
__device__ inline int max_lanes(int value) { return __reduce_max_sync(ALL_LANES, value); }
