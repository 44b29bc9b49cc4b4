#include "pool/small.hpp"

#include <new>

namespace ringmem::pool {

static_assert(sizeof(Span) % alignof(SmallBlock) == 0);

SpanStore::~SpanStore() {
  for (void* memory : memory_) std::free(memory);
}

Span* SpanStore::get(int size_class, Node* node) {
  const std::uint16_t count = span_count(size_class);
  Span* span = spare_[size_class];
  if (span) {
    spare_[size_class] = span->next;
  } else {
    memory_.push_back(nullptr);
    void* memory = std::malloc(sizeof(Span) + count * sizeof(SmallBlock));
    if (!memory) throw std::bad_alloc();
    memory_.back() = memory;
    span = new (memory) Span;
    for (std::uint16_t i = 0; i < count; ++i) new (span->blocks() + i) SmallBlock{0, 0, i};
  }
  span->node = node;
  span->base = node->ptr;
  span->prev = span->next = nullptr;
  span->block_bytes = static_cast<std::uint32_t>(small_class_bytes(size_class));
  span->count = count;
  span->free = 0;
  span->head = Span::none;
  span->size_class = static_cast<std::uint8_t>(size_class);
  for (std::uint16_t i = count; i-- > 0;) span->push(span->blocks() + i);
  return span;
}

void SpanStore::put(Span* span) noexcept {
  span->node = nullptr;
  span->base = 0;
  span->next = spare_[span->size_class];
  spare_[span->size_class] = span;
}

}  // namespace ringmem::pool
