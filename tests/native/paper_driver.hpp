// A driver on paper: virtual memory, streams and events as bookkeeping, with no memory behind it and
// nothing asynchronous. It refuses what the CUDA driver refuses, adds up what calls would cost on
// an H200, and keeps vector clocks of the streams, so that a test can ask whether work is ordered.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "driver/driver.hpp"

namespace ringmem::testing {

class PaperDriver final : public Driver {
  static constexpr Status no = Status::not_supported;

 public:
  static constexpr std::size_t page = std::size_t{2} << 20;
  static constexpr int max_streams = 256;  // handles 0 … 255; 1 and 2 mean what they mean to CUDA
  using Clock = std::array<std::uint64_t, max_streams>;

  explicit PaperDriver(std::size_t capacity) : capacity_(capacity) {}

  // --- what tests ask -------------------------------------------------------------------------
  std::size_t unreleased() const { return unreleased_; }  // bytes in handles not released
  std::size_t used() const { return used_; }              // bytes in handles, mapped ones included
  std::size_t live_handles() const { return handles_.size(); }
  std::size_t live_mappings() const { return mappings_.size(); }
  std::size_t live_ranges() const { return ranges_.size(); }
  std::size_t live_events() const { return events_.size(); }
  std::uint64_t calls() const { return calls_; }
  double modelled_ns() const { return ns_; }
  // Names the physical memory behind an accessible address; 0 if there is none.
  std::uint64_t place_of(DevicePtr ptr) const {
    const std::lock_guard guard(mutex_);
    const auto after = mappings_.upper_bound(ptr);
    if (after == mappings_.begin()) {
      const auto chunk = chunks_.upper_bound(ptr);
      if (chunk == chunks_.begin()) return 0;
      return ptr < std::prev(chunk)->first + std::prev(chunk)->second ? ptr : 0;
    }
    const auto& [at, mapping] = *std::prev(after);
    if (ptr >= at + mapping.nbytes || !mapping.access) return 0;
    return (mapping.handle << 40) + (ptr - at);
  }
  // `stream` waits for what `other` has been given.
  void join(StreamHandle stream, StreamHandle other) {
    const std::lock_guard guard(mutex_);
    for (int s = 0; s < max_streams; ++s) {
      clocks_[stream][s] = std::max(clocks_[stream][s], clocks_[other][s]);
    }
  }
  // Events complete when the clock has moved on by `late` since they were recorded.
  void set_late(std::uint64_t late) { late_ = late; }
  void tick() { ++now_; }
  // One more piece of work on a stream; returns its number.
  std::uint64_t submit(StreamHandle stream) {
    const std::lock_guard guard(mutex_);
    return ++clocks_[stream][stream];
  }
  // Whether work given to `stream` now runs after work number `number` of `other`.
  bool ordered(StreamHandle stream, StreamHandle other, std::uint64_t number) const {
    const std::lock_guard guard(mutex_);
    return clocks_[stream][other] >= number || done_[other] >= number;
  }
  void break_stream(StreamHandle stream) { broken_[stream] = true; }

  // --- devices --------------------------------------------------------------------------------
  const char* platform() const noexcept override { return "paper"; }
  Status device_count(int* count) noexcept override { return *count = 1, Status::success; }
  Status driver_version(int* version) noexcept override { return *version = 13000, Status::success; }
  Status device_info(int, DeviceInfo*) noexcept override { return no; }
  Status attribute(int, Attribute attribute, int* value) noexcept override {
    *value = attribute == Attribute::virtual_memory_management && vmm ? 1 : 0;
    return Status::success;
  }
  Status memory_info(int, MemoryInfo* info) noexcept override {
    const std::lock_guard guard(mutex_);
    *info = {capacity_ - used_, capacity_};
    return Status::success;
  }
  Status synchronize(int) noexcept override {
    const std::lock_guard guard(mutex_);
    now_ += late_;
    for (int s = 0; s < max_streams; ++s) done_[s] = clocks_[s][s];
    ++synchronizations;
    return Status::success;
  }
  Status relax_capture(bool, bool* previous) noexcept override {
    return *previous = false, Status::success;
  }

