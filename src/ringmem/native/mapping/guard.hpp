// Waiting for work that may still use pages. Unmapping memory that a kernel uses is a fault, so
// pages go only after events recorded on the streams that use them are done. Waiting is on the
// host, and never on a whole device (which would wait for persistent kernels).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "driver/driver.hpp"
#include "memory/used_stream.hpp"

namespace ringmem::mapping {

struct StreamRef {
  int device = 0;
  StreamHandle stream = default_stream;
};

struct EventRef {
  int device = 0;
  EventHandle event = 0;
};

// Calls again once when a call failed that nobody else will repeat: a destroy in a destructor.
template <class Call>
Status insist(Call&& call) noexcept {
  const Status status = call();
  return ok(status) ? status : call();
}

// A device in this state runs nothing any more, so nothing uses its memory either.
bool device_is_lost(Status status) noexcept;

// The work submitted to some streams up to one moment: one event a stream, owned.
class Guard {
 public:
  // Throws DriverError; then no event is left behind.
  static std::shared_ptr<Guard> record(DriverRef driver, const std::vector<StreamRef>& streams);
  // For finalizers, which have nobody to tell: tries twice. Null when the driver will not record;
  // then nobody knows whether pages are in use, and they must stay as they are.
  static std::shared_ptr<Guard> record_at_last(const DriverRef& driver,
                                               const std::vector<StreamRef>& streams) noexcept;

  explicit Guard(DriverRef driver) noexcept : driver_(std::move(driver)) {}
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard();

  // Before anybody asks: what `stream` has now, or had when it was closed, counts, too. Throws
  // DriverError.
  void follow(std::shared_ptr<UsedStream> stream);

  // True when the work is over, also because its device was lost. False as long as it runs, and
  // while the driver cannot tell (the pages then stay mapped). For ever false when a stream was
  // capturing: the graph may be launched at any time.
  bool done() noexcept;
  // Blocks until the work is over: hold no lock and not the GIL. What a stream that was capturing
  // had to do is not waited for.
  Status wait() noexcept;
  bool captured() const noexcept { return captured_; }

 private:
  DriverRef driver_;
  std::vector<EventRef> events_;
  UsedStreams closed_;
  bool captured_ = false;  // some stream was capturing: nothing says when its graph runs
  std::atomic<bool> done_{false};
};

// Blocks until the work submitted to `streams` so far, and that before `events`, is over. A lost
// device counts as over. Throws DriverError, also for a stream that captures: what it was given
// before cannot be waited for.
void wait_for(const DriverRef& driver, const std::vector<StreamRef>& streams,
              const std::vector<EventRef>& events);

}  // namespace ringmem::mapping
