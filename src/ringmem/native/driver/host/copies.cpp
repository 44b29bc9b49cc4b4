// HostDriver: copies and fills. Arguments are checked here; addresses when the stream gets there.
#include <limits>

#include "driver/host/machine.hpp"
#include "driver/host/transfer.hpp"

namespace ringmem {

using host::Device;
using host::on_device;
using host::on_stream;
using host::Point;
using host::Stream;
using host::Transfer;

namespace {

constexpr std::uint64_t max_pitch = 0x7fffffff;                     // CUDA's
constexpr std::uint64_t snapshot_bytes = std::uint64_t{64} << 20;   // above, a copy is waited for

bool wraps(std::uint64_t ptr, std::uint64_t nbytes) noexcept {
  return nbytes > std::numeric_limits<std::uint64_t>::max() - ptr;
}

host::Requester copier(int device) noexcept {
  return {host::bit_of(device), host::everybody};  // engines reach any plain allocation
}

// The end of a pitched area relative to its start; false when it does not fit in an address.
bool extent_of(std::uint64_t ptr, std::uint64_t pitch, std::uint64_t width, std::uint64_t height) {
  std::uint64_t nbytes = 0;
  return !__builtin_mul_overflow(pitch, height - 1, &nbytes) &&
         !__builtin_add_overflow(nbytes, width, &nbytes) && !wraps(ptr, nbytes);
}

// A transfer that has to be over before the caller goes on: pageable memory takes part.
Status submit_and_wait(host::Machine& machine, Stream& stream, const Transfer& transfer) {
  auto outcome = std::make_shared<Status>(Status::unknown);
  Point point;
  const Status status = machine.submit(
      stream,
      [&table = machine.table, transfer, outcome] {
        *outcome = perform(table, transfer);
        // A bad host address is the caller's mistake, not the device's end.
        return *outcome == Status::illegal_address ? *outcome : Status::success;
      },
      {}, true, &point);
  if (!ok(status)) return status;
  point.wait();
  const Status fault = stream.engine().fault.load();
  return ok(fault) ? *outcome : fault;
}

Status submit_transfer(host::Machine& machine, Stream& stream, Transfer transfer) {
  const bool from_pageable = machine.table.is_pageable(transfer.src);
  const bool to_pageable = machine.table.is_pageable(transfer.dst);
  const bool small = transfer.width <= snapshot_bytes / transfer.height;
  if (to_pageable || (from_pageable && !small)) return submit_and_wait(machine, stream, transfer);
  if (from_pageable && !take_snapshot(&transfer)) return Status::invalid_value;
  return machine.submit(stream, [&table = machine.table, transfer = std::move(transfer)] {
    const Status status = perform(table, transfer);
    return ok(status) ? status : Status::illegal_address;
  });
}

}  // namespace

Status HostDriver::copy_async(int device, DevicePtr dst, DevicePtr src, std::size_t nbytes,
                              StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) -> Status {
    if (nbytes == 0) return Status::success;
    if (dst == 0 || src == 0 || wraps(dst, nbytes) || wraps(src, nbytes))
      return Status::invalid_value;
    const host::Requester who = copier(d.ordinal);
    return submit_transfer(*machine_, *queue, {dst, 0, src, 0, nbytes, 1, who, who, nullptr});
  });
}

Status HostDriver::copy_2d_async(int device, const Copy2D& copy, StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) -> Status {
    if (copy.width == 0 || copy.height == 0) return Status::success;
    if (copy.dst == 0 || copy.src == 0 || copy.width > copy.dst_pitch ||
        copy.width > copy.src_pitch || copy.dst_pitch > max_pitch || copy.src_pitch > max_pitch ||
        !extent_of(copy.dst, copy.dst_pitch, copy.width, copy.height) ||
        !extent_of(copy.src, copy.src_pitch, copy.width, copy.height))
      return Status::invalid_value;
    const host::Requester who = copier(d.ordinal);
    return submit_transfer(*machine_, *queue,
                           {copy.dst, copy.dst_pitch, copy.src, copy.src_pitch, copy.width,
                            copy.height, who, who, nullptr});
  });
}

Status HostDriver::copy_peer_async(int dst_device, DevicePtr dst, int src_device, DevicePtr src,
                                   std::size_t nbytes, StreamHandle stream) noexcept {
  return on_stream(*machine_, dst_device, stream, [&](Device&, const auto& queue) -> Status {
    Device* source = machine_->device(src_device);
    if (!source) return Status::invalid_device;
    if (const Status fault = source->engine->fault.load(); !ok(fault)) return fault;
    if (nbytes == 0) return Status::success;
    if (wraps(dst, nbytes) || wraps(src, nbytes) || machine_->table.is_pageable(dst) ||
        machine_->table.is_pageable(src))
      return Status::invalid_value;
    return submit_transfer(*machine_, *queue, {dst, 0, src, 0, nbytes, 1, copier(dst_device),
                                               copier(src_device), nullptr});
  });
}

Status HostDriver::fill_async(int device, DevicePtr ptr, std::uint32_t value, int value_bytes,
                              std::size_t count, StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) -> Status {
    if (value_bytes != 1 && value_bytes != 2 && value_bytes != 4) return Status::invalid_value;
    if (count == 0) return Status::success;
    const auto unit = static_cast<std::uint64_t>(value_bytes);
    if (ptr % unit != 0 || count > std::numeric_limits<std::uint64_t>::max() / unit ||
        wraps(ptr, count * unit) || machine_->table.is_pageable(ptr))
      return Status::invalid_value;
    const host::Fill fill{ptr, count * unit, value, value_bytes,
                          {host::bit_of(d.ordinal), d.reach.load()}};
    return machine_->submit(*queue,
                            [&table = machine_->table, fill] { return perform(table, fill); });
  });
}

}  // namespace ringmem
