#include "driver/faulty/captures.hpp"

namespace ringmem {

Status Captures::begin(Stream stream) {
  const std::lock_guard lock(mutex_);
  return streams_.emplace(stream, Status::success).second ? Status::success
                                                          : Status::illegal_state;
}

Status Captures::end(Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.extract(stream);
  if (!found) return Status::illegal_state;
  std::erase_if(events_, [&](const auto& entry) { return entry.second == stream; });
  return found.mapped();
}

bool Captures::capturing(Stream stream) const {
  const std::lock_guard lock(mutex_);
  return streams_.contains(stream);
}

// The driver refuses it while anything is captured, and gives up what is.
Status Captures::synchronize() {
  const std::lock_guard lock(mutex_);
  if (streams_.empty()) return Status::success;
  for (auto& [stream, state] : streams_) state = Status::stream_capture_invalidated;
  return Status::stream_capture_unsupported;
}

Status Captures::stream_query(Stream stream) const {
  return capturing(stream) ? Status::stream_capture_unsupported : Status::success;
}

Status Captures::stream_wait_event(Stream stream, EventHandle event) {
  const std::lock_guard lock(mutex_);
  const auto recorded = events_.find(event);
  const auto waiting = streams_.find(stream);
  if (recorded == events_.end()) {
    if (waiting == streams_.end()) return Status::success;
    waiting->second = Status::stream_capture_invalidated;
    return Status::stream_capture_isolation;
  }
  if (stream != recorded->second) streams_[recorded->second] = Status::stream_capture_unjoined;
  return Status::success;
}

Status Captures::event_query(EventHandle event) {
  const std::lock_guard lock(mutex_);
  const auto recorded = events_.find(event);
  if (recorded == events_.end()) return Status::success;
  streams_[recorded->second] = Status::stream_capture_invalidated;
  return Status::captured_event;
}

void Captures::event_recorded(EventHandle event, Stream stream) {
  const std::lock_guard lock(mutex_);
  events_.erase(event);
  if (streams_.contains(stream)) events_.emplace(event, stream);
}

}  // namespace ringmem
