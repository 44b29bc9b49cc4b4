// One reserved mapping over a sparse file, handed out in pieces: plain allocations, pools, pinned
// and managed memory. Pages that are given back leave the file.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "driver/host/extents.hpp"
#include "driver/host/memfd.hpp"

namespace ringmem::host {

// Bytes of one memory, counted apart from where they lie.
class Budget {
 public:
  explicit Budget(std::uint64_t limit) : limit_(limit) {}

  bool charge(std::uint64_t nbytes) noexcept {
    std::uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (nbytes > limit_ - used) return false;
    } while (!used_.compare_exchange_weak(used, used + nbytes, std::memory_order_relaxed));
    return true;
  }
  void release(std::uint64_t nbytes) noexcept {
    used_.fetch_sub(nbytes, std::memory_order_relaxed);
  }
  std::uint64_t limit() const noexcept { return limit_; }
  std::uint64_t free() const noexcept { return limit_ - used_.load(std::memory_order_relaxed); }

 private:
  const std::uint64_t limit_;
  std::atomic<std::uint64_t> used_{0};
};

class Heap {
 public:
  static constexpr std::uint64_t alignment = 512;  // of every allocation, as CUDA's

  Heap(Memfd file, std::uint64_t base, std::uint64_t span);
  ~Heap();  // unmaps: nobody may be using it
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Reserves `span` bytes of addresses (more than will ever be live, so that their fragmentation
  // does not matter) over a file of its own, or over one that is given.
  static Status create(std::uint64_t span, std::unique_ptr<Heap>* heap) noexcept;
  static Status create_over(Memfd file, std::uint64_t span, std::unique_ptr<Heap>* heap) noexcept;

  // A multiple of `alignment` bytes.
  Status take(std::uint64_t nbytes, std::uint64_t align, std::uint64_t* ptr);
  void give(std::uint64_t ptr, std::uint64_t nbytes);

  std::uint64_t base() const noexcept { return base_; }
  std::uint64_t span() const noexcept { return span_; }
  const Memfd& file() const noexcept { return file_; }

 private:
  Extents& space_of(std::uint64_t offset) noexcept { return offset < split_ ? small_ : large_; }

  Memfd file_;
  const std::uint64_t base_;
  const std::uint64_t span_;
  const std::uint64_t split_;  // small allocations below, so that they do not break up the rest
  std::mutex mutex_;           // guards both
  Extents small_;
  Extents large_;
};

}  // namespace ringmem::host
