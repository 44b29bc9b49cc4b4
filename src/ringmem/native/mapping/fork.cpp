#include "mapping/fork.hpp"

#include <pthread.h>

#include <atomic>

namespace ringmem::mapping {
namespace {

std::atomic<std::uint32_t> generation{0};

void in_child() { generation.fetch_add(1, std::memory_order_relaxed); }

struct Registration {
  Registration() { pthread_atfork(nullptr, nullptr, in_child); }
};

}  // namespace

std::uint32_t fork_generation() noexcept {
  static const Registration registration;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace ringmem::mapping
