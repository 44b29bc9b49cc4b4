#include "memory/reaper.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

namespace ringmem {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// How often a guard is looked at: soon at first, then rarely, because a guard behind a persistent
// kernel may take hours.
constexpr auto shortest_pause = 100us;
constexpr auto longest_pause = 10ms;

// A release that fails is repeated; a sticky error makes that useless but harmless.
constexpr int attempts = 3;

Reaper* the_reaper = nullptr;

}  // namespace

Reaper& Reaper::instance() {
  static Reaper* const reaper = new Reaper;
  return *reaper;
}

Reaper::Reaper() {
  the_reaper = this;
  // Forking takes the lock, so that the child never inherits it locked by a thread it lacks.
  pthread_atfork([] { the_reaper->mutex_.lock(); }, [] { the_reaper->mutex_.unlock(); },
                 [] { the_reaper->mutex_.unlock(); });
}

void Reaper::start_locked() {
  const int pid = getpid();
  if (pid_ == pid) return;
  // In a forked child the parent's jobs are the parent's: their memory is not ours to release.
  // They are left alone rather than destroyed, which would run their owners' code here.
  if (pid_ != 0) {
    new std::deque<ReaperJob>(std::move(queue_));
    queue_.clear();
    pending_ = 0;
  }
  std::thread([this] { loop(); }).detach();
  pid_ = pid;
}

void Reaper::post(ReaperJob&& job) {
  ReaperJob dropped;  // without the lock: what it holds may call the driver as it goes
  {
    std::lock_guard lock(mutex_);
    if (retired_) {
      dropped = std::move(job);
      return;
    }
    start_locked();
    queue_.push_back(std::move(job));
    ++pending_;
  }
  posted_.notify_one();
}

std::size_t Reaper::pending() const {
  std::lock_guard lock(mutex_);
  return pid_ == getpid() ? pending_ : 0;
}

void Reaper::hold(bool held) noexcept {
  {
    std::lock_guard lock(mutex_);
    held_ = held;
  }
  posted_.notify_one();
  done_.notify_all();
}

bool Reaper::flush(double timeout_s) {
  std::unique_lock lock(mutex_);
  if (pid_ != getpid()) return true;
  auto enough = [&] { return pending_ == 0 || held_; };
  if (timeout_s < 0) {
    done_.wait(lock, enough);
    return pending_ == 0;
  }
  const auto span = std::chrono::duration<double>(std::min(timeout_s, 1e6));
  done_.wait_for(lock, std::chrono::duration_cast<Clock::duration>(span), enough);
  return pending_ == 0;
}

std::deque<ReaperJob> Reaper::collect() {
  std::lock_guard lock(mutex_);
  return std::exchange(done_jobs_, {});
}

void Reaper::retire() noexcept {
  std::lock_guard lock(mutex_);
  retired_ = true;
  hooks_ = {};
}

void Reaper::set_hooks(Hooks hooks) noexcept {
  std::lock_guard lock(mutex_);
  hooks_ = hooks;
}

// An event that fails is a device that failed: nothing is left to wait for; but a capture only forbids
// to ask. Closed streams without an event are execute()'s to wait for.
bool Reaper::ready(ReaperJob& job) noexcept {
  const auto over = [](Status status) {
    return status != Status::not_ready && !forbidden_by_capture(status);
  };
  while (!job.guards.empty()) {
    const Guard guard = job.guards.back();
    if (!over(job.driver->event_query(guard.device, guard.event))) return false;
    destroy_event(*job.driver, guard.device, guard.event);
    job.guards.pop_back();
  }
  std::erase_if(job.closed, [&](const auto& stream) {
    return stream->left_event() && over(stream->query());
  });
  return std::none_of(job.closed.begin(), job.closed.end(),
                      [](const auto& stream) { return stream->left_event(); });
}

// False: not now; a capture of a graph forbids it, or there is work to wait for.
bool Reaper::execute(ReaperJob& job) noexcept {
  Status status = Status::success;
  for (const auto& stream : job.closed) {
    if (forbidden_by_capture(stream->wait())) return false;
  }
  for (int i = 0; i < attempts; ++i) {
    status = job.run();
    if (forbidden_by_capture(status) || status == Status::not_ready) return false;
    if (ok(status)) break;
  }
  // A driver that is already shut down has released everything itself.
  if (ok(status) || status == Status::deinitialized) return true;
  // The lock stays: taking the hooks away must wait for one that runs. Neither calls us back.
  std::lock_guard lock(mutex_);
  if (hooks_.failed) hooks_.failed(job.what, status);
  return true;
}

void Reaper::loop() {
  std::deque<ReaperJob> waiting;
  auto pause = std::chrono::duration_cast<Clock::duration>(shortest_pause);
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      auto some = [&] { return !queue_.empty() && !held_; };
      if (held_) {
        posted_.wait(lock, [&] { return !held_; });
        pause = shortest_pause;
      } else if (waiting.empty()) {
        posted_.wait(lock, some);
      } else if (posted_.wait_for(lock, pause, some)) {
        pause = shortest_pause;
      }
      std::move(queue_.begin(), queue_.end(), std::back_inserter(waiting));
      queue_.clear();
    }
    std::size_t finished = 0;
    for (auto job = waiting.begin(); job != waiting.end();) {
      if (!ready(*job) || !execute(*job)) {
        ++job;
        continue;
      }
      ++finished;
      {
        std::lock_guard lock(mutex_);
        done_jobs_.push_back(std::move(*job));
        if (hooks_.done) hooks_.done();
        --pending_;
        done_.notify_all();
      }
      job = waiting.erase(job);
    }
    pause = finished ? Clock::duration(shortest_pause) : std::min<Clock::duration>(pause * 2, longest_pause);
  }
}

}  // namespace ringmem
