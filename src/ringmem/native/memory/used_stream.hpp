// A stream whose work uses memory: known by its handle while it is open, and by the event that it left
// when it was closed. The handle of a closed stream may be another's, and no driver tells of streams
// that go; so those who make streams announce them here, and say when they close them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "driver/fork.hpp"
#include "memory/event_order.hpp"

namespace ringmem {

class UsedStream : public std::enable_shared_from_this<UsedStream> {
 public:
  // One that nobody announced, as another library's: as good as its handle.
  UsedStream(DriverRef driver, int device, StreamHandle handle)
      : driver_(std::move(driver)), device_(device), handle_(handle) {}
  UsedStream(const UsedStream&) = delete;
  UsedStream& operator=(const UsedStream&) = delete;
  ~UsedStream();

  static std::shared_ptr<UsedStream> announce(DriverRef driver, int device, StreamHandle handle);
  // The open stream that was announced with this handle, or null.
  static std::shared_ptr<UsedStream> find(const Driver& driver, StreamHandle handle);
  // That, else a new one. `device`: where the driver cannot tell whose the stream is.
  static std::shared_ptr<UsedStream> of(const DriverRef& driver, int device, StreamHandle handle);

  int device() const noexcept { return device_; }
  StreamHandle handle() const noexcept { return handle_; }
  bool announced() const noexcept { return announced_; }
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // Just before the stream is destroyed. One that was announced leaves an event if somebody else
  // holds this object, or will: `named`.
  void close(bool named) noexcept;
  // Puts the guard's event behind what it has now, while it is open; invalid_handle afterwards. For
  // `later`, a stream of `device`, to wait for: stream_capture_isolation as order_before().
  Status record_before(int device, StreamHandle later, const Guard& guard) noexcept;
  Status mark(const Guard& guard) noexcept;  // as mark_stream()
  // `later`, a stream of `device`, waits for what this one has now, or had when it was closed. On
  // the host only where it left no event. stream_capture_isolation where a capture is in between.
  Status order_before(int device, StreamHandle later) noexcept;

  // Blocks until what it has now, or had when it was closed, is done: hold no lock and not the GIL.
  Status finish() noexcept;

  // Of a closed stream. Without an event only the device can say what is done, and only wait() asks.
  bool left_event() const noexcept { return event_ != 0; }
  Status query() noexcept;  // not_ready; success; or why the driver cannot tell
  bool done() noexcept { return ok(query()); }
  Status wait() noexcept;   // blocks: hold no lock and not the GIL

 private:
  void withdraw() noexcept;

  const DriverRef driver_;
  const int device_;
  const StreamHandle handle_;
  const std::uint64_t generation_ = fork_generation();
  bool announced_ = false;
  EventHandle event_ = 0;  // behind all its work; written before closed_
  std::atomic<bool> closed_{false};
  std::atomic<bool> finished_{false};  // closed, and all its work is known to be done
  std::mutex mutex_;  // keeps the handle valid: nobody uses it while it is closed
};

using UsedStreams = std::vector<std::shared_ptr<UsedStream>>;

// Unless it is there already.
void add_stream(UsedStreams& streams, std::shared_ptr<UsedStream> stream);

}  // namespace ringmem
