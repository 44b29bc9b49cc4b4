// The fast paths of the pool, and what they have in common.
#include "pool/pool.hpp"

#include <bit>

#include "pool/debug.hpp"

namespace ringmem {

using namespace pool;

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr std::size_t medium_limit = std::size_t{1} << 20;     // larger blocks: the large space
constexpr std::size_t largest_request = std::size_t{1} << 40;  // bytes
constexpr std::size_t largest_alignment = std::size_t{1} << 30;

[[noreturn]] void refuse_size(std::size_t nbytes) {
  throw InvalidValue("nbytes is " + std::to_string(nbytes) + ": give 1 to 2**40 bytes");
}

}  // namespace

Pool::Pool(DriverRef driver, int device, PoolOptions options)
    : driver_(std::move(driver)),
      device_(device),
      options_(std::move(options)),
      generation_((BiasedLock::prepare(), fork_generation())),
      gate_(generation_),
      threshold_(options_.release_threshold),
      streams_(*driver_, device),
      heap_(streams_),
      pages_(*driver_, device, options_, streams_, heap_) {
  check_limit(options_.limit);
  if (options_.debug) debug_ = std::make_unique<DebugAllocator>(*this);
}

Allocator& Pool::front() noexcept {
  return debug_ ? static_cast<Allocator&>(*debug_) : *this;
}

void Pool::check_process(const char* operation) const {
  if (foreign()) {
    throw DriverError(refused_in_child(), operation,
                      "the pool belongs to the parent");
  }
}

void Pool::check_open() const {
  check_process("Pool.allocate");
  if (closed()) throw Closed("the pool is closed");
}

// --- allocate ------------------------------------------------------------------------------------

// The block freed last on this stream, if it has the size. Everything that is not on the way of a
// hit is a call of its own: the registers it would need are then not saved here.
inline Pool::Parked Pool::take_parked(std::size_t nbytes, Shard& shard, Block* block) noexcept {
  const BiasedGuard guard(shard.lock);
  Node* node = shard.parked;
  if (!node) return Parked::none;
  if (node->units != (nbytes + unit_bytes - 1) / unit_bytes) return Parked::other;
  shard.parked = nullptr;
  node->requested = nbytes;
  node->tag = {0, shard.changes};
  node->become(NodeState::live);
  shard.count_allocation(nbytes, node->nbytes(), levels_);
  *block = {address(node), nbytes, node};
  return Parked::taken;
}

bool Pool::try_allocate(std::size_t nbytes, StreamHandle stream, Block* block) noexcept {
  if (gate_.load(relaxed) != fork_generation()) [[unlikely]] return false;
  const int slot = streams_.slot_of(stream);
  if (slot == StreamOrder::shared_slot || nbytes - 1 >= largest_request) [[unlikely]] return false;
  Shard& shard = shards_[static_cast<std::size_t>(slot)];
  if (options_.policy != PoolPolicy::best_fit) [[unlikely]] return try_binned(nbytes, slot, block);
  if (nbytes <= small_limit) return pop_small(nbytes, small_class(nbytes), shard, block);
  const Parked parked = take_parked(nbytes, shard, block);
  if (parked == Parked::taken) [[likely]] return true;
  return try_free_node(nbytes, slot, stream, parked == Parked::other, block);
}

bool Pool::try_binned(std::size_t nbytes, int slot, Block* block) noexcept {
  Node* node = take_binned(units_for(nbytes), shards_[static_cast<std::size_t>(slot)]);
  if (node) *block = finish(node, nbytes, slot);
  return node != nullptr;
}

// What is parked has another size: it goes back to the heap first, where it may be part of the best
// fit.
void Pool::unpark(Shard& shard) noexcept {
  Node* parked = nullptr;
  {
    const BiasedGuard guard(shard.lock);
    parked = std::exchange(shard.parked, nullptr);
    if (!parked) return;
    ++shard.changes;
    shard.settle(levels_);
  }
  give_back(parked, parked->tag);
}

bool Pool::try_free_node(std::size_t nbytes, int slot, StreamHandle stream, bool parked,
                         Block* block) noexcept {
  if (parked) unpark(shards_[static_cast<std::size_t>(slot)]);
  Space& space = nbytes < medium_limit ? heap_.medium : heap_.large;
  Node* node = search({&space, units_for(nbytes), 0, slot, stream});
  if (!node) return false;
  if (!streams_.ordered(slot, node->tag)) [[unlikely]] {  // would take a driver call
    give_back(node, node->tag);
    return false;
  }
  *block = finish(node, nbytes, slot);
  return true;
}

