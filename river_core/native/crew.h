// The threads that share the loops of a step. Waking a thread costs as much as a small product, so those of a run of layers stay awake
// from the first layer to the last, and wait for one another only where one needs what another has made.

#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crew {

inline void rest() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int SPINS = 2000, YIELDS = 100;

class Barrier {
 public:
  void wait(int64_t count) {
    const int32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    // The others are a few microseconds away, unless something else holds their core: then this one sleeps and lets it be used.
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < SPINS) rest();
      else if (spins < SPINS + YIELDS) std::this_thread::yield();
      else round_.wait(round, std::memory_order_acquire);
    }
  }

 private:
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int32_t> round_{0};
};

// One of some threads that go through the same code together, or, without a barrier, the only one, whose loops ATen's threads share.
struct Member {
  int64_t index = 0, count = 1;
  Barrier* barrier = nullptr;

  // f(begin, end) over this member's share of 0 .. n - 1. grain: as for ATen's threads, the least that is worth waking one for.
  template <typename F>
  void share(int64_t n, int64_t grain, F&& f) const {
    if (!barrier) return at::parallel_for(0, n, grain, f);
    const int64_t begin = n * index / count, end = n * (index + 1) / count;
    if (begin < end) f(begin, end);
  }

  // Wait until every member has come here.
  void meet() const {
    if (barrier) barrier->wait(count);
  }
};

// f(member) in all of ATen's threads at once, or in the calling one alone where there is but one. f must not throw.
template <typename F>
void together(F&& f) {
#ifdef _OPENMP
  if (at::get_num_threads() > 1 && !at::in_parallel_region()) {
    Barrier barrier;
#pragma omp parallel  // without a count of its own: GOMP would let its threads go and start others for ATen
    f(Member{omp_get_thread_num(), omp_get_num_threads(), &barrier});
    return;
  }
#endif
  f(Member{});
}

}  // namespace crew
