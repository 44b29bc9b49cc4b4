// Tables from numbers to objects. A number is never used twice in a process, so that one of a
// destroyed object, or of another driver, is recognized.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ringmem::host {

enum class HandleKind : std::uint64_t { stream = 1, event = 2, pool = 3, physical = 4 };

// kind (4 bits) | generation (28 bits) | index (32 bits).
inline std::uint64_t make_handle(HandleKind kind, std::uint32_t index) noexcept {
  static std::atomic<std::uint64_t> generation{1};
  const std::uint64_t now = generation.fetch_add(1, std::memory_order_relaxed) & 0xfffffff;
  return static_cast<std::uint64_t>(kind) << 60 | now << 32 | index;
}

template <class T>
class HandleTable {
 public:
  explicit HandleTable(HandleKind kind) : kind_(kind) {}

  std::uint64_t insert(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      free_.reserve(slots_.size() + 1);  // so that erase() cannot fail
      slots_.emplace_back();
      free_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    slots_[index] = {make_handle(kind_, index), std::move(object)};
    return slots_[index].handle;
  }

  std::shared_ptr<T> find(std::uint64_t handle) const noexcept {
    const std::lock_guard lock(mutex_);
    const Slot* slot = slot_of(handle);
    return slot ? slot->object : nullptr;
  }

  std::shared_ptr<T> erase(std::uint64_t handle) noexcept {
    const std::lock_guard lock(mutex_);
    auto* slot = const_cast<Slot*>(slot_of(handle));
    if (!slot) return nullptr;
    std::shared_ptr<T> object = std::move(slot->object);
    *slot = {};
    free_.push_back(static_cast<std::uint32_t>(handle));
    return object;
  }

 private:
  struct Slot {
    std::uint64_t handle = 0;
    std::shared_ptr<T> object;
  };

  const Slot* slot_of(std::uint64_t handle) const noexcept {
    const auto index = static_cast<std::uint32_t>(handle);
    if (handle == 0 || index >= slots_.size() || slots_[index].handle != handle) return nullptr;
    return &slots_[index];
  }

  HandleKind kind_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
};

}  // namespace ringmem::host
