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
#include "memory/used_stream.hpp"

namespace ringmem {

// A release and everything it needs, held until it ran.
struct ReaperJob {
  DriverRef driver;
  std::vector<Guard> guards;    // must be done first; their events are destroyed by the reaper
  std::function<Status()> run;  // may block; must not throw; repeated while a capture forbids it,
                                // and while it returns not_ready
  std::string what;             // for the report of a failure: "cuMemFreeHost of 4096 bytes"
  UsedStreams closed{};         // what they left must be done first, too
};

class Reaper {
 public:
  // Started by the first job; never destroyed, so that it needs no place in the order of exit.
  static Reaper& instance();

  // Takes the job over. Throws std::bad_alloc or std::system_error and leaves it untouched.
  void post(ReaperJob&& job);

  // Jobs posted and not done yet.
  std::size_t pending() const;

  // Waits until nothing is pending; false when the time is up first. Negative: no limit. Hold no
  // GIL.
  bool flush(double timeout_s);

  // While held, jobs wait: a release that has begun blocks other driver calls of the process too, so
  // none may begin beside a kernel that never ends. flush() does not wait meanwhile.
  void hold(bool held) noexcept;

  // What a job holds may only be let go of where its owner says (Python objects: under the GIL),
  // so done jobs are kept until somebody destroys what this returns.
  std::deque<ReaperJob> collect();

  // For the end of the process, which releases everything by itself: from now on jobs are dropped
  // where they are posted, and nobody is called.
  void retire() noexcept;

  // Both are called from the reaper's thread. Set once, by the binding.
  struct Hooks {
    void (*done)() = nullptr;  // there is something to collect
    void (*failed)(const std::string& what, Status status) = nullptr;  // for good
  };
  void set_hooks(Hooks hooks) noexcept;

 private:
  Reaper();
  void start_locked();
  void loop();
  bool ready(ReaperJob& job) noexcept;
  bool execute(ReaperJob& job) noexcept;

  mutable std::mutex mutex_;  // guards everything below; never held around a driver call
  std::condition_variable posted_;
  std::condition_variable done_;
  std::deque<ReaperJob> queue_;
  std::size_t pending_ = 0;
  int pid_ = 0;               // of the process that runs the thread; a forked child has none
  std::deque<ReaperJob> done_jobs_;
  Hooks hooks_;
  bool retired_ = false;
  bool held_ = false;
};

}  // namespace ringmem
