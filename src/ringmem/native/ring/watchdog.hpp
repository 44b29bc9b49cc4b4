// One thread that keeps all ring kernels of this process company: it writes their heartbeats, sees
// the ones that make no progress while messages wait, and tells waiters when a kernel has ended. It
// exists only while a kernel runs, and needs no GIL and no driver call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ring/kernel_pair.hpp"

namespace ringmem::ring {

class Watchdog {
 public:
  using Id = std::uint64_t;
  static constexpr std::chrono::milliseconds interval{20};

  // The process's watchdog. A forked child gets a new one.
  static Watchdog& instance();

  // From now on until forget(): nothing of `pairs` may be unmapped. DriverError where the system has
  // no thread left; then nothing is watched.
  Id watch(std::vector<KernelPair> pairs, std::chrono::nanoseconds stall);
  void forget(Id id);

  // Numbers of rings, ascending.
  using Rings = std::vector<u32>;
  // Rings that handled nothing for `stall` while messages wait, there is room for replies, and
  // nobody asked for a pause.
  Rings stalled(Id id);
  // Waits until stalled() is something else than `known`; nothing where the id was forgotten.
  std::optional<Rings> wait_for_change(Id id, const Rings& known, std::chrono::nanoseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;
  struct Progress {
    u64 head = 0;
    Clock::time_point since;
  };
  struct Entry {
    Id id;
    std::vector<KernelPair> pairs;
    std::vector<Progress> progress;
    std::chrono::nanoseconds stall;
    Rings stalled{};
  };

  void start_locked();
  void run();
  void look(Entry& entry, Clock::time_point now);
  Entry* find(Id id);

  std::mutex mutex_;
  std::condition_variable wake_, changed_;
  std::vector<Entry> entries_;
  Id next_id_ = 1;
  bool running_ = false;
};

}  // namespace ringmem::ring
