// One thread that looks for everybody who sleeps: parked waiters and event loops. It exists only
// while somebody is registered (and a second longer), and looks at a stated interval.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace ringmem::ring {

class Poller {
 public:
  // Called by the poller's thread; reads shared memory, changes nothing, returns promptly, does
  // not throw.
  using Ready = std::function<bool()>;
  using WatchId = std::uint64_t;

  // The process's poller. A forked child gets a new one.
  static Poller& instance();

  // Sleeps until `ready()` or the deadline; true: ready. This and arm() throw DriverError where the
  // system has no thread left; then nobody is registered, and a watch not armed.
  bool wait(const Ready& ready, std::chrono::steady_clock::time_point deadline);

  // Each arm() writes 1 to the eventfd `fd` once, when its `ready()` has become true; it replaces
  // an earlier one that did not come to that. After unwatch() returns nothing is called.
  WatchId watch(int fd);
  void arm(WatchId id, Ready ready);
  void unwatch(WatchId id);

  // Pause between two looks at everything. Default 20 µs.
  void set_interval(std::chrono::microseconds interval) noexcept;
  std::chrono::microseconds interval() const noexcept;

  // Parked waiters and watches right now, and whether the thread runs: for tests and reports.
  std::size_t registered();
  bool running();

  Poller() = default;
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

 private:
  struct Entry {
    WatchId id;
    Ready ready;                    // empty: not armed
    int fd;                         // -1: a parked waiter
    std::condition_variable* wake;  // of a parked waiter
    bool* done;
  };

  void start_locked();
  void run();
  void look_locked();
  WatchId add_locked(Entry entry);
  void remove_locked(WatchId id);

  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<Entry> entries_;
  WatchId next_id_ = 1;
  std::size_t waiting_ = 0;  // entries that the thread must look at
  bool running_ = false;
  std::atomic<std::int64_t> interval_us_{20};
};

}  // namespace ringmem::ring
