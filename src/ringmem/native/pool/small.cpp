#include "pool/small.hpp"

#include <memory>
#include <new>
#include <utility>

namespace ringmem::pool {

static_assert(sizeof(Span) % alignof(SmallBlock) == 0);

void* SpanStore::carve(std::size_t nbytes) {
  nbytes = round_up(nbytes, 64);
  if (used_ + nbytes > Chunks::huge_bytes) {
    chunk_ = static_cast<char*>(chunks_.add(Chunks::huge_bytes));
    used_ = 0;
  }
  return chunk_ + std::exchange(used_, used_ + nbytes);
}

Span* SpanStore::get(int size_class, Node* node) {
  const std::uint16_t count = span_count(size_class);
  Span* span = spare_[size_class];
  if (span) {
    spare_[size_class] = span->next;
  } else {
    span = new (carve(sizeof(Span) + count * sizeof(SmallBlock))) Span;
    std::uninitialized_default_construct_n(span->blocks(), count);
  }
  span->node = node;
  span->base = node->ptr;
  span->prev = span->next = nullptr;
  span->block_bytes = static_cast<std::uint32_t>(small_class_bytes(size_class));
  span->count = span->present = count;
  span->free = 0;
  span->head = Span::none;
  span->size_class = static_cast<std::uint8_t>(size_class);
  for (std::uint32_t i = count; i-- > 0;) span->push(i);
  return span;
}

void SpanStore::put(Span* span) noexcept {
  span->node = nullptr;
  span->base = 0;
  span->next = spare_[span->size_class];
  spare_[span->size_class] = span;
}

}  // namespace ringmem::pool
