// Kernels that only tests launch: one that holds its stream for a given time, one that tells which SMs it ran on.

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

extern "C" __global__ void hold(int milliseconds) {
  const unsigned long long until = nanoseconds() + 1000000ull * milliseconds;
  while (nanoseconds() < until) {
    __nanosleep(1000);
  }
}

// seen: one word an SM. Blocks stay a while, so that every SM that may run them gets one.
extern "C" __global__ void record_sm(int* seen) {
  unsigned sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  if (threadIdx.x == 0) {
    atomicAdd(seen + sm, 1);
  }
  const unsigned long long until = nanoseconds() + 20000ull;
  while (nanoseconds() < until) {
  }
}
