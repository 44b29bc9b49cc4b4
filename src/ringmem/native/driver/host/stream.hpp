// A stream: an ordered queue that a thread of its own works off. Nothing is locked while a task
// runs, waits or sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver/status.hpp"

namespace ringmem::host {

class Stream;
using Clock = std::chrono::steady_clock;

// What the streams of one device share, and what outlives them.
struct Engine {
  std::atomic<Status> fault{Status::success};  // sticky: set once, by the first task that failed
  std::atomic<bool> stopping{false};           // the driver is going away
  Clock::duration latency{};

  void set_fault(Status status) noexcept {
    Status none = Status::success;
    fault.compare_exchange_strong(none, status);
  }
  bool faulted() const noexcept { return fault.load(std::memory_order_relaxed) != Status::success; }
};

// A place in a stream: everything submitted up to task number `sequence`.
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t sequence = 0;

  bool done() const noexcept;
  bool wait() const noexcept;  // false: it never will be, its stream was abandoned
};

// What a task does. `deinitialized` means that it gave up because the driver is going away.
using Work = std::function<Status()>;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(std::shared_ptr<Engine> engine, int device, bool non_blocking);
  ~Stream();

  // Queues `work` (may be empty) behind everything submitted before and behind `after`. With
  // `late`, it runs no earlier than the configured latency from now.
  Status submit(Work work, std::vector<Point> after, bool late, Point* point = nullptr);
  // Counts as a task that is complete already, if nothing is pending; false: something is.
  bool complete_at_once(Point* point) noexcept;

  bool done(std::uint64_t sequence) const noexcept {
    return completed_.load(std::memory_order_acquire) >= sequence;
  }
  bool idle() const noexcept { return done(submitted_.load(std::memory_order_acquire)); }
  Point last() { return {shared_from_this(), submitted_.load(std::memory_order_acquire)}; }
  bool wait(std::uint64_t sequence) noexcept;

  // No more work will come: the thread ends when it has done what there is.
  void close() noexcept;
  bool finished() noexcept;  // closed, and its thread has nothing more to do
  void wake() noexcept;      // to see that the engine is stopping
  void join() noexcept;
  bool runs_on_this_thread() const noexcept;

  int device() const noexcept { return device_; }
  bool non_blocking() const noexcept { return non_blocking_; }
  const Engine& engine() const noexcept { return *engine_; }

 private:
  struct Task {
    std::uint64_t sequence = 0;
    Clock::time_point due{};  // epoch: at once
    std::vector<Point> after;
    Work work;
  };

  void run() noexcept;
  bool perform(Task& task) noexcept;  // false: give up
  bool sleep_until(Clock::time_point due) noexcept;
  void abandon() noexcept;

  const std::shared_ptr<Engine> engine_;
  const int device_;
  const bool non_blocking_;

  std::mutex mutex_;  // guards what follows; the counters are written under it and read anywhere
  std::condition_variable work_there_;
  std::condition_variable progress_;
  std::deque<Task> queue_;
  bool started_ = false;
  bool closed_ = false;
  bool abandoned_ = false;
  bool exited_ = false;
  std::thread thread_;
  std::atomic<std::uint64_t> submitted_{0};
  std::atomic<std::uint64_t> completed_{0};
};

inline bool Point::done() const noexcept { return !stream || stream->done(sequence); }
inline bool Point::wait() const noexcept { return !stream || stream->wait(sequence); }

}  // namespace ringmem::host
