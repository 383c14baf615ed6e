// The functions of engine_core/ops/cuda/device.cuh in plain C++, so that g++ compiles the kernels for the CPU.
//
// Each thread of a block is a fiber; warp instructions and barriers switch between them. Blocks run one after another,
// which is enough: no kernel waits for another block.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

using std::max;
using std::min;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = unsigned long long;

#define __device__
#define __global__
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) Words {
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
#define MINUS_INFINITY (-INFINITY)

// ------------------------------ fibers

namespace emulation {
inline void forget_copies();
inline void forget_products();
}

struct Index {
  u32 x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Barrier {
  int arrived = 0, generation = 0;
};
struct Warp {
  Barrier barrier;
  u32 words[32][8];
};
struct Fiber {
  ucontext_t context;  // to begin with; from then on it is left and resumed by jumps, which need no system call
  jmp_buf place;
  std::vector<char> stack;
  bool begun = false, done = false;
  const Barrier* waits_for = nullptr;
  int generation = 0;

  bool can_run() const { return !done && (waits_for == nullptr || waits_for->generation != generation); }
};
inline jmp_buf scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline int current, block_threads;
inline u32 votes;

inline void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}
inline void meet(Barrier& barrier, int expected) {
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  Fiber& fiber = fibers[current];
  fiber.waits_for = &barrier;
  fiber.generation = barrier.generation;
  yield();
  fiber.waits_for = nullptr;
}
inline Warp& warp() { return warps[current / 32]; }
inline int lane() { return current % 32; }
inline void meet_warp() { meet(warp().barrier, 32); }

template <class F>
void run_block(int threads, F&& body) {
  static F* entry;
  entry = &body;
  fibers.clear();
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp{});
  block_barrier = {};
  forget_copies();
  forget_products();
  block_threads = threads;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.stack.assign(1 << 17, char(0xff));
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, static_cast<void (*)()>([] {
                  (*entry)();
                  fibers[current].done = true;
                  _longjmp(scheduler, 1);
                }), 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (current = 0; current < threads; ++current) {
      if (!fibers[current].can_run()) continue;
      running = true;
      threadIdx.x = current;
      resume(fibers[current]);
    }
  }
  for (const Fiber& fiber : fibers) {
    if (!fiber.done) {
      std::fprintf(stderr, "a barrier that not every thread reaches\n");
      std::abort();
    }
  }
}

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}
template <class... A>
void launch(void (*kernel)(A...), const u32* grid, u32 threads, void** arguments) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
        run_block(threads, [&] { call(kernel, arguments, std::index_sequence_for<A...>{}); });
}

}  // namespace emulation

// ------------------------------ CUDA's own functions

inline void __syncthreads() { emulation::meet(emulation::block_barrier, emulation::block_threads); }
inline int __syncthreads_or(int vote) {
  emulation::votes |= vote != 0;
  __syncthreads();
  const int result = emulation::votes;
  __syncthreads();
  emulation::votes = 0;
  __syncthreads();
  return result;
}
inline void __syncwarp() { emulation::meet_warp(); }
inline void __threadfence() {}
template <class T>
T exchange(T value, int source) {
  static_assert(sizeof(T) % 4 == 0);
  auto& warp = emulation::warp();
  std::memcpy(warp.words[emulation::lane()], &value, sizeof(T));
  emulation::meet_warp();
  T result = value;
  if (source >= 0 && source < 32) std::memcpy(&result, warp.words[source], sizeof(T));
  emulation::meet_warp();
  return result;
}
template <class T>
T __shfl_sync(u32, T value, int source) { return exchange(value, source); }
template <class T>
T __shfl_xor_sync(u32, T value, int mask) { return exchange(value, emulation::lane() ^ mask); }
template <class T>
T __shfl_up_sync(u32, T value, int by) { return exchange(value, emulation::lane() - by); }
inline bool __any_sync(u32, bool vote) {
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= exchange<u32>(vote, i) != 0;
  return any;
}
inline u32 __ballot_sync(u32, bool vote) {
  u32 ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= (exchange<u32>(vote, i) != 0 ? 1u : 0u) << i;
  return ballot;
}
template <class T>
T atomicAdd(T* place, T value) {
  const T old = *place;
  *place += value;
  return old;
}
inline u32 atomicOr(u32* place, u32 value) {
  const u32 old = *place;
  *place |= value;
  return old;
}
inline u32 atomicMax(u32* place, u32 value) {
  const u32 old = *place;
  *place = max(old, value);
  return old;
}
inline u32 atomicInc(u32* place, u32 limit) {
  const u32 old = *place;
  *place = old >= limit ? 0 : old + 1;
  return old;
}
inline float __uint_as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline u32 __float_as_uint(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<u32>(bits)); }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>((static_cast<std::uint64_t>(a) * b) >> 32); }
inline int __popc(u32 a) { return __builtin_popcount(a); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// ------------------------------ device.cuh

inline void wait_for_previous() {}
inline void allow_next() {}
inline void allow_product() {}
inline Words load_words(const void* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % 16 != 0) {
    std::fprintf(stderr, "misaligned 16-byte load\n");
    std::abort();
  }
  Words r;
  std::memcpy(&r, p, 16);
  return r;
}
inline Words load_weights(const void* p) { return load_words(p); }

