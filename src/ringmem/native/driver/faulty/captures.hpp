// What the CUDA driver forbids while graphs are captured, for a driver that has no graphs: which
// streams capture, which events were recorded there, and whether a call has spoiled a capture.
// Work given to a capturing stream runs at once nevertheless.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "driver/driver.hpp"

namespace ringmem {

class Captures {
 public:
  using Stream = std::pair<int, StreamHandle>;  // a default stream is one of each device

  // illegal_state when it captures already.
  Status begin(Stream stream);
  // success, or what is wrong with the capture: a call spoiled it, or another stream joined it.
  Status end(Stream stream);
  bool capturing(Stream stream) const;

  // Each is asked before the call it is named after: success lets that go on.
  Status synchronize();
  Status stream_query(Stream stream) const;
  Status stream_wait_event(Stream stream, EventHandle event);
  Status event_query(EventHandle event);
  // Told after the call.
  void event_recorded(EventHandle event, Stream stream);

 private:
  // Of each capturing stream, what end() will say. A stream that joins another's capture leaves it
  // unjoined: nobody here makes the first stream wait for it in turn.
  mutable std::mutex mutex_;
  std::map<Stream, Status> streams_;
  std::map<EventHandle, Stream> events_;  // recorded in a capture
};

}  // namespace ringmem