Block Pool::allocate(std::size_t nbytes, StreamHandle stream) {
  Block block;
  if (try_allocate(nbytes, stream, &block)) return block;
  check_open();
  if (nbytes - 1 >= largest_request) refuse_size(nbytes);
  const int slot = streams_.slot_of(stream);
  if (nbytes <= small_limit && slot != StreamOrder::shared_slot &&
      options_.policy == PoolPolicy::best_fit) {
    return allocate_small(nbytes, slot, stream);
  }
  return allocate_slow(nbytes, 0, slot, stream);
}

Block Pool::allocate(std::size_t nbytes, StreamHandle stream, std::size_t alignment) {
  if (!std::has_single_bit(alignment) || alignment > largest_alignment) {
    throw InvalidValue("alignment is " + std::to_string(alignment) +
                       ": give a power of two up to 2**30");
  }
  if (alignment <= small_step) return allocate(nbytes, stream);
  check_open();
  if (nbytes - 1 >= largest_request) refuse_size(nbytes);
  if (chunked()) {
    throw DriverError(Status::not_supported, "Pool.allocate",
                      "alignment beyond 256 bytes needs a device with virtual memory");
  }
  return allocate_slow(nbytes, alignment, streams_.slot_of(stream), stream);
}

Block Pool::allocate_slow(std::size_t nbytes, std::size_t alignment, int slot,
                          StreamHandle stream) {
  Space& space = nbytes < medium_limit ? heap_.medium : heap_.large;
  return finish(obtain({&space, units_for(nbytes), alignment, slot, stream}), nbytes, slot);
}

// A live node becomes the user's.
Block Pool::finish(Node* node, std::size_t nbytes, int slot) noexcept {
  Shard& shard = shards_[slot];
  const BiasedGuard guard(shard.lock);
  node->requested = nbytes;
  node->home.store(static_cast<std::uint8_t>(slot), relaxed);
  node->tag = {0, ++shard.changes};
  shard.count_allocation(nbytes, node->nbytes(), levels_);
  return {address(node), nbytes, node};
}

// --- deallocate ----------------------------------------------------------------------------------

Status Pool::deallocate(const Block& block, StreamHandle stream) noexcept {
  if (foreign()) [[unlikely]] return refused_in_child();
  if (!block.record) [[unlikely]] return Status::illegal_state;
  if (SmallRef::is(block.record)) return deallocate_small(block, stream);
  Node* node = static_cast<Node*>(block.record);
  const int slot = streams_.slot_of(stream);
  const int home = node->home.load(relaxed);
  Shard& shard = shards_[home];
  shard.lock.lock();
  if (!node->is(NodeState::live) || address(node) != block.ptr || node->home.load(relaxed) != home)
      [[unlikely]] {
    shard.lock.unlock();
    return Status::illegal_state;
  }
  shard.count_free(node->requested, node->nbytes());
  const std::uint64_t others = node->tag.mask;
  constexpr std::uint64_t slotless = std::uint64_t{1} << StreamOrder::shared_slot;
  if (slot == StreamOrder::shared_slot || (others & slotless)) [[unlikely]] {
    return deallocate_slotless(shard, node, slot, stream);
  }
  const bool own = slot == home && others == 0;
  if (own && options_.policy != PoolPolicy::best_fit) [[unlikely]] {
    return deallocate_binned(shard, node, streams_.stamp(slot));
  }
  if (!own || node->tag.seq != shard.changes) {
    return deallocate_to_heap(shard, node, streams_.stamp(slot, others));
  }
  node->tag = streams_.stamp(slot);
  node->become(NodeState::parked);
  Node* leaving = std::exchange(shard.parked, node);
  shard.lock.unlock();
  if (leaving) [[unlikely]] give_back(leaving, leaving->tag);
  after_free();
  return Status::success;
}

// Something happened on the stream since the block was allocated, or other streams used it. Entered
// with the shard's lock, which it gives up; so are the next two.
Status Pool::deallocate_to_heap(Shard& shard, Node* node, Tag tag) noexcept {
  node->become(NodeState::busy);
  Node* leaving = std::exchange(shard.parked, nullptr);
  ++shard.changes;
  shard.settle(levels_);
  shard.lock.unlock();
  if (leaving) give_back(leaving, leaving->tag);
  give_back(node, tag);
  after_free();
  return Status::success;
}

