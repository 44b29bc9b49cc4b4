// One thread for releases that must wait: unpinning, pinned and managed memory, plain device
// memory. Each of those waits for every kernel on the device, also for a persistent one, so
// nobody who asks for a release may do it himself.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "driver/driver.hpp"

namespace ringmem {

// An event that must be complete before a release may run. Destroyed by the reaper.
struct Guard {
  int device = 0;
  EventHandle event = 0;
};

// A release and everything it needs, held until it ran.
struct ReaperJob {
  DriverRef driver;
  std::vector<Guard> guards;
  std::function<Status()> run;  // may block; must not throw
  std::string what;             // for the report of a failure: "cuMemFreeHost of 4096 bytes"
};

class Reaper {
 public:
  // Started by the first job; never destroyed, so that it needs no place in the order of exit.
  static Reaper& instance();

  // Takes the job over. Throws std::bad_alloc or std::system_error and leaves it untouched.
  void post(ReaperJob&& job);

  // Jobs posted and not done yet.
  std::size_t pending() const;

  // Waits until what was posted so far is done; false when the time is up first. Hold no GIL.
  bool flush(double timeout_s);

  // Called from the reaper's thread for a release that failed for good. Set once, by the binding.
  using FailureHook = void (*)(const std::string& what, Status status);
  void set_failure_hook(FailureHook hook) noexcept;

 private:
  Reaper();
  void start_locked();
  void loop();
  bool ready(ReaperJob& job) noexcept;
  void execute(ReaperJob& job) noexcept;

  mutable std::mutex mutex_;  // guards everything below; never held around a driver call
  std::condition_variable posted_;
  std::condition_variable done_;
  std::deque<ReaperJob> queue_;
  std::size_t pending_ = 0;
  std::size_t finished_ = 0;  // jobs done since the start, in any order
  int pid_ = 0;               // of the process that runs the thread; a forked child has none
  FailureHook hook_ = nullptr;
};

}  // namespace ringmem
