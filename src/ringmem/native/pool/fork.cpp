#include "pool/fork.hpp"

#include <pthread.h>

#include <mutex>

namespace ringmem::pool {

std::atomic<std::uint64_t> fork_generation{0};

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr,
                   [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
  });
}

}  // namespace ringmem::pool
