// Memory for the records of nodes and spans: chunks that are never given back before the store goes.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace ringmem::pool {

class Chunks {
 public:
  // A million records would miss the TLB at every free, so they lie in huge pages.
  static constexpr std::size_t huge_bytes = std::size_t{2} << 20;

  // `nbytes`: a power of two; the chunk is aligned to it.
  void* add(std::size_t nbytes) {
    chunks_.reserve(chunks_.size() + 1);
    void* chunk = std::aligned_alloc(nbytes, nbytes);
    if (!chunk) throw std::bad_alloc();
    if (nbytes >= huge_bytes) (void)madvise(chunk, nbytes, MADV_HUGEPAGE);
    chunks_.emplace_back(chunk);
    return chunk;
  }
  bool empty() const noexcept { return chunks_.empty(); }

 private:
  struct Free {
    void operator()(void* chunk) const noexcept { std::free(chunk); }
  };
  std::vector<std::unique_ptr<void, Free>> chunks_;
};

}  // namespace ringmem::pool
