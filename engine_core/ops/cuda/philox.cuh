// Noise of single candidates, as engine_core/ops/philox.py defines it. Included after device.cuh.
#pragma once

struct Random4 {
  u32 v[4];
};

// Salmon et al. 2011, called as ops/philox.py does: the noise of block = candidate / 4.
__device__ inline Random4 philox(u64 seed, u32 position, u32 block) {
  u32 c0 = block, c1 = 0, c2 = position, c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Random4{{c0, c1, c2, c3}};
}

__device__ inline float gumbel(u32 bits) {
  const float uniform = fminf(static_cast<float>(bits) * (1.0f / 4294967296.0f) + 1.0f / 8589934592.0f, 1.0f - 0x1p-24f);
  return -logf(-log1pf(-uniform));
}

// Kept out of line: it is long, and few candidates of a filtered row need it.
__device__ __noinline__ float noise_of(u64 seed, u32 position, int candidate) {
  return gumbel(philox(seed, position, candidate / 4).v[candidate % 4]);
}