// Copies happen when they are waited for and not before: who reads too early reads what was there. With LATE_PRODUCTS they
// happen at once, and products when they are waited for: who fills too early what a product reads, or takes sums too early,
// is seen.
namespace emulation {
struct Copy {
  Words* to;
  const void* from;
};
inline std::vector<std::vector<std::vector<Copy>>> copies;  // by thread, by group, the newest last and open
inline std::vector<std::vector<Copy>>& groups() {
  if (copies.size() < fibers.size()) copies.resize(fibers.size());
  auto& mine = copies[current];
  if (mine.empty()) mine.emplace_back();
  return mine;
}
inline void forget_copies() { copies.clear(); }
}  // namespace emulation

#ifdef LATE_PRODUCTS
inline void copy_async(Words* to, const void* from) { std::memcpy(to, from, sizeof(Words)); }
#else
inline void copy_async(Words* to, const void* from) { emulation::groups().back().push_back({to, from}); }
#endif
inline void copy_once(Words* to, const void* from) { copy_async(to, from); }
inline void commit_copies() { emulation::groups().emplace_back(); }
template <int N>
void wait_for_copies() {
  auto& groups = emulation::groups();
  while (groups.size() > N + 1) {
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, sizeof(Words));
    groups.erase(groups.begin());
  }
}

template <class T>
T* shared_memory() {
  alignas(1024) static char memory[1 << 18];
  return reinterpret_cast<T*>(memory);
}

inline float low(u32 word) { return __uint_as_float(word << 16); }
inline float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
inline float widen(u16 value) { return __uint_as_float(static_cast<u32>(value) << 16); }
inline u16 narrow(float value) {
  const u32 bits = __float_as_uint(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline u32 pack(float lower, float upper) { return narrow(lower) | static_cast<u32>(narrow(upper)) << 16; }
inline u32 low_halves(u32 a, u32 b) { return (a & 0xffff) | b << 16; }
inline u32 high_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
inline u32 multiply_halves(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }
inline float exp2_fast(float x) { return std::exp2(x); }

inline void multiply_accumulate(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto& words = emulation::warp().words;
  const int lane = emulation::lane();
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(words[lane], mine, sizeof mine);
  emulation::meet_warp();
  const auto half = [](u32 word, int k) { return k % 2 ? high(word) : low(word); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int holder = (k % 8) / 2;
      const float a = half(words[4 * (row % 8) + holder][row / 8 + 2 * (k / 8)], k);
      const float b = half(words[4 * column + holder][4 + k / 8], k);
      d[i] += a * b;
    }
  }
  emulation::meet_warp();
}

// Products are done at once or, with LATE_PRODUCTS, when they are waited for; who reads operands without showing them isn't
// seen here.
inline int operand_place(int row, int piece) { return row * 8 + (piece ^ (row % 8)); }
inline void show_copies() {}
inline void begin_products() {}
namespace emulation {
struct Product {
  void (*run)(float*, const Words*, const Words*, int, bool);
  float* d;
  const Words *rows, *tokens;
  int step;
  bool add;
};
inline std::vector<std::vector<std::vector<Product>>> products;  // as `copies`
inline std::vector<std::vector<Product>>& product_groups() {
  if (products.size() < fibers.size()) products.resize(fibers.size());
  auto& mine = products[current];
  if (mine.empty()) mine.emplace_back();
  return mine;
}
inline void forget_products() { products.clear(); }
}  // namespace emulation
inline void commit_products() { emulation::product_groups().emplace_back(); }
template <int N>
void wait_for_products() {
  auto& groups = emulation::product_groups();
  while (groups.size() > N + 1) {
    for (const auto& one : groups.front()) one.run(one.d, one.rows, one.tokens, one.step, one.add);
    groups.erase(groups.begin());
  }
}
template <int N>
void multiply_now(float* d, const Words* rows, const Words* tokens, int step, bool add) {
  if (reinterpret_cast<std::uintptr_t>(rows) % 1024 != 0 || reinterpret_cast<std::uintptr_t>(tokens) % 1024 != 0) {
    std::fprintf(stderr, "a misaligned operand\n");
    std::abort();
  }
  const auto value = [step](const Words* operand, int row, int k) {
    const u32 word = operand[operand_place(row, 2 * step + k / 8)].w[k % 8 / 2];
    return k % 2 ? high(word) : low(word);
  };
  const int lane = emulation::lane(), warp = emulation::current / 32 % 4;
  for (int i = 0; i < 4 * N; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), token = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) sum += value(rows, row, k) * value(tokens, token, k);
    d[i] = add ? d[i] + sum : sum;
  }
}
template <int N>
void multiply_tile(float (&d)[4 * N], const Words* rows, const Words* tokens, int step, bool add) {
#ifdef LATE_PRODUCTS
  emulation::product_groups().back().push_back({multiply_now<N>, d, rows, tokens, step, add});
#else
  multiply_now<N>(d, rows, tokens, step, add);
#endif
}

template <int FIRST, int LAST>
inline float sum_lanes(float value) {
  for (int mask = FIRST; mask <= LAST; mask *= 2) value += __shfl_xor_sync(ALL_LANES, value, mask);
  return value;
}
template <int FIRST, int LAST>
inline float max_lanes(float value) {
  for (int mask = FIRST; mask <= LAST; mask *= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}
inline int sum_lanes(int value) {
  for (int mask = 1; mask < 32; mask *= 2) value += __shfl_xor_sync(ALL_LANES, value, mask);
  return value;
}
inline int max_lanes(int value) {
  for (int mask = 1; mask < 32; mask *= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}
