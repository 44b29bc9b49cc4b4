#include "driver/host/transfer.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "driver/host/process.hpp"

namespace ringmem::host {
namespace {

constexpr std::uint64_t part_bytes = 4 << 20;  // what an unmap may have to wait for

using Kind = Resolved::Kind;

void* pointer(std::uint64_t address) noexcept { return reinterpret_cast<void*>(address); }

Resolved resolve_source(const PageTable& table, const Transfer& transfer, std::uint64_t src,
                        std::uint64_t nbytes) noexcept {
  if (!transfer.snapshot) return table.resolve(src, nbytes, transfer.reader, false);
  Resolved ours;
  ours.kind = Kind::covered;
  ours.nbytes = nbytes;
  return ours;
}

Status copy_row(const PageTable& table, const Transfer& transfer, std::uint64_t dst,
                std::uint64_t src) noexcept {
  for (std::uint64_t left = transfer.width; left > 0;) {
    const std::uint64_t wanted = std::min(left, part_bytes);
    const Resolved to = table.resolve(dst, wanted, transfer.writer, true);
    const Resolved from = resolve_source(table, transfer, src, wanted);
    if (to.kind == Kind::illegal || from.kind == Kind::illegal) return Status::illegal_address;
    const std::uint64_t nbytes = std::min(to.nbytes, from.nbytes);
    const bool pageable = to.kind == Kind::pageable || from.kind == Kind::pageable;
    if (!pageable && !to.vanishing && !from.vanishing) {
      std::memmove(pointer(dst), pointer(src), nbytes);
    } else if (!safe_copy(pointer(dst), pointer(src), nbytes)) {
      return pageable ? Status::invalid_value : Status::illegal_address;
    }
    dst += nbytes;
    src += nbytes;
    left -= nbytes;
  }
  return Status::success;
}

template <class Value>
void fill_with(void* at, std::uint32_t value, std::uint64_t nbytes) noexcept {
  auto* first = static_cast<Value*>(at);
  std::fill(first, first + nbytes / sizeof(Value), static_cast<Value>(value));
}

void fill_memory(void* at, const Fill& fill, std::uint64_t nbytes) noexcept {
  if (fill.value_bytes == 1) {
    std::memset(at, static_cast<int>(fill.value & 0xff), nbytes);
  } else if (fill.value_bytes == 2) {
    fill_with<std::uint16_t>(at, fill.value, nbytes);
  } else {
    fill_with<std::uint32_t>(at, fill.value, nbytes);
  }
}

bool fill_vanishing(std::uint64_t at, const Fill& fill, std::uint64_t nbytes) noexcept {
  alignas(16) unsigned char pattern[16384];
  fill_memory(pattern, fill, std::min<std::uint64_t>(nbytes, sizeof pattern));
  for (std::uint64_t done = 0; done < nbytes; done += sizeof pattern) {
    const std::uint64_t part = std::min<std::uint64_t>(nbytes - done, sizeof pattern);
    if (!safe_copy(pointer(at + done), pattern, part)) return false;
  }
  return true;
}

}  // namespace

Status perform(const PageTable& table, const Transfer& transfer) noexcept {
  for (std::uint64_t row = 0; row < transfer.height; ++row) {
    const Status status = copy_row(table, transfer, transfer.dst + row * transfer.dst_pitch,
                                   transfer.src + row * transfer.src_pitch);
    if (!ok(status)) return status;
  }
  return Status::success;
}

bool take_snapshot(Transfer* transfer) {
  const std::uint64_t width = transfer->width;
  std::shared_ptr<unsigned char[]> copy(new unsigned char[width * transfer->height]);
  for (std::uint64_t row = 0; row < transfer->height; ++row) {
    if (!safe_copy(copy.get() + row * width, pointer(transfer->src + row * transfer->src_pitch),
                   width))
      return false;
  }
  transfer->src = reinterpret_cast<std::uint64_t>(copy.get());
  transfer->src_pitch = width;
  transfer->snapshot = std::move(copy);
  return true;
}

Status perform(const PageTable& table, const Fill& fill) noexcept {
  std::uint64_t at = fill.ptr;
  const auto unit = static_cast<std::uint64_t>(fill.value_bytes);
  for (std::uint64_t left = fill.nbytes; left > 0;) {
    const Resolved to = table.resolve(at, std::min(left, part_bytes), fill.writer, true);
    const std::uint64_t nbytes = to.nbytes / unit * unit;
    if (to.kind != Kind::covered || nbytes == 0) return Status::illegal_address;
    if (!to.vanishing) {
      fill_memory(pointer(at), fill, nbytes);
    } else if (!fill_vanishing(at, fill, nbytes)) {
      return Status::illegal_address;
    }
    at += nbytes;
    left -= nbytes;
  }
  return Status::success;
}

Status load_word(const PageTable& table, std::uint64_t ptr, const Requester& who,
                 std::uint32_t* value) noexcept {
  const Resolved from = table.resolve(ptr, sizeof *value, who, false);
  if (from.kind != Kind::covered || from.nbytes < sizeof *value) return Status::illegal_address;
  if (from.vanishing)
    return safe_copy(value, pointer(ptr), sizeof *value) ? Status::success
                                                         : Status::illegal_address;
  auto& word = *static_cast<std::uint32_t*>(pointer(ptr));
  *value = std::atomic_ref<std::uint32_t>(word).load(std::memory_order_acquire);
  return Status::success;
}

Status store_word(const PageTable& table, std::uint64_t ptr, const Requester& who,
                  std::uint32_t value) noexcept {
  const Resolved to = table.resolve(ptr, sizeof value, who, true);
  if (to.kind != Kind::covered || to.nbytes < sizeof value) return Status::illegal_address;
  if (to.vanishing)
    return safe_copy(pointer(ptr), &value, sizeof value) ? Status::success
                                                         : Status::illegal_address;
  auto& word = *static_cast<std::uint32_t*>(pointer(ptr));
  std::atomic_ref<std::uint32_t>(word).store(value, std::memory_order_release);
  return Status::success;
}

}  // namespace ringmem::host