  // --- memory ---------------------------------------------------------------------------------
  Status mem_alloc(int, std::size_t nbytes, DevicePtr* ptr) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(30e3 + 0.25 * static_cast<double>(nbytes >> 20) * 1e3);
    if (used_ + nbytes > capacity_) return Status::out_of_memory;
    used_ += nbytes;
    unreleased_ += nbytes;
    *ptr = next_address_;
    chunks_[*ptr] = nbytes;
    next_address_ += (nbytes + page - 1) / page * page + page;
    return Status::success;
  }
  Status mem_free(int, DevicePtr ptr) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(30e3);
    const auto chunk = chunks_.find(ptr);
    if (chunk == chunks_.end()) return Status::invalid_value;
    used_ -= chunk->second;
    unreleased_ -= chunk->second;
    chunks_.erase(chunk);
    return Status::success;
  }
  Status granularity(const PhysicalProps&, bool, std::size_t* nbytes) noexcept override {
    return *nbytes = page, Status::success;
  }
  Status address_reserve(std::size_t nbytes, std::size_t, DevicePtr, DevicePtr* ptr) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(2000);
    if (nbytes == 0 || nbytes % page) return Status::invalid_value;
    *ptr = next_address_;
    ranges_[*ptr] = nbytes;
    next_address_ += nbytes + page;
    return Status::success;
  }
  Status address_free(DevicePtr ptr, std::size_t nbytes) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(2000);
    const auto range = ranges_.find(ptr);
    if (range == ranges_.end() || range->second != nbytes) return Status::invalid_value;
    const auto mapping = mappings_.lower_bound(ptr);
    if (mapping != mappings_.end() && mapping->first < ptr + nbytes) return Status::invalid_value;
    ranges_.erase(range);
    return Status::success;
  }
  Status mem_create(std::size_t nbytes, const PhysicalProps&, PhysicalHandle* handle) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(7600 + 11 * static_cast<double>(nbytes >> 20));
    if (nbytes == 0 || nbytes % page) return Status::invalid_value;
    if (used_ + nbytes > capacity_) return Status::out_of_memory;
    used_ += nbytes;
    unreleased_ += nbytes;
    *handle = ++next_handle_;
    handles_[*handle] = {nbytes, 0, false};
    return Status::success;
  }
  Status mem_release(PhysicalHandle handle) noexcept override {
    const std::lock_guard guard(mutex_);
    const auto found = handles_.find(handle);
    if (found == handles_.end() || found->second.released) return Status::invalid_value;
    charge(9600 + 270 * static_cast<double>(found->second.nbytes >> 20));
    found->second.released = true;
    unreleased_ -= found->second.nbytes;
    drop(found);
    return Status::success;
  }
  Status mem_map(DevicePtr ptr, std::size_t nbytes, PhysicalHandle handle) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(600);
    const auto found = handles_.find(handle);
    if (found == handles_.end() || found->second.released) return Status::invalid_value;
    if (found->second.nbytes != nbytes || ptr % page) return Status::invalid_value;
    const auto range = ranges_.upper_bound(ptr);
    if (range == ranges_.begin()) return Status::invalid_value;
    const auto& [base, length] = *std::prev(range);
    if (ptr + nbytes > base + length) return Status::invalid_value;
    if (overlaps(ptr, nbytes)) return Status::already_mapped;
    mappings_[ptr] = {nbytes, handle, false};
    ++found->second.mapped;
    return Status::success;
  }
  Status mem_unmap(DevicePtr ptr, std::size_t nbytes) noexcept override {
    const std::lock_guard guard(mutex_);
    DevicePtr at = ptr;
    for (auto m = mappings_.find(ptr); at < ptr + nbytes; ++m) {
      if (m == mappings_.end() || m->first != at) return Status::invalid_value;
      at += m->second.nbytes;
    }
    if (at != ptr + nbytes) return Status::invalid_value;
    for (at = ptr; at < ptr + nbytes;) {
      const auto m = mappings_.find(at);
      charge(14e3 + 100 * static_cast<double>(m->second.nbytes >> 20));
      at += m->second.nbytes;
      const auto found = handles_.find(m->second.handle);
      --found->second.mapped;
      mappings_.erase(m);
      drop(found);
    }
    return Status::success;
  }
  Status mem_set_access(DevicePtr ptr, std::size_t nbytes, const AccessGrant*,
                        std::size_t) noexcept override {
    const std::lock_guard guard(mutex_);
    DevicePtr at = ptr;
    for (auto m = mappings_.find(ptr); at < ptr + nbytes; ++m) {
      if (m == mappings_.end() || m->first != at) return Status::invalid_value;
      charge(20e3 + 40 * static_cast<double>(m->second.nbytes >> 20));
      m->second.access = true;
      at += m->second.nbytes;
    }
    return at == ptr + nbytes ? Status::success : Status::invalid_value;
  }
  Status copy_async(int, DevicePtr, DevicePtr, std::size_t, StreamHandle) noexcept override {
    return charge(2000), Status::success;
  }
  Status fill_async(int, DevicePtr, std::uint32_t, int, std::size_t, StreamHandle) noexcept override {
    return charge(2000), Status::success;
  }

  // --- streams and events ---------------------------------------------------------------------
  Status stream_create(int, StreamFlags, StreamHandle*) noexcept override { return no; }
  Status stream_destroy(int, StreamHandle) noexcept override { return no; }
  Status stream_query(int, StreamHandle) noexcept override { return Status::success; }
  Status stream_synchronize(int, StreamHandle stream) noexcept override {
    const std::lock_guard guard(mutex_);
    done_[stream] = clocks_[stream][stream];
    return Status::success;
  }
  Status stream_wait_event(int, StreamHandle stream, EventHandle event) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(400);
    const auto found = events_.find(event);
    if (found == events_.end() || broken_[stream]) return Status::invalid_handle;
    for (int s = 0; s < max_streams; ++s) {
      clocks_[stream][s] = std::max(clocks_[stream][s], found->second.clock[s]);
    }
    return Status::success;
  }
  Status event_create(int, EventFlags, EventHandle* event) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(300);
    *event = ++next_handle_;
    events_[*event] = {};
    return Status::success;
  }
  Status event_destroy(int, EventHandle event) noexcept override {
    const std::lock_guard guard(mutex_);
    return events_.erase(event) ? Status::success : Status::invalid_handle;
  }
  Status event_record(int, EventHandle event, StreamHandle stream) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(600);
    if (!events_.count(event) || broken_[stream]) return Status::invalid_handle;
    events_[event] = {clocks_[stream], now_ + late_};
    return Status::success;
  }
  Status event_query(int, EventHandle event) noexcept override {
    const std::lock_guard guard(mutex_);
    charge(300);
    const auto found = events_.find(event);
    if (found == events_.end()) return Status::invalid_handle;
    if (found->second.done_at > now_) return Status::not_ready;
    finish(found->second);
    return Status::success;
  }
  Status event_synchronize(int, EventHandle event) noexcept override {
    const std::lock_guard guard(mutex_);
    const auto found = events_.find(event);
    if (found == events_.end()) return Status::invalid_handle;
    now_ = std::max(now_, found->second.done_at);
    ++synchronizations;
    finish(found->second);
    return Status::success;
  }

  // --- not on paper ---------------------------------------------------------------------------
  Status primary_context(int, std::uint64_t*) noexcept override { return no; }
  Status host_alloc(int, std::size_t, HostFlags, void**) noexcept override { return no; }
  Status host_free(int, void*) noexcept override { return no; }
  Status host_register(int, void*, std::size_t, HostFlags) noexcept override { return no; }
  Status host_unregister(int, void*) noexcept override { return no; }
  Status host_device_pointer(int, void*, DevicePtr*) noexcept override { return no; }
  Status pointer_info(int, DevicePtr, PointerInfo*) noexcept override { return no; }
  Status managed_alloc(int, std::size_t, ManagedAttach, DevicePtr*) noexcept override { return no; }
  Status stream_attach(int, StreamHandle, DevicePtr, std::size_t,
      ManagedAttach) noexcept override { return no; }
  Status prefetch(int, DevicePtr, std::size_t, Location,
      StreamHandle) noexcept override { return no; }
  Status advise(int, DevicePtr, std::size_t, Advice, Location) noexcept override { return no; }
  Status discard(int, DevicePtr, std::size_t, StreamHandle) noexcept override { return no; }
  Status mem_alloc_async(int, std::size_t, StreamHandle,
      DevicePtr*) noexcept override { return no; }
  Status mem_free_async(int, DevicePtr, StreamHandle) noexcept override { return no; }
  Status pool_create(int, const PoolProps&, PoolHandle*) noexcept override { return no; }
  Status pool_destroy(int, PoolHandle) noexcept override { return no; }
  Status pool_default(int, PoolHandle*) noexcept override { return no; }
  Status pool_current(int, PoolHandle*) noexcept override { return no; }
  Status pool_set_current(int, PoolHandle) noexcept override { return no; }
  Status pool_alloc_async(int, PoolHandle, std::size_t, StreamHandle,
      DevicePtr*) noexcept override { return no; }
  Status pool_trim(int, PoolHandle, std::size_t) noexcept override { return no; }
  Status pool_get(int, PoolHandle, PoolAttribute, std::uint64_t*) noexcept override { return no; }
  Status pool_set(int, PoolHandle, PoolAttribute, std::uint64_t) noexcept override { return no; }
  Status pool_set_access(int, PoolHandle, const AccessGrant*,
      std::size_t) noexcept override { return no; }
  Status pool_get_access(int, PoolHandle, Location, Access*) noexcept override { return no; }
  Status pool_export(int, PoolHandle, int*) noexcept override { return no; }
  Status pool_import(int, int, PoolHandle*) noexcept override { return no; }
  Status pool_export_pointer(int, DevicePtr, PoolPointerExport*) noexcept override { return no; }
  Status pool_import_pointer(int, PoolHandle, const PoolPointerExport&,
      DevicePtr*) noexcept override { return no; }
  Status mem_get_access(DevicePtr, Location, Access*) noexcept override { return no; }
  Status mem_export(PhysicalHandle, int*) noexcept override { return no; }
  Status mem_import(int, PhysicalHandle*) noexcept override { return no; }
  Status mem_retain(DevicePtr, PhysicalHandle*) noexcept override { return no; }
  Status copy_2d_async(int, const Copy2D&, StreamHandle) noexcept override { return no; }
  Status copy_peer_async(int, DevicePtr, int, DevicePtr, std::size_t,
      StreamHandle) noexcept override { return no; }
  Status stream_device(StreamHandle, int*) noexcept override { return no; }
  Status stream_capturing(int, StreamHandle, bool* capturing) noexcept override {
    return *capturing = false, Status::success;
  }
  Status stream_wait_value(int, StreamHandle, DevicePtr,
      std::uint32_t) noexcept override { return no; }
  Status stream_write_value(int, StreamHandle, DevicePtr,
      std::uint32_t) noexcept override { return no; }
  Status launch_host_function(int, StreamHandle, HostFunction,
      void*) noexcept override { return no; }
  Status event_elapsed(int, EventHandle, EventHandle, float*) noexcept override { return no; }
  Status peer_can_access(int, int, bool*) noexcept override { return no; }
  Status peer_enable(int, int) noexcept override { return no; }
  Status peer_disable(int, int) noexcept override { return no; }

  bool vmm = true;
  std::uint64_t synchronizations = 0;  // times the host would have waited

 private:
  struct Handle {
    std::size_t nbytes;
    int mapped;
    bool released;
  };
  struct Mapping {
    std::size_t nbytes;
    PhysicalHandle handle;
    bool access;
  };
  struct Event {
    Clock clock{};
    std::uint64_t done_at = 0;
  };
  using Handles = std::unordered_map<PhysicalHandle, Handle>;

  void charge(double ns) {
    ++calls_;
    ns_ += ns;
  }
  void drop(Handles::iterator found) {
    if (!found->second.released || found->second.mapped) return;
    used_ -= found->second.nbytes;
    handles_.erase(found);
  }
  void finish(const Event& event) {
    for (int s = 0; s < max_streams; ++s) done_[s] = std::max(done_[s], event.clock[s]);
  }
  bool overlaps(DevicePtr ptr, std::size_t nbytes) const {
    const auto after = mappings_.lower_bound(ptr);
    if (after != mappings_.end() && after->first < ptr + nbytes) return true;
    return after != mappings_.begin() && std::prev(after)->first + std::prev(after)->second.nbytes > ptr;
  }
  mutable std::mutex mutex_;
  const std::size_t capacity_;
  std::size_t used_ = 0;
  std::size_t unreleased_ = 0;
  std::uint64_t calls_ = 0;
  double ns_ = 0;
  std::uint64_t now_ = 0;
  std::uint64_t late_ = 0;
  DevicePtr next_address_ = std::uint64_t{1} << 40;
  std::uint64_t next_handle_ = 0;
  std::map<DevicePtr, std::size_t> ranges_;
  std::map<DevicePtr, std::size_t> chunks_;
  std::map<DevicePtr, Mapping> mappings_;
  Handles handles_;
  std::unordered_map<EventHandle, Event> events_;
  std::array<Clock, max_streams> clocks_{};
  Clock done_{};
  std::array<bool, max_streams> broken_{};
};

}  // namespace ringmem::testing
