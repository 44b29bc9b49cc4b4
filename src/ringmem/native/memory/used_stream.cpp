#include "memory/used_stream.hpp"

#include <pthread.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace ringmem {
namespace {

// Open streams by their handles, which drivers beside each other may share. Never destroyed: exit has
// no order. An object leaves before it dies.
struct OpenStreams {
  std::mutex mutex;  // innermost; never held around a driver call
  std::unordered_multimap<StreamHandle, UsedStream*> streams;
};
OpenStreams& open_streams = *new OpenStreams;

// A child never inherits the lock held by a thread that it has not.
[[maybe_unused]] const int registered =
    pthread_atfork([] { open_streams.mutex.lock(); }, [] { open_streams.mutex.unlock(); },
                   [] { open_streams.mutex.unlock(); });

}  // namespace

UsedStream::~UsedStream() {
  if (announced_ && !closed()) withdraw();
  if (event_ != 0) destroy_event(*driver_, device_, event_);
}

std::shared_ptr<UsedStream> UsedStream::announce(DriverRef driver, int device,
                                                 StreamHandle handle) {
  auto stream = std::make_shared<UsedStream>(std::move(driver), device, handle);
  const std::lock_guard lock(open_streams.mutex);
  open_streams.streams.emplace(handle, stream.get());
  stream->announced_ = true;
  return stream;
}

std::shared_ptr<UsedStream> UsedStream::find(const Driver& driver, StreamHandle handle) {
  if (handle <= per_thread_stream) return nullptr;
  const std::lock_guard lock(open_streams.mutex);
  const auto [first, last] = open_streams.streams.equal_range(handle);
  for (auto entry = first; entry != last; ++entry) {
    if (entry->second->driver_.get() == &driver) return entry->second->weak_from_this().lock();
  }
  return nullptr;
}

std::shared_ptr<UsedStream> UsedStream::of(const DriverRef& driver, int device,
                                           StreamHandle handle) {
  if (auto found = find(*driver, handle)) return found;
  return std::make_shared<UsedStream>(driver, device_of_stream(*driver, device, handle), handle);
}

void UsedStream::withdraw() noexcept {
  const std::lock_guard lock(open_streams.mutex);
  const auto [first, last] = open_streams.streams.equal_range(handle_);
  const auto own = std::find_if(first, last, [this](const auto& entry) {
    return entry.second == this;
  });
  if (own != last) open_streams.streams.erase(own);
}

void UsedStream::close(bool named) noexcept {
  if (announced_) withdraw();  // from here on nobody finds it
  if (generation_ != fork_generation()) return closed_.store(true, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  Guard last{device_};
  if (announced_ && (named || weak_from_this().use_count() > 1) &&
      ok(driver_->event_create(device_, EventFlags{}, &last.event))) {
    if (ok(mark_stream(*driver_, handle_, last))) event_ = last.event;
    else destroy_event(*driver_, device_, last.event);
  }
  closed_.store(true, std::memory_order_release);
}

Status UsedStream::record_before(int device, StreamHandle later, const Guard& guard) noexcept {
  if (generation_ != fork_generation()) return refused_in_child();
  const std::lock_guard lock(mutex_);
  if (closed()) return Status::invalid_handle;
  if (capture_between(*driver_, device_, handle_, device, later)) {
    return Status::stream_capture_isolation;
  }
  return driver_->event_record(guard.device, guard.event, handle_);
}

Status UsedStream::mark(const Guard& guard) noexcept {
  if (generation_ != fork_generation()) return refused_in_child();
  const std::lock_guard lock(mutex_);
  return closed() ? Status::invalid_handle : mark_stream(*driver_, handle_, guard);
}

Status UsedStream::order_before(int device, StreamHandle later) noexcept {
  if (generation_ != fork_generation()) return refused_in_child();
  if (!closed()) {
    const std::lock_guard lock(mutex_);
    if (!closed()) return order_streams(*driver_, device_, handle_, device, later);
  }
  if (done()) return Status::success;
  if (is_capturing(*driver_, device, later)) return Status::stream_capture_isolation;
  return left_event() ? driver_->stream_wait_event(device, later, event_) : wait();
}

Status UsedStream::finish() noexcept {
  if (closed()) return wait();
  Guard last{device_};
  Status status = driver_->event_create(device_, EventFlags{}, &last.event);
  if (!ok(status)) return status;
  status = mark(last);  // to wait for the handle itself would need the lock, which close() takes
  const bool marked = ok(status);
  if (marked) status = driver_->event_synchronize(device_, last.event);
  destroy_event(*driver_, device_, last.event);
  return !marked && closed() ? wait() : status;
}

Status UsedStream::query() noexcept {
  if (finished_.load(std::memory_order_acquire)) return Status::success;
  if (!left_event()) return Status::not_ready;
  const Status status = driver_->event_query(device_, event_);
  if (ok(status)) finished_.store(true, std::memory_order_release);
  return status;
}

Status UsedStream::wait() noexcept {
  if (finished_.load(std::memory_order_acquire)) return Status::success;
  const Status status = left_event() ? driver_->event_synchronize(device_, event_)
                                     : driver_->synchronize(device_);
  if (ok(status)) finished_.store(true, std::memory_order_release);
  return status;
}

void add_stream(UsedStreams& streams, std::shared_ptr<UsedStream> stream) {
  const bool known = std::any_of(streams.begin(), streams.end(), [&](const auto& other) {
    if (stream->announced() || other->announced()) return other == stream;
    return other->handle() == stream->handle() && other->device() == stream->device();
  });
  if (!known) streams.push_back(std::move(stream));
}

}  // namespace ringmem
