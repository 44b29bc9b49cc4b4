// Events that nobody keeps for long: ordering one stream after another, and knowing when work is
// done that may still use memory.
#pragma once

#include "driver/driver.hpp"

namespace ringmem {

// An event behind the work that must be done.
struct Guard {
  int device = 0;
  EventHandle event = 0;
};

// Puts the guard's event behind what `stream` was given. Refused where that is captured: the graph may
// be launched at any time, and an event in it can be asked for nothing. Asked afterwards, so that a
// capture that begins meanwhile is not missed; the event may then only be destroyed or recorded anew.
inline Status mark_stream(Driver& driver, StreamHandle stream, const Guard& guard) noexcept {
  const Status status = driver.event_record(guard.device, guard.event, stream);
  if (!ok(status)) return status;
  return is_capturing(driver, guard.device, stream) ? Status::stream_capture_unsupported : status;
}

// Destroys an event; repeats a call that fails, since there is nobody left who could.
inline void destroy_event(Driver& driver, int device, EventHandle event) noexcept {
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (ok(driver.event_destroy(device, event))) return;
  }
}

// The device that `stream` belongs to; a default stream belongs to the one that is asked, and so
// does any where an old driver cannot tell.
inline int device_of_stream(Driver& driver, int device, StreamHandle stream) noexcept {
  int owner = device;
  if (stream > per_thread_stream && !ok(driver.stream_device(stream, &owner))) return device;
  return owner;
}

// Whether the border of a capture is between two streams. If the one inside waited for the other its
// capture would be spoiled, and if the other waited for it that would join: neither is done unasked.
// The legacy default stream is never inside; it "captures" while one that it waits for does.
inline bool capture_between(Driver& driver, int a_device, StreamHandle a, int b_device,
                            StreamHandle b) noexcept {
  const bool a_captures = is_capturing(driver, a_device, a);
  const bool b_captures = is_capturing(driver, b_device, b);
  return a_captures != b_captures || (a_captures && (a <= legacy_stream || b <= legacy_stream));
}

// `later` waits, on its device, for the work that `earlier` has now. A queued wait keeps what it
// waits for, so the event can go at once. stream_capture_isolation where a capture is between them.
inline Status order_streams(Driver& driver, int earlier_device, StreamHandle earlier,
                            int later_device, StreamHandle later) noexcept {
  if (capture_between(driver, earlier_device, earlier, later_device, later)) {
    return Status::stream_capture_isolation;
  }
  EventHandle event = 0;
  Status status = driver.event_create(earlier_device, EventFlags{}, &event);
  if (!ok(status)) return status;
  status = driver.event_record(earlier_device, event, earlier);
  if (ok(status)) status = driver.stream_wait_event(later_device, later, event);
  destroy_event(driver, earlier_device, event);
  return status;
}

}  // namespace ringmem
