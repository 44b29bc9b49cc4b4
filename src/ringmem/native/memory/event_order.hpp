// Ordering one stream after another with an event that nobody keeps.
#pragma once

#include "driver/driver.hpp"

namespace ringmem {

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

// `later` waits, on its device, for the work that `earlier` has now. A queued wait keeps what it
// waits for, so the event can go at once.
inline Status order_streams(Driver& driver, int earlier_device, StreamHandle earlier,
                            int later_device, StreamHandle later) noexcept {
  EventHandle event = 0;
  Status status = driver.event_create(earlier_device, EventFlags{}, &event);
  if (!ok(status)) return status;
  status = driver.event_record(earlier_device, event, earlier);
  if (ok(status)) status = driver.stream_wait_event(later_device, later, event);
  destroy_event(driver, earlier_device, event);
  return status;
}

}  // namespace ringmem
