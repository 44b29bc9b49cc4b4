// HostDriver: streams, events, values in memory and host functions.
#include <chrono>
#include <thread>

#include "driver/host/machine.hpp"
#include "driver/host/transfer.hpp"

namespace ringmem {

using host::Clock;
using host::Device;
using host::Event;
using host::guarded;
using host::Machine;
using host::on_device;
using host::on_stream;
using host::Point;
using host::Record;
using host::Stream;

namespace {

bool is_default(StreamHandle stream) noexcept { return stream <= per_thread_stream; }

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

template <class Operation>
Status on_event(Machine& machine, int device, EventHandle handle, Operation&& operation) noexcept {
  return on_device(machine, device, [&](Device& d) -> Status {
    const std::shared_ptr<Event> event = machine.events.find(handle);
    return event ? operation(d, *event) : Status::invalid_handle;
  });
}

std::shared_ptr<Record> record_of(Event& event) {
  const std::lock_guard lock(event.mutex);
  return event.record;
}

// All that a synchronization of this stream waits for.
std::vector<Point> pending_of(Machine& machine, const std::shared_ptr<Stream>& stream) {
  std::vector<Point> points = machine.implicit_order(*stream);
  if (stream.get() != machine.device(stream->device())->legacy.get()) points.clear();
  points.push_back(stream->last());
  return points;
}

// Polls until the word is there: first often, then rarely, for as long as the driver lives.
Status wait_for_value(const host::PageTable& table, const host::Engine& engine, std::uint64_t ptr,
                      const host::Requester& who, std::uint32_t wanted) {
  for (int round = 0;; ++round) {
    std::uint32_t value = 0;
    if (const Status status = load_word(table, ptr, who, &value); !ok(status)) return status;
    if (static_cast<std::int32_t>(value - wanted) >= 0) return Status::success;
    if (engine.faulted()) return Status::success;  // nothing runs there any more
    if (engine.stopping.load()) return Status::deinitialized;
    if (round < 200) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(round < 2000 ? 20 : 200));
    }
  }
}

}  // namespace

Status HostDriver::stream_create(int device, StreamFlags flags, StreamHandle* stream) noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    machine_->prune_streams(d);
    auto made = std::make_shared<Stream>(d.engine, device, flags.non_blocking);
    {
      const std::lock_guard lock(d.mutex);
      d.streams.push_back(made);
    }
    *stream = machine_->streams.insert(std::move(made));
    return Status::success;
  });
}

Status HostDriver::stream_destroy(int device, StreamHandle stream) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    const std::shared_ptr<Stream> gone = machine_->streams.erase(stream);
    if (!gone) return Status::invalid_handle;
    gone->close();
    machine_->prune_streams(*machine_->device(gone->device()));
    return Status::success;
  });
}

Status HostDriver::stream_query(int device, StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto& queue) {
    for (const Point& point : pending_of(*machine_, queue)) {
      if (!point.done()) return Status::not_ready;
    }
    return queue->engine().fault.load();
  });
}

Status HostDriver::stream_synchronize(int device, StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) {
    for (const Point& point : pending_of(*machine_, queue)) point.wait();
    const Status fault = queue->engine().fault.load();
    if (ok(fault)) machine_->settle_pools(d);
    return fault;
  });
}

Status HostDriver::stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto& queue) {
    const std::shared_ptr<Event> found = machine_->events.find(event);
    if (!found) return Status::invalid_handle;
    const std::shared_ptr<Record> record = record_of(*found);
    if (!record || record->point.done() || record->point.stream == queue) return Status::success;
    return machine_->submit(*queue, {}, {record->point}, false);
  });
}

Status HostDriver::stream_device(StreamHandle stream, int* device) noexcept {
  return guarded(*machine_, [&] {
    if (is_default(stream)) return Status::invalid_context;  // every device has one
    const std::shared_ptr<Stream> found = machine_->streams.find(stream);
    if (!found) return Status::invalid_handle;
    *device = found->device();
    return Status::success;
  });
}

// The simulation has no graphs.
Status HostDriver::stream_capturing(int device, StreamHandle stream, bool* capturing) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto&) {
    *capturing = false;
    return Status::success;
  });
}

