#include "driver/host/heap.hpp"

#include <sys/mman.h>

#include <new>

#include "driver/host/process.hpp"

namespace ringmem::host {
namespace {

constexpr std::uint64_t small_bytes = 256 << 10;     // below this an allocation counts as small
constexpr std::uint64_t heap_alignment = 2 << 20;    // of the base, so that pool pages align

// An address range over `fd`, aligned; 0 on failure.
std::uint64_t map_file(int fd, std::uint64_t span) noexcept {
  void* reserved = mmap(nullptr, span + heap_alignment, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<std::uint64_t>(reserved);
  const std::uint64_t base = round_up(begin, heap_alignment);
  if (base > begin) munmap(reserved, base - begin);
  munmap(reinterpret_cast<void*>(base + span), begin + heap_alignment - base);
  if (mmap(reinterpret_cast<void*>(base), span, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(reinterpret_cast<void*>(base), span);
    return 0;
  }
  return base;
}

}  // namespace

Heap::Heap(Memfd file, std::uint64_t base, std::uint64_t span)
    : file_(std::move(file)),
      base_(base),
      span_(span),
      split_(round_down(span / 4, heap_alignment)),
      small_(0, split_),
      large_(split_, span) {}

Heap::~Heap() { munmap(reinterpret_cast<void*>(base_), span_); }

Status Heap::create(std::uint64_t span, std::unique_ptr<Heap>* heap) noexcept {
  Memfd file;
  const Status status = Memfd::create("ringmem-heap", span, &file);
  return ok(status) ? create_over(std::move(file), span, heap) : status;
}

Status Heap::create_over(Memfd file, std::uint64_t span, std::unique_ptr<Heap>* heap) noexcept {
  const std::uint64_t base = map_file(file.fd(), span);
  if (base == 0) return Status::out_of_memory;
  try {
    *heap = std::make_unique<Heap>(std::move(file), base, span);
  } catch (const std::bad_alloc&) {
    munmap(reinterpret_cast<void*>(base), span);
    return Status::out_of_memory;
  }
  return Status::success;
}

Status Heap::take(std::uint64_t nbytes, std::uint64_t align, std::uint64_t* ptr) {
  const std::lock_guard lock(mutex_);
  std::uint64_t offset = 0;
  const bool small = nbytes < small_bytes && align < small_bytes;
  if (!(small ? small_ : large_).take(nbytes, align, &offset) &&
      !(small ? large_ : small_).take(nbytes, align, &offset)) {
    return Status::out_of_memory;
  }
  *ptr = base_ + offset;
  return Status::success;
}

void Heap::give(std::uint64_t ptr, std::uint64_t nbytes) {
  const Extent given{ptr - base_, ptr - base_ + nbytes};
  // Whole pages go while they are still ours, with no lock held; the two at the ends may be shared
  // with a neighbour and go, if free, before anybody can take them.
  const std::uint64_t first = round_up(given.begin, page_bytes);
  const std::uint64_t last = round_down(given.end, page_bytes);
  if (first < last) file_.punch(first, last - first);
  const std::lock_guard lock(mutex_);
  const Extent free = space_of(given.begin).give(given);
  const std::uint64_t head = round_down(given.begin, page_bytes);
  const std::uint64_t tail = round_up(given.end, page_bytes);
  if (head < first && free.begin <= head && free.end >= first) file_.punch(head, page_bytes);
  if (last < tail && last >= first && free.begin <= last && free.end >= tail)
    file_.punch(last, page_bytes);
}

}  // namespace ringmem::host
