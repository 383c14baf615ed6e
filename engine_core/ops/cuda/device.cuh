// What the kernels share: bf16 in registers, tensor-core and memory instructions of sm_90, reductions, launch overlap.
//
// The kernel sources use PTX through these functions alone, so that a test can put another device.cuh, written in plain
// C++, in front of this one and run the same kernels on a CPU.
//
// Launch overlap (programmatic dependent launch), the one rule: every kernel calls wait_for_previous() in every thread
// before it writes anything or reads what its predecessor writes, and allow_next() only after that. So when a kernel
// starts, all launches before its predecessor are complete: until the wait it may read what those wrote, and constants.
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
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The block's dynamic shared memory.
template <class T>
__device__ inline T* shared_memory() {
  extern __shared__ Words dynamic_shared[];
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
