#include "mapping/worker.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "mapping/fork.hpp"

namespace ringmem::mapping {
namespace {

using JobRef = std::shared_ptr<Job>;
using std::chrono::microseconds;

// How often jobs that wait for events are stepped: soon at first, then ever less often.
constexpr microseconds poll_first{20};
constexpr microseconds poll_longest{1000};

class Thread {
 public:
  void post(const JobRef& job, std::atomic<bool>& queued) noexcept {
    if (queued.exchange(true, std::memory_order_acq_rel)) return;
    std::lock_guard lock(mutex_);
    try {
      queue_.push_back(job);
      if (!thread_.joinable() && !stopping_) {
        thread_ = std::thread([this] { run(); });
      }
    } catch (...) {  // no memory or no thread: the job stays undone until somebody posts it again
      queued.store(false, std::memory_order_release);
      return;
    }
    wake_.notify_one();
  }

  void flush() noexcept {
    std::unique_lock lock(mutex_);
    if (!thread_.joinable() || thread_.get_id() == std::this_thread::get_id()) return;
    // The pass under way may have missed a job; the one after it has not.
    const std::uint64_t due = passes_ + 2;
    ++flushing_;
    wake_.notify_one();
    passed_.wait(lock, [&] { return passes_ >= due || !thread_.joinable(); });
    --flushing_;
  }

  void stop() noexcept {
    std::unique_lock lock(mutex_);
    if (!thread_.joinable() || stopping_) return;
    stopping_ = true;
    std::thread thread = std::move(thread_);
    wake_.notify_one();
    lock.unlock();
    thread.join();
    lock.lock();
    stopping_ = false;
    passed_.notify_all();
  }

  bool running() noexcept {
    std::lock_guard lock(mutex_);
    return thread_.joinable();
  }

  std::uint64_t generation() const noexcept { return generation_; }

 private:
  void run() noexcept {
    pthread_setname_np(pthread_self(), "ringmem-map");
    microseconds pause = poll_first;
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto due = [&] { return stopping_ || flushing_ > 0 || !queue_.empty(); };
      if (waiting_.empty()) {
        wake_.wait(lock, due);
      } else if (!wake_.wait_for(lock, pause, due)) {
        pause = std::min(2 * pause, poll_longest);
      } else {
        pause = poll_first;
      }
      const bool last = stopping_;
      pass(lock);
      if (last) return;
    }
  }

  // Steps everything once, without the lock.
  void pass(std::unique_lock<std::mutex>& lock) noexcept {
    std::vector<JobRef> now = std::move(waiting_);
    waiting_.clear();
    now.insert(now.end(), queue_.begin(), queue_.end());
    queue_.clear();
    lock.unlock();
    for (JobRef& job : now) {
      // Cleared before the step: a post() during it queues the job again.
      job->queued_.store(false, std::memory_order_release);
      if (job->step() == Job::Progress::done ||
          job->queued_.exchange(true, std::memory_order_acq_rel)) {
        job.reset();  // finished, or posted meanwhile and so in the queue
      }
    }
    std::erase(now, nullptr);
    lock.lock();
    waiting_ = std::move(now);
    ++passes_;
    passed_.notify_all();
  }

  const std::uint64_t generation_ = fork_generation();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable passed_;
  std::thread thread_;
  std::vector<JobRef> queue_;    // posted
  std::vector<JobRef> waiting_;  // stepped, to be stepped again
  std::uint64_t passes_ = 0;
  int flushing_ = 0;
  bool stopping_ = false;
};

std::atomic<Thread*> current{nullptr};
std::atomic<bool> ended{false};

// The thread object of this process. That of a parent is left alone: its locks may be held for ever.
Thread& thread() {
  Thread* have = current.load(std::memory_order_acquire);
  while (have == nullptr || have->generation() != fork_generation()) {
    auto fresh = std::make_unique<Thread>();
    if (current.compare_exchange_strong(have, fresh.get(), std::memory_order_acq_rel)) {
      have = fresh.release();
    }
  }
  return *have;
}

struct JoinAtExit {
  ~JoinAtExit() { Worker::stop(); }
};

}  // namespace

void Worker::post(const std::shared_ptr<Job>& job) noexcept {
  if (finished()) return;
  static const JoinAtExit join_at_exit;
  thread().post(job, job->queued_);
}

void Worker::flush() noexcept { thread().flush(); }
void Worker::stop() noexcept { thread().stop(); }

void Worker::finish() noexcept {
  ended.store(true, std::memory_order_release);
  stop();
}

bool Worker::finished() noexcept { return ended.load(std::memory_order_acquire); }
bool Worker::running() noexcept { return thread().running(); }

}  // namespace ringmem::mapping
