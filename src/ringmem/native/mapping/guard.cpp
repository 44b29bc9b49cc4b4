#include "mapping/guard.hpp"

namespace ringmem::mapping {

bool device_is_lost(Status status) noexcept {
  switch (status) {
    case Status::deinitialized:
    case Status::invalid_context:
    case Status::illegal_address:
    case Status::misaligned_address:
    case Status::launch_failed:
    case Status::context_is_destroyed:
      return true;
    default:
      return false;
  }
}

std::shared_ptr<Guard> Guard::record(DriverRef driver, const std::vector<StreamRef>& streams) {
  auto guard = std::make_shared<Guard>(driver);
  guard->events_.reserve(streams.size());
  for (const StreamRef& stream : streams) {
    EventRef event{stream.device, 0};
    Status status = driver->event_create(stream.device, EventFlags{}, &event.event);
    if (device_is_lost(status)) continue;
    check(status, "cuEventCreate");
    guard->events_.push_back(event);
    status = driver->event_record(stream.device, event.event, stream.stream);
    if (!ok(status) && !device_is_lost(status)) throw DriverError(status, "cuEventRecord");
    if (!is_capturing(*driver, stream.device, stream.stream)) continue;
    guard->captured_ = true;
    guard->events_.pop_back();  // an event in a capture can be asked for nothing
    insist([&] { return driver->event_destroy(event.device, event.event); });
  }
  return guard;
}

std::shared_ptr<Guard> Guard::record_at_last(const DriverRef& driver,
                                             const std::vector<StreamRef>& streams) noexcept {
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      std::shared_ptr<Guard> guard = record(driver, streams);
      if (guard->captured_) break;
      return guard;
    } catch (...) {
    }
  }
  return nullptr;
}

void Guard::follow(std::shared_ptr<UsedStream> stream) {
  if (!stream->closed()) {
    events_.reserve(events_.size() + 1);
    ringmem::Guard last{stream->device()};
    Status status = driver_->event_create(last.device, EventFlags{}, &last.event);
    if (device_is_lost(status)) return;
    check(status, "cuEventCreate");
    status = stream->mark(last);
    if (ok(status)) return events_.push_back({last.device, last.event});
    insist([&] { return driver_->event_destroy(last.device, last.event); });
    if (!stream->closed()) {
      captured_ = captured_ || forbidden_by_capture(status);
      if (forbidden_by_capture(status) || device_is_lost(status)) return;
      throw DriverError(status, "cuEventRecord");
    }
  }
  closed_.push_back(std::move(stream));
}

Guard::~Guard() {
  for (const EventRef& event : events_) {
    insist([&] { return driver_->event_destroy(event.device, event.event); });
  }
}

bool Guard::done() noexcept {
  if (captured_) return false;
  if (done_.load(std::memory_order_acquire)) return true;
  for (const EventRef& event : events_) {
    const Status status = driver_->event_query(event.device, event.event);
    if (!ok(status) && !device_is_lost(status)) return false;
  }
  for (const auto& stream : closed_) {
    const Status status = stream->query();
    if (!ok(status) && !device_is_lost(status)) return false;
  }
  done_.store(true, std::memory_order_release);
  return true;
}

Status Guard::wait() noexcept {
  if (done_.load(std::memory_order_acquire)) return Status::success;
  for (const EventRef& event : events_) {
    const Status status = driver_->event_synchronize(event.device, event.event);
    if (!ok(status) && !device_is_lost(status)) return status;
  }
  for (const auto& stream : closed_) {
    const Status status = stream->wait();
    if (!ok(status) && !device_is_lost(status)) return status;
  }
  if (!captured_) done_.store(true, std::memory_order_release);
  return Status::success;
}

void wait_for(const DriverRef& driver, const std::vector<StreamRef>& streams,
              const std::vector<EventRef>& events) {
  if (!streams.empty()) {
    const auto guard = Guard::record(driver, streams);
    if (guard->captured()) throw DriverError(Status::stream_capture_unsupported, "cuEventRecord");
    check(guard->wait(), "cuEventSynchronize");
  }
  for (const EventRef& event : events) {
    const Status status = driver->event_synchronize(event.device, event.event);
    if (!ok(status) && !device_is_lost(status)) throw DriverError(status, "cuEventSynchronize");
  }
}

}  // namespace ringmem::mapping
