#include "ring/poller.hpp"

#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "ring/thread.hpp"

namespace ringmem::ring {
namespace {

using namespace std::chrono_literals;

constexpr auto linger = 1s;  // how long the thread outlives its last waiter

std::atomic<Poller*> current{nullptr};

// The parent's mutex may be held and its thread is gone: the child leaves all that behind.
void forget_in_child() { current.store(nullptr); }

void register_fork_handler() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
  (void)registered;
}

}  // namespace

Poller& Poller::instance() {
  register_fork_handler();
  Poller* poller = current.load();
  if (poller == nullptr) {
    auto* fresh = new Poller;  // never destroyed: its detached thread may outlive static objects
    if (current.compare_exchange_strong(poller, fresh)) return *fresh;
    delete fresh;
  }
  return *poller;
}

void Poller::set_interval(std::chrono::microseconds interval) noexcept {
  interval_us_.store(interval.count(), std::memory_order_relaxed);
}

std::chrono::microseconds Poller::interval() const noexcept {
  return std::chrono::microseconds(interval_us_.load(std::memory_order_relaxed));
}

std::size_t Poller::registered() {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

bool Poller::running() {
  std::lock_guard lock(mutex_);
  return running_;
}

bool Poller::wait(const Ready& ready, std::chrono::steady_clock::time_point deadline) {
  std::condition_variable wake;
  bool done = false;
  std::unique_lock lock(mutex_);
  start_locked();  // first: nothing of this frame may stay behind when there is no thread
  const WatchId id = add_locked({0, ready, -1, &wake, &done});
  ++waiting_;
  while (!done && wake.wait_until(lock, deadline) != std::cv_status::timeout) {
  }
  if (!done) --waiting_;
  remove_locked(id);
  return done || ready();
}

Poller::WatchId Poller::watch(int fd) {
  std::lock_guard lock(mutex_);
  return add_locked({0, {}, fd, nullptr, nullptr});
}

void Poller::arm(WatchId id, Ready ready) {
  std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) {
    if (entry.id != id) continue;
    start_locked();  // first, as above
    if (!entry.ready) ++waiting_;
    entry.ready = std::move(ready);
    return;
  }
}

void Poller::unwatch(WatchId id) {
  std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.id == id && entry.ready) --waiting_;
  }
  remove_locked(id);
}

Poller::WatchId Poller::add_locked(Entry entry) {
  entry.id = next_id_++;
  entries_.push_back(std::move(entry));
  return entries_.back().id;
}

void Poller::remove_locked(WatchId id) {
  std::erase_if(entries_, [id](const Entry& entry) { return entry.id == id; });
}

void Poller::start_locked() {
  if (running_) {
    work_.notify_one();
    return;
  }
  start_thread([this] { run(); });
  running_ = true;
}

void Poller::look_locked() {
  for (Entry& entry : entries_) {
    if (!entry.ready || !entry.ready()) continue;
    entry.ready = nullptr;
    --waiting_;
    if (entry.fd >= 0) {
      const std::uint64_t one = 1;
      // Fails only when the eventfd is full, that is, when the loop is awake anyway.
      [[maybe_unused]] const auto written = ::write(entry.fd, &one, sizeof one);
    } else {
      *entry.done = true;
      entry.wake->notify_one();
    }
  }
}

void Poller::run() {
  pthread_setname_np(pthread_self(), "ringmem-poll");
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // ns; the default of 50 µs would double the interval
  std::unique_lock lock(mutex_);
  for (;;) {
    look_locked();
    if (waiting_ == 0) {
      if (!work_.wait_for(lock, linger, [this] { return waiting_ != 0; })) break;
      continue;
    }
    lock.unlock();
    std::this_thread::sleep_for(interval());
    lock.lock();
  }
  running_ = false;
}

}  // namespace ringmem::ring