Status HostDriver::stream_wait_value(int device, StreamHandle stream, DevicePtr ptr,
                                     std::uint32_t value) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) -> Status {
    if (!machine_->config.stream_mem_ops) return Status::not_supported;
    if (ptr % sizeof value != 0 || machine_->table.is_pageable(ptr)) return Status::invalid_value;
    const host::Requester who{host::bit_of(d.ordinal), d.reach.load()};
    return machine_->submit(*queue, [&table = machine_->table, engine = d.engine, ptr, who, value] {
      return wait_for_value(table, *engine, ptr, who, value);
    });
  });
}

Status HostDriver::stream_write_value(int device, StreamHandle stream, DevicePtr ptr,
                                      std::uint32_t value) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) -> Status {
    if (!machine_->config.stream_mem_ops) return Status::not_supported;
    if (ptr % sizeof value != 0 || machine_->table.is_pageable(ptr)) return Status::invalid_value;
    const host::Requester who{host::bit_of(d.ordinal), d.reach.load()};
    return machine_->submit(*queue, [&table = machine_->table, ptr, who, value] {
      return store_word(table, ptr, who, value);
    });
  });
}

Status HostDriver::launch_host_function(int device, StreamHandle stream, HostFunction function,
                                        void* argument) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto& queue) {
    if (!function) return Status::invalid_value;
    return machine_->submit(*queue, [function, argument] {
      function(argument);
      return Status::success;
    });
  });
}

Status HostDriver::event_create(int device, EventFlags flags, EventHandle* event) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    auto made = std::make_shared<Event>();
    made->device = device;
    made->flags = flags;
    *event = machine_->events.insert(std::move(made));
    return Status::success;
  });
}

Status HostDriver::event_destroy(int device, EventHandle event) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    return machine_->events.erase(event) ? Status::success : Status::invalid_handle;
  });
}

Status HostDriver::event_record(int device, EventHandle event, StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) -> Status {
    const std::shared_ptr<Event> found = machine_->events.find(event);
    if (!found || found->device != d.ordinal) return Status::invalid_handle;
    auto record = std::make_shared<Record>();
    std::vector<Point> order = machine_->implicit_order(*queue);
    const bool at_once = order.empty() && d.engine->latency == Clock::duration::zero() &&
                         queue->complete_at_once(&record->point);
    if (at_once) {
      record->reached_ns = now_ns();
    } else {
      const Status status = queue->submit(
          [times = std::weak_ptr<Record>(record)] {
            if (const auto alive = times.lock()) alive->reached_ns = now_ns();
            return Status::success;
          },
          std::move(order), true, &record->point);
      if (!ok(status)) return status;
    }
    const std::lock_guard lock(found->mutex);
    found->record = std::move(record);
    return Status::success;
  });
}

Status HostDriver::event_query(int device, EventHandle event) noexcept {
  return on_event(*machine_, device, event, [&](Device&, Event& found) {
    const std::shared_ptr<Record> record = record_of(found);
    if (record && !record->point.done()) return Status::not_ready;
    return machine_->device(found.device)->engine->fault.load();
  });
}

Status HostDriver::event_synchronize(int device, EventHandle event) noexcept {
  return on_event(*machine_, device, event, [&](Device&, Event& found) {
    if (const std::shared_ptr<Record> record = record_of(found)) record->point.wait();
    Device& owner = *machine_->device(found.device);
    const Status fault = owner.engine->fault.load();
    if (ok(fault)) machine_->settle_pools(owner);
    return fault;
  });
}

Status HostDriver::event_elapsed(int device, EventHandle start, EventHandle end,
                                 float* milliseconds) noexcept {
  return on_event(*machine_, device, start, [&](Device&, Event& first) {
    const std::shared_ptr<Event> last = machine_->events.find(end);
    if (!last || last->device != first.device || !first.flags.timing || !last->flags.timing)
      return Status::invalid_handle;
    const std::shared_ptr<Record> from = record_of(first), to = record_of(*last);
    if (!from || !to) return Status::invalid_handle;
    if (!from->point.done() || !to->point.done()) return Status::not_ready;
    const std::int64_t ns = to->reached_ns - from->reached_ns;
    *milliseconds = static_cast<float>(static_cast<double>(ns) * 1e-6);
    return Status::success;
  });
}

}  // namespace ringmem
