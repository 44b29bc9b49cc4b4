// The one mapping thread of the process: maps ahead, releases pages whose events have come, cleans
// handles for reuse. More threads would not help (the driver serializes these calls). It starts
// with the first job, knows nothing of Python and so never holds the GIL, is joined at exit, and in
// a forked child starts anew.
#pragma once

#include <atomic>
#include <memory>

namespace ringmem::mapping {

// What the thread does for one object. It shares the object's ownership while there is work.
class Job {
 public:
  Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  virtual ~Job() = default;

  enum class Progress { done, waiting };  // waiting: call again soon

  // On the mapping thread. Must not wait for device work, nor for a lock held by somebody who may
  // be waiting for this thread.
  virtual Progress step() noexcept = 0;

  // An abandoned buffer whose unmap keeps failing is left to the process's end.
  static constexpr int farewell_attempts_most = 100;

  std::atomic<bool> queued_{false};  // the worker's own: the job is in its queue
};

class Worker {
 public:
  // Never blocks; a job that is queued already is not queued twice.
  static void post(const std::shared_ptr<Job>& job) noexcept;
  // Waits until every job that is queued now was stepped at least once. Not for the thread itself
  // (then it returns at once). Hold no lock that a step() waits for.
  static void flush() noexcept;
  // Joins the thread after one last step of every job. A later post() starts it again.
  static void stop() noexcept;
  // As stop(), for good: the process ends. From here on jobs are dropped, and buffers that are
  // still there leave their memory to the driver, whose work may still use it. Python calls this
  // before it goes, because the last owner of a driver can be a Python object.
  static void finish() noexcept;
  static bool finished() noexcept;
  static bool running() noexcept;
};

}  // namespace ringmem::mapping
