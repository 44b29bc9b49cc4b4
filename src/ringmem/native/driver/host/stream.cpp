#include "driver/host/stream.hpp"

#include <system_error>

namespace ringmem::host {

Stream::Stream(std::shared_ptr<Engine> engine, int device, bool non_blocking)
    : engine_(std::move(engine)), device_(device), non_blocking_(non_blocking) {}

Stream::~Stream() {
  // The thread holds a reference while it runs, so the last one may be its own.
  if (!thread_.joinable()) return;
  if (runs_on_this_thread()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

Status Stream::submit(Work work, std::vector<Point> after, bool late, Point* point) {
  Task task;
  const Clock::duration latency = engine_->latency;
  if (late && latency > Clock::duration::zero()) task.due = Clock::now() + latency;
  task.after = std::move(after);
  task.work = std::move(work);
  {
    const std::lock_guard lock(mutex_);
    if (abandoned_) return Status::deinitialized;
    if (closed_) return Status::invalid_handle;  // destroyed by another thread a moment ago
    if (!started_) {
      try {
        thread_ = std::thread([self = shared_from_this()] { self->run(); });
      } catch (const std::system_error&) {
        return Status::out_of_memory;
      }
      started_ = true;
    }
    task.sequence = submitted_.load(std::memory_order_relaxed) + 1;
    if (point) *point = {shared_from_this(), task.sequence};
    queue_.push_back(std::move(task));
    submitted_.fetch_add(1, std::memory_order_release);
  }
  work_there_.notify_one();
  return Status::success;
}

bool Stream::complete_at_once(Point* point) noexcept {
  const std::lock_guard lock(mutex_);
  const std::uint64_t submitted = submitted_.load(std::memory_order_relaxed);
  if (completed_.load(std::memory_order_relaxed) != submitted) return false;
  *point = {shared_from_this(), submitted};
  return true;
}

bool Stream::wait(std::uint64_t sequence) noexcept {
  if (done(sequence)) return true;
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return done(sequence) || abandoned_; });
  return done(sequence);
}

void Stream::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (!started_) exited_ = true;
  }
  work_there_.notify_all();
}

bool Stream::finished() noexcept {
  const std::lock_guard lock(mutex_);
  return closed_ && exited_;
}

void Stream::wake() noexcept {
  { const std::lock_guard lock(mutex_); }  // a sleeper is either asleep by now or sees the flag
  work_there_.notify_all();
  progress_.notify_all();
}

void Stream::join() noexcept {
  if (thread_.joinable() && !runs_on_this_thread()) thread_.join();
}

bool Stream::runs_on_this_thread() const noexcept {
  return thread_.get_id() == std::this_thread::get_id();
}

void Stream::run() noexcept {
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      work_there_.wait(lock, [&] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) {
        exited_ = true;
        return;
      }
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    const bool performed = perform(task);
    task.work = nullptr;  // what it holds is gone before anybody hears that it is done
    task.after.clear();
    if (!performed) return abandon();
    {
      const std::lock_guard lock(mutex_);
      completed_.store(task.sequence, std::memory_order_release);
    }
    progress_.notify_all();
  }
}

bool Stream::perform(Task& task) noexcept {
  for (const Point& point : task.after) {
    if (!point.wait()) return false;
  }
  if (task.due != Clock::time_point{} && !sleep_until(task.due)) return false;
  if (!task.work || engine_->faulted()) return true;
  Status status = Status::unknown;
  try {
    status = task.work();
  } catch (...) {  // out of host memory in the middle of something: nothing is certain any more
  }
  if (status == Status::deinitialized) return false;
  if (!ok(status)) engine_->set_fault(status);
  return true;
}

bool Stream::sleep_until(Clock::time_point due) noexcept {
  std::unique_lock lock(mutex_);
  // At the end nothing is late any more: what is queued is done at once.
  work_there_.wait_until(lock, due, [&] { return engine_->stopping.load(); });
  return true;
}

void Stream::abandon() noexcept {
  std::deque<Task> dropped;
  {
    const std::lock_guard lock(mutex_);
    abandoned_ = exited_ = true;
    dropped.swap(queue_);
  }
  progress_.notify_all();
}

}  // namespace ringmem::host
