// Raw operations on devices, copies, streams, events and peers.
#include "bind/driver_call.hpp"

#include <nanobind/stl/string.h>

namespace ringmem::bind {
namespace {

using namespace nb::literals;
using Class = nb::class_<Driver>;
using size = std::size_t;

void bind_devices(Class& cls) {
  cls.def_prop_ro("platform", [](Driver& driver) { return driver.platform(); });
  cls.def("device_count", [](Driver& driver) {
    int count = 0;
    RINGMEM_CALL(device_count, (&count));
    return count;
  });
  cls.def("driver_version", [](Driver& driver) {
    int version = 0;
    RINGMEM_CALL(driver_version, (&version));
    return version;
  });
  cls.def(
      "device_info",
      [](Driver& driver, int device) {
        DeviceInfo info;
        RINGMEM_CALL(device_info, (device, &info), {"device", device});
        return info;
      },
      "device"_a);
  cls.def(
      "attribute",
      [](Driver& driver, int device, Attribute attribute) {
        int value = 0;
        RINGMEM_CALL(attribute, (device, attribute, &value), {"device", device},
                     {"attribute", attribute});
        return value;
      },
      "device"_a, "attribute"_a);
  cls.def(
      "memory_info",
      [](Driver& driver, int device) {
        MemoryInfo info;
        RINGMEM_CALL(memory_info, (device, &info), {"device", device});
        return info;
      },
      "device"_a);
  cls.def(
      "synchronize",
      [](Driver& driver, int device) {
        RINGMEM_CALL(synchronize, (device), {"device", device});
      },
      "device"_a);
  cls.def(
      "primary_context",
      [](Driver& driver, int device) {
        std::uint64_t context = 0;
        RINGMEM_CALL(primary_context, (device, &context), {"device", device});
        return context;
      },
      "device"_a);
}

void bind_copies(Class& cls) {
  cls.def(
      "copy_async",
      [](Driver& driver, int device, DevicePtr dst, DevicePtr src, size nbytes,
         StreamHandle stream) {
        RINGMEM_CALL(copy_async, (device, dst, src, nbytes, stream), {"device", device},
                     Argument::hex("dst", dst), Argument::hex("src", src), {"nbytes", nbytes},
                     Argument::hex("stream", stream));
      },
      "device"_a, "dst"_a, "src"_a, "nbytes"_a, "stream"_a = default_stream);
  cls.def(
      "copy_2d_async",
      [](Driver& driver, int device, DevicePtr dst, size dst_pitch, DevicePtr src, size src_pitch,
         size width, size height, StreamHandle stream) {
        const Copy2D copy{dst, dst_pitch, src, src_pitch, width, height};
        RINGMEM_CALL(copy_2d_async, (device, copy, stream), {"device", device},
                     Argument::hex("dst", dst), {"dst_pitch", dst_pitch},
                     Argument::hex("src", src), {"src_pitch", src_pitch}, {"width", width},
                     {"height", height}, Argument::hex("stream", stream));
      },
      "device"_a, "dst"_a, "dst_pitch"_a, "src"_a, "src_pitch"_a, "width"_a, "height"_a,
      "stream"_a = default_stream);
  cls.def(
      "copy_peer_async",
      [](Driver& driver, int dst_device, DevicePtr dst, int src_device, DevicePtr src, size nbytes,
         StreamHandle stream) {
        RINGMEM_CALL(copy_peer_async, (dst_device, dst, src_device, src, nbytes, stream),
                     {"dst_device", dst_device}, Argument::hex("dst", dst),
                     {"src_device", src_device}, Argument::hex("src", src), {"nbytes", nbytes},
                     Argument::hex("stream", stream));
      },
      "dst_device"_a, "dst"_a, "src_device"_a, "src"_a, "nbytes"_a, "stream"_a = default_stream);
  cls.def(
      "fill_async",
      [](Driver& driver, int device, DevicePtr ptr, std::uint32_t value, int value_bytes,
         size count, StreamHandle stream) {
        RINGMEM_CALL(fill_async, (device, ptr, value, value_bytes, count, stream),
                     {"device", device}, Argument::hex("ptr", ptr), {"value", value},
                     {"value_bytes", value_bytes}, {"count", count},
                     Argument::hex("stream", stream));
      },
      "device"_a, "ptr"_a, "value"_a, "value_bytes"_a, "count"_a, "stream"_a = default_stream);
}

// True when the work is done, false while the status is not_ready.
template <class Call, class Arguments>
bool is_done(const Driver& driver, Operation operation, Call&& call, Arguments&& arguments) {
  const Status status = status_of(call);
  if (status == Status::not_ready) return false;
  if (!ok(status)) {
    throw DriverError(status, cuda_name(operation), describe(driver, status, arguments()));
  }
  return true;
}

void bind_stream_life(Class& cls) {
  cls.def(
      "stream_create",
      [](Driver& driver, int device, bool non_blocking, int priority) {
        StreamHandle stream = 0;
        RINGMEM_CALL(stream_create, (device, StreamFlags{non_blocking, priority}, &stream),
                     {"device", device}, {"priority", priority});
        return stream;
      },
      "device"_a, "non_blocking"_a = true, "priority"_a = 0);
  cls.def(
      "stream_destroy",
      [](Driver& driver, int device, StreamHandle stream) {
        RINGMEM_CALL(stream_destroy, (device, stream), {"device", device},
                     Argument::hex("stream", stream));
      },
      "device"_a, "stream"_a);
  cls.def(
      "stream_query",
      [](Driver& driver, int device, StreamHandle stream) {
        return is_done(
            driver, Operation::stream_query, [&] { return driver.stream_query(device, stream); },
            [&] {
              return std::vector<Argument>{{"device", device}, Argument::hex("stream", stream)};
            });
      },
      "device"_a, "stream"_a);
  cls.def(
      "stream_synchronize",
      [](Driver& driver, int device, StreamHandle stream) {
        RINGMEM_CALL(stream_synchronize, (device, stream), {"device", device},
                     Argument::hex("stream", stream));
      },
      "device"_a, "stream"_a);
  cls.def(
      "stream_device",
      [](Driver& driver, StreamHandle stream) {
        int device = -1;
        RINGMEM_CALL(stream_device, (stream, &device), Argument::hex("stream", stream));
        return device;
      },
      "stream"_a);
  cls.def(
      "stream_capturing",
      [](Driver& driver, int device, StreamHandle stream) {
        bool capturing = false;
        RINGMEM_CALL(stream_capturing, (device, stream, &capturing), {"device", device},
                     Argument::hex("stream", stream));
        return capturing;
      },
      "device"_a, "stream"_a);
}

void bind_stream_work(Class& cls) {
  cls.def(
      "stream_wait_event",
      [](Driver& driver, int device, StreamHandle stream, EventHandle event) {
        RINGMEM_CALL(stream_wait_event, (device, stream, event), {"device", device},
                     Argument::hex("stream", stream), Argument::hex("event", event));
      },
      "device"_a, "stream"_a, "event"_a);
  cls.def(
      "stream_wait_value",
      [](Driver& driver, int device, StreamHandle stream, DevicePtr ptr, std::uint32_t value) {
        RINGMEM_CALL(stream_wait_value, (device, stream, ptr, value), {"device", device},
                     Argument::hex("stream", stream), Argument::hex("ptr", ptr),
                     {"value", value});
      },
      "device"_a, "stream"_a, "ptr"_a, "value"_a);
  cls.def(
      "stream_write_value",
      [](Driver& driver, int device, StreamHandle stream, DevicePtr ptr, std::uint32_t value) {
        RINGMEM_CALL(stream_write_value, (device, stream, ptr, value), {"device", device},
                     Argument::hex("stream", stream), Argument::hex("ptr", ptr),
                     {"value", value});
      },
      "device"_a, "stream"_a, "ptr"_a, "value"_a);
  cls.def(
      "relax_capture",
      [](Driver& driver, bool relaxed) {
        bool previous = false;
        RINGMEM_CALL(relax_capture, (relaxed, &previous), {"relaxed", relaxed});
        return previous;
      },
      "relaxed"_a);
}

void bind_events(Class& cls) {
  cls.def(
      "event_create",
      [](Driver& driver, int device, bool timing, bool blocking_sync) {
        EventHandle event = 0;
        RINGMEM_CALL(event_create, (device, EventFlags{timing, blocking_sync}, &event),
                     {"device", device});
        return event;
      },
      "device"_a, "timing"_a = false, "blocking_sync"_a = false);
  cls.def(
      "event_destroy",
      [](Driver& driver, int device, EventHandle event) {
        RINGMEM_CALL(event_destroy, (device, event), {"device", device},
                     Argument::hex("event", event));
      },
      "device"_a, "event"_a);
  cls.def(
      "event_record",
      [](Driver& driver, int device, EventHandle event, StreamHandle stream) {
        RINGMEM_CALL(event_record, (device, event, stream), {"device", device},
                     Argument::hex("event", event), Argument::hex("stream", stream));
      },
      "device"_a, "event"_a, "stream"_a = default_stream);
  cls.def(
      "event_query",
      [](Driver& driver, int device, EventHandle event) {
        return is_done(
            driver, Operation::event_query, [&] { return driver.event_query(device, event); },
            [&] {
              return std::vector<Argument>{{"device", device}, Argument::hex("event", event)};
            });
      },
      "device"_a, "event"_a);
  cls.def(
      "event_synchronize",
      [](Driver& driver, int device, EventHandle event) {
        RINGMEM_CALL(event_synchronize, (device, event), {"device", device},
                     Argument::hex("event", event));
      },
      "device"_a, "event"_a);
  cls.def(
      "event_elapsed",
      [](Driver& driver, int device, EventHandle start, EventHandle end) {
        float milliseconds = 0;
        RINGMEM_CALL(event_elapsed, (device, start, end, &milliseconds), {"device", device},
                     Argument::hex("start", start), Argument::hex("end", end));
        return milliseconds;
      },
      "device"_a, "start"_a, "end"_a);
}

void bind_peers(Class& cls) {
  cls.def(
      "peer_can_access",
      [](Driver& driver, int device, int peer) {
        bool can = false;
        RINGMEM_CALL(peer_can_access, (device, peer, &can), {"device", device}, {"peer", peer});
        return can;
      },
      "device"_a, "peer"_a);
  cls.def(
      "peer_enable",
      [](Driver& driver, int device, int peer) {
        RINGMEM_CALL(peer_enable, (device, peer), {"device", device}, {"peer", peer});
      },
      "device"_a, "peer"_a);
  cls.def(
      "peer_disable",
      [](Driver& driver, int device, int peer) {
        RINGMEM_CALL(peer_disable, (device, peer), {"device", device}, {"peer", peer});
      },
      "device"_a, "peer"_a);
}

}  // namespace

void bind_driver_streams(Class& cls) {
  bind_devices(cls);
  bind_copies(cls);
  bind_stream_life(cls);
  bind_stream_work(cls);
  bind_events(cls);
  bind_peers(cls);
}

}  // namespace ringmem::bind
