// Stream order. Frees are stamped with an epoch; one event, recorded on a stream when somebody
// first asks, covers every earlier free on it. A consumer waits on the device, never on the host,
// and what it has waited for once is not waited for again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "driver/driver.hpp"
#include "pool/lock.hpp"
#include "pool/node.hpp"

namespace ringmem::pool {

class StreamOrder {
 public:
  static constexpr int slots = 64;
  // Streams that find no slot of their own, and the per-thread default stream (one handle, many
  // streams), share the last slot. A free there records its event at once, and nothing on it is
  // reusable without a wait. What was freed there up to an epoch is done when all its events up to
  // that one are; so its last free is never later than its last event, unless one was lost.
  static constexpr int shared_slot = slots - 1;

  StreamOrder(Driver& driver, int device) : driver_(driver), device_(device) {}
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // The slot of a stream; a new stream gets one. `slot_created` of the pool is called then.
  int slot_of(StreamHandle stream) noexcept {
    const std::uint64_t key = key_of(stream);
    for (std::uint32_t i = hash(key);; ++i) {
      const std::uint64_t found = keys_[i % table].load(std::memory_order_acquire);
      if (found == key) return slot_in_[i % table].load(std::memory_order_relaxed);
      if (found == 0 || i - hash(key) >= table) return add(stream);
    }
  }
  int active() const noexcept { return active_.load(std::memory_order_relaxed); }

  // The tag of memory that `slot` frees now and that the streams in `others` used as well.
  Tag stamp(int slot) noexcept {
    const std::uint64_t now = epoch_.load(std::memory_order_relaxed);
    note_free(slot, now);
    return {std::uint64_t{1} << slot, now};
  }
  Tag stamp(int slot, std::uint64_t others) noexcept;
  // The tag of what only the slot's own stream used: one that was released has no more work.
  Tag stamp_own(int slot) noexcept {
    if (~released_.load(std::memory_order_relaxed) >> slot & 1) return stamp(slot);
    const auto last = last_free_[static_cast<std::size_t>(slot)].load(std::memory_order_relaxed);
    return {std::uint64_t{1} << slot, last};
  }
  // As stamp(), for a stream of the shared slot: records its event, and stamps `others` with it.
  Status stamp_shared(StreamHandle stream, std::uint64_t others, Tag* tag) noexcept;

  // Whether `slot` may use memory with this tag as it is.
  bool ordered(int slot, Tag tag) const noexcept;
  bool complete(Tag tag) const noexcept { return ordered(-1, tag); }
  // The tag without the streams whose work is known to be done.
  Tag pending(Tag tag) const noexcept;
  // Whether order can be had by an event: false while a destroyed stream is in the tag, or one whose
  // work is being captured into a graph (whoever waited for its event would join the capture).
  bool orderable(Tag tag) const noexcept {
    const std::uint64_t barred = dead_.load(std::memory_order_relaxed) |
                                 capturing_.load(std::memory_order_relaxed);
    return (tag.mask & barred) == 0 || complete(tag);
  }
  // Makes `stream` (of `slot`) wait on the device for what the tag names. A stream that captures
  // can wait for nothing outside its graph: stream_capture_isolation.
  Status order_after(int slot, StreamHandle stream, Tag tag) noexcept;
  // Looks which captures are over, of those that were met.
  void look_at_captures() noexcept {
    if (any_captures()) [[unlikely]] end_captures();
  }
  bool any_captures() const noexcept { return capturing_.load(std::memory_order_relaxed) != 0; }
  // Records events for what the tag names, so that it can be seen to complete.
  void record(Tag tag) noexcept;
  // Looks which events have completed; never waits.
  void poll() noexcept;
  // Waits on the host for everything freed so far. Blocks: call it with no lock held.
  Status synchronize() noexcept;
  // The stream is about to be destroyed: covers its frees while it can still be named.
  void release(StreamHandle stream) noexcept;