Status Pool::deallocate_binned(Shard& shard, Node* node, Tag tag) noexcept {
  node->tag = tag;
  node->become(NodeState::parked);
  shard.bins[node->units].push_back(node);
  shard.lock.unlock();
  after_free();
  return Status::success;
}

// A stream without a slot of its own has a part in it: events are recorded now.
Status Pool::deallocate_slotless(Shard& shard, Node* node, int slot,
                                 StreamHandle stream) noexcept {
  node->become(NodeState::busy);
  std::vector<StreamHandle> users;
  if (const auto entry = shard.slotless.find(node); entry != shard.slotless.end()) {
    users = std::move(entry->second);
    shard.slotless.erase(entry);
  }
  shard.lock.unlock();
  give_back(node, stamp_slotless(slot, stream, node->tag.mask, users));
  after_free();
  return Status::success;
}

Tag Pool::stamp_slotless(int slot, StreamHandle stream, std::uint64_t others,
                         const std::vector<StreamHandle>& users) noexcept {
  const bool slotless = slot == StreamOrder::shared_slot;
  if (!slotless && users.empty()) return streams_.stamp(slot, others);
  if (!slotless) others |= std::uint64_t{1} << slot;
  Tag tag;  // the last one's: it is the latest, and of the same streams
  for (const StreamHandle user : users) (void)streams_.stamp_shared(user, others, &tag);
  if (slotless) (void)streams_.stamp_shared(stream, others, &tag);
  return tag;
}

void Pool::trim_after_free() noexcept {
  const std::size_t threshold = threshold_.load(relaxed);
  try {
    if (closed()) {
      if (live_count() == 0) (void)trim(0);
    } else if (reserved() > threshold && reserved() - live_bytes() > threshold) {
      (void)trim(threshold);
    }
  } catch (...) {  // the memory stays cached, which is always allowed
  }
}

void Pool::give_back(Node* node, Tag tag) noexcept {
  const BiasedGuard guard(heap_.lock);
  (void)heap_.space_of(*node).give(node, tag);
}

Status Pool::record_stream(Block& block, StreamHandle stream) {
  if (foreign()) return refused_in_child();
  if (!block.record) return Status::illegal_state;
  const int slot = streams_.slot_of(stream);
  const std::uint64_t mask = std::uint64_t{1} << slot;
  // An event on the legacy default stream covers the per-thread streams of all threads.
  const StreamHandle known = stream == per_thread_stream ? default_stream : stream;
  if (SmallRef::is(block.record)) {
    SmallBlock& small = SmallRef(block.record).block();
    const int home = SmallRef(block.record).span()->home.load(relaxed);
    Shard& shard = shards_[home];
    const BiasedGuard guard(shard.lock);
    if (small.state() != SmallState::live) return Status::illegal_state;
    if (slot == home) return Status::success;
    shard.shared[block.record] |= mask;
    small.shared = 1;
    if (slot == StreamOrder::shared_slot) shard.slotless[block.record].push_back(known);
    return Status::success;
  }
  Node* node = static_cast<Node*>(block.record);
  Shard& shard = shards_[node->home.load(relaxed)];
  const BiasedGuard guard(shard.lock);
  if (!node->is(NodeState::live)) return Status::illegal_state;
  node->tag.mask |= mask;
  if (slot == StreamOrder::shared_slot) shard.slotless[node].push_back(known);
  return Status::success;
}

bool Pool::find(DevicePtr real, Block* block) {
  check_process("Pool.deallocate");
  DevicePtr ptr = real;
  if (chunked()) {
    const std::lock_guard growing(pages_.mutex());
    ptr = pages_.backing().name_of(real);
  }
  Span* span = nullptr;
  std::uint32_t index = 0;
  {
    const BiasedGuard guard(heap_.lock);
    Node* node = heap_.covering(ptr);
    if (!node) return false;
    if (node->is(NodeState::live) && node->ptr == ptr) {
      *block = {real, node->requested, node};
      return true;
    }
    if (!node->is(NodeState::span)) return false;
    span = node->blocks;
    const std::size_t offset = real - span->base;
    if (offset % span->block_bytes || offset / span->block_bytes >= span->count) return false;
    index = static_cast<std::uint32_t>(offset / span->block_bytes);
  }
  const BiasedGuard guard(shards_[span->home.load(relaxed)].lock);
  if (span->blocks()[index].state() != SmallState::live || span->ptr_of(index) != real) return false;
  *block = {real, span->requested(index), SmallRef(span, index).record()};
  return true;
}

void Pool::release_stream(StreamHandle stream) { streams_.release(stream); }

}  // namespace ringmem