  // In a fork child: the events are the parent's.
  void abandon() noexcept;

  std::uint64_t driver_calls() const noexcept { return calls_.load(std::memory_order_relaxed); }
  std::uint64_t device_waits() const noexcept { return waits_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t never = ~std::uint64_t{0};
  struct Flight {
    std::uint64_t epoch;
    EventHandle event;
  };
  struct Slot {
    StreamHandle stream = 0;
    bool used = false;
    bool retired = false;           // its stream was released
    std::uint64_t recorded = 0;     // frees up to this epoch are covered by an event
    // Of the shared slot: the first free that has no event, for it could not be recorded. What was
    // freed there since waits for the device.
    std::uint64_t lost = never;
    std::uint64_t last_lost = 0;    // the last such free
    std::deque<Flight> in_flight;   // by epoch
  };
  static constexpr std::uint32_t table = 256;
  static constexpr std::uint64_t tombstone = ~std::uint64_t{0};

  static std::uint64_t key_of(StreamHandle stream) noexcept {
    return (stream == legacy_stream ? default_stream : stream) + 1;
  }
  static std::uint32_t hash(std::uint64_t key) noexcept {
    return static_cast<std::uint32_t>((key * 0x9e3779b97f4a7c15ull) >> 56);
  }
  void note_free(int slot, std::uint64_t epoch) noexcept {
    std::atomic<std::uint64_t>& last = last_free_[static_cast<std::size_t>(slot)];
    std::uint64_t seen = last.load(std::memory_order_relaxed);
    // Two threads may free on one stream: the later epoch stays.
    while (seen < epoch && !last.compare_exchange_weak(seen, epoch, std::memory_order_relaxed)) {
    }
  }
  void note_frees(std::uint64_t mask, std::uint64_t epoch) noexcept;
  [[gnu::noinline]] int add(StreamHandle stream) noexcept;
  int find_locked(std::uint64_t key) const noexcept;
  int free_slot_locked() noexcept;
  void insert_locked(std::uint64_t key, int slot) noexcept;
  // Makes sure an event covers `slot` up to `epoch`; false if the stream cannot be recorded on.
  Status cover_locked(int slot, std::uint64_t epoch) noexcept;
  Status fly_locked(Slot& slot, StreamHandle stream) noexcept;
  Status wait_locked(int slot, StreamHandle stream, int other, std::uint64_t epoch) noexcept;
  void poll_locked(Slot& slot) noexcept;
  void retire_locked(int slot) noexcept;
  void revive_locked(int slot, std::uint64_t covered) noexcept;
  EventHandle get_event_locked(Status* status) noexcept;
  bool capturing_locked(StreamHandle stream, Status* status) noexcept;
  [[gnu::noinline]] void end_captures() noexcept;

  Driver& driver_;
  const int device_;
  std::array<std::atomic<std::uint64_t>, table> keys_{};
  std::array<std::atomic<std::uint8_t>, table> slot_in_{};
  std::atomic<int> active_{0};
  std::atomic<std::uint64_t> epoch_{1};
  std::atomic<std::uint64_t> dead_{0};
  std::atomic<std::uint64_t> capturing_{0};  // found to capture when an event was wanted
  std::atomic<std::uint64_t> released_{0};  // all that their streams did has an event
  std::array<std::atomic<std::uint64_t>, slots> last_free_{};
  std::array<std::atomic<std::uint64_t>, slots> completed_{};
  // known_[s][t]: slot s has waited for what was freed on t up to this epoch.
  std::array<std::array<std::atomic<std::uint64_t>, slots>, slots> known_{};
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::uint64_t> waits_{0};

  mutable SpinLock lock_;  // guards what follows; innermost of all locks
  std::array<Slot, slots> slot_{};
  std::vector<EventHandle> events_;  // not in use
  // Streams of the shared slot that captured when they freed. The device is not waited for meanwhile.
  std::vector<StreamHandle> slotless_captures_;
};

}  // namespace ringmem::pool
