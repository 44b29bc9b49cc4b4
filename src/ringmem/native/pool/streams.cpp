#include "pool/streams.hpp"

#include <algorithm>
#include <bit>

#include "memory/event_order.hpp"

namespace ringmem::pool {
namespace {

constexpr auto relaxed = std::memory_order_relaxed;

constexpr std::uint64_t bit(int slot) noexcept { return std::uint64_t{1} << slot; }

void raise_to(std::atomic<std::uint64_t>& value, std::uint64_t least) noexcept {
  if (value.load(relaxed) < least) value.store(least, relaxed);
}

}  // namespace

StreamOrder::~StreamOrder() {
  for (Slot& slot : slot_) {
    for (const Flight& flight : slot.in_flight) (void)driver_.event_destroy(device_, flight.event);
  }
  for (const EventHandle event : events_) (void)driver_.event_destroy(device_, event);
}

void StreamOrder::abandon() noexcept {
  for (Slot& slot : slot_) slot.in_flight.clear();
  events_.clear();
}

// --- streams and their slots ---------------------------------------------------------------------

int StreamOrder::find_locked(std::uint64_t key) const noexcept {
  for (std::uint32_t i = 0; i < table; ++i) {
    const std::uint32_t at = (hash(key) + i) % table;
    const std::uint64_t found = keys_[at].load(relaxed);
    if (found == key) return static_cast<int>(at);
    if (found == 0) break;
  }
  return -1;
}

void StreamOrder::insert_locked(std::uint64_t key, int slot) noexcept {
  for (std::uint32_t i = 0; i < table; ++i) {
    const std::uint32_t at = (hash(key) + i) % table;
    const std::uint64_t found = keys_[at].load(relaxed);
    if (found != 0 && found != tombstone) continue;
    slot_in_[at].store(static_cast<std::uint8_t>(slot), relaxed);
    keys_[at].store(key, std::memory_order_release);
    return;
  }
}

// A slot whose stream was released serves again once its work is done: what still carries its bit
// is complete, and so may be used by the next stream without a wait.
int StreamOrder::free_slot_locked() noexcept {
  for (int i = 0; i < shared_slot; ++i) {
    if (!slot_[i].used) return i;
  }
  for (int i = 0; i < shared_slot; ++i) {
    if (!slot_[i].retired) continue;
    poll_locked(slot_[i]);
    if (completed_[i].load(relaxed) >= last_free_[i].load(relaxed)) return i;
  }
  return shared_slot;
}

int StreamOrder::add(StreamHandle stream) noexcept {
  if (stream == per_thread_stream) return shared_slot;
  const std::uint64_t key = key_of(stream);
  const SpinGuard guard(lock_);
  if (const int at = find_locked(key); at >= 0) return slot_in_[at].load(relaxed);
  const int index = free_slot_locked();
  if (index == shared_slot) return index;
  Slot& slot = slot_[index];
  if (!slot.used) active_.fetch_add(1, relaxed);
  slot.stream = key - 1;
  slot.used = true;
  slot.retired = false;
  for (auto& known : known_[index]) known.store(0, relaxed);
  for (auto* bits : {&dead_, &capturing_, &released_}) bits->fetch_and(~bit(index), relaxed);
  insert_locked(key, index);
  return index;
}

void StreamOrder::retire_locked(int index) noexcept {
  Slot& slot = slot_[index];
  if (const int at = find_locked(slot.stream + 1); at >= 0) keys_[at].store(tombstone, relaxed);
  slot.retired = true;
}

void StreamOrder::release(StreamHandle stream) noexcept {
  const SpinGuard guard(lock_);
  std::erase(slotless_captures_, stream);
  const int at = find_locked(key_of(stream));
  if (at < 0) return;
  const int index = slot_in_[at].load(relaxed);
  // Small blocks freed on their own stream carry no stamp, and blocks that live may have been used
  // here: the event covers all of the stream's work, and no other stream gets the slot before it.
  const std::uint64_t now = epoch_.load(relaxed);
  note_free(index, now);
  if (ok(cover_locked(index, now))) released_.fetch_or(bit(index), relaxed);  // else it is dead
  retire_locked(index);
}

// --- epochs --------------------------------------------------------------------------------------

Tag StreamOrder::stamp(int slot, std::uint64_t others) noexcept {
  const std::uint64_t now = epoch_.load(relaxed);
  const Tag tag{bit(slot) | others, now};
  note_frees(tag.mask & ~bit(shared_slot), now);
  return tag;
}

void StreamOrder::note_frees(std::uint64_t mask, std::uint64_t epoch) noexcept {
  for (std::uint64_t rest = mask; rest; rest &= rest - 1) note_free(std::countr_zero(rest), epoch);
}

// The event's own epoch is the tag's: whatever covers it on the other streams was recorded later
// than this, and so after their part.
Status StreamOrder::stamp_shared(StreamHandle stream, std::uint64_t others, Tag* tag) noexcept {
  const SpinGuard guard(lock_);
  Slot& slot = slot_[shared_slot];
  slot.used = true;
  const Status status = fly_locked(slot, stream);
  const std::uint64_t epoch = ok(status) ? slot.recorded : epoch_.fetch_add(1);
  if (!ok(status)) {
    slot.lost = std::min(slot.lost, epoch);
    slot.last_lost = epoch;
    dead_.fetch_or(bit(shared_slot), relaxed);
    if (status == Status::stream_capture_unsupported) {
      slotless_captures_.push_back(stream);
      capturing_.fetch_or(bit(shared_slot), relaxed);
    }
  }
  *tag = {bit(shared_slot) | others, epoch};
  note_frees(tag->mask, epoch);
  return status;
}

bool StreamOrder::ordered(int slot, Tag tag) const noexcept {
  if (slot >= 0 && slot != shared_slot) tag.mask &= ~bit(slot);
  for (std::uint64_t rest = tag.mask; rest; rest &= rest - 1) {
    const int other = std::countr_zero(rest);
    const std::uint64_t need = std::min(tag.seq, last_free_[other].load(relaxed));
    if (completed_[other].load(relaxed) >= need) continue;
    if (slot >= 0 && slot != shared_slot && known_[slot][other].load(relaxed) >= need) continue;
    return false;
  }
  return true;
}

Tag StreamOrder::pending(Tag tag) const noexcept {
  for (std::uint64_t rest = tag.mask; rest; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    const std::uint64_t need = std::min(tag.seq, last_free_[slot].load(relaxed));
    if (completed_[slot].load(relaxed) >= need) tag.mask &= ~bit(slot);
  }
  return tag;
}

// --- events --------------------------------------------------------------------------------------

EventHandle StreamOrder::get_event_locked(Status* status) noexcept {
  *status = Status::success;
  if (!events_.empty()) {
    const EventHandle event = events_.back();
    events_.pop_back();
    return event;
  }
  EventHandle event = 0;
  calls_.fetch_add(1, relaxed);
  *status = driver_.event_create(device_, EventFlags{}, &event);
  return event;
}

bool StreamOrder::capturing_locked(StreamHandle stream, Status* status) noexcept {
  bool capturing = false;
  calls_.fetch_add(1, relaxed);
  *status = driver_.stream_capturing(device_, stream, &capturing);
  return capturing;
}

// The memory of streams whose captures are over can be had again. Of a stream that is gone too, as
// far as captures go: an event cannot be recorded there either, and then it is dead.
void StreamOrder::end_captures() noexcept {
  const SpinGuard guard(lock_);
  for (std::uint64_t rest = capturing_.load(relaxed); rest; rest &= rest - 1) {
    const int index = std::countr_zero(rest);
    Status status = Status::success;
    if (index == shared_slot) {
      std::erase_if(slotless_captures_, [&](StreamHandle stream) {
        return !capturing_locked(stream, &status);
      });
      if (!slotless_captures_.empty()) continue;
    } else if (!slot_[index].retired && capturing_locked(slot_[index].stream, &status)) {
      continue;
    }
    capturing_.fetch_and(~bit(index), relaxed);
  }
}

// Records one more event. The epoch moves on first: a free stamped with the old one was submitted
// before the record.
Status StreamOrder::fly_locked(Slot& slot, StreamHandle stream) noexcept {
  Status status;
  const EventHandle event = get_event_locked(&status);
  if (!ok(status)) return status;
  const std::uint64_t covered = epoch_.fetch_add(1);
  calls_.fetch_add(1, relaxed);
  status = mark_stream(driver_, stream, {device_, event});
  if (!ok(status)) {
    events_.push_back(event);
    return status;
  }
  slot.recorded = covered;
  slot.in_flight.push_back({covered, event});
  if (slot.in_flight.size() % 8 == 0) poll_locked(slot);
  return status;
}

Status StreamOrder::cover_locked(int index, std::uint64_t epoch) noexcept {
  Slot& slot = slot_[index];
  if (completed_[index].load(relaxed) >= epoch) return Status::success;
  if (slot.recorded >= epoch && epoch < slot.lost) return Status::success;
  if (index == shared_slot || slot.retired || (dead_.load(relaxed) & bit(index))) {
    dead_.fetch_or(bit(index), relaxed);  // nothing but the device can say when this is done
    return Status::invalid_handle;
  }
  const Status status = fly_locked(slot, slot.stream);
  if (status == Status::stream_capture_unsupported) {
    capturing_.fetch_or(bit(index), relaxed);
  } else if (!ok(status)) {
    dead_.fetch_or(bit(index), relaxed);
    retire_locked(index);
  }
  return status;
}

Status StreamOrder::wait_locked(int slot, StreamHandle stream, int other,
                                std::uint64_t epoch) noexcept {
  const Status status = cover_locked(other, epoch);
  if (!ok(status)) return status;
  std::uint64_t reached = completed_[other].load(relaxed);
  const std::deque<Flight>& flights = slot_[other].in_flight;
  // Events of one stream imply the earlier ones; those of the shared slot do not, but for those
  // that this stream has waited for before.
  std::uint64_t least = epoch;
  if (other == shared_slot) least = slot == shared_slot ? 0 : known_[slot][other].load(relaxed) + 1;
  auto flight = std::partition_point(flights.begin(), flights.end(),
                                     [least](const Flight& one) { return one.epoch < least; });
  for (; flight != flights.end() && reached < epoch; ++flight) {
    calls_.fetch_add(1, relaxed);
    waits_.fetch_add(1, relaxed);
    const Status waited = driver_.stream_wait_event(device_, stream, flight->event);
    if (!ok(waited)) return waited;
    reached = flight->epoch;
  }
  if (slot != shared_slot) raise_to(known_[slot][other], std::min(reached, slot_[other].lost - 1));
  return Status::success;
}

Status StreamOrder::order_after(int slot, StreamHandle stream, Tag tag) noexcept {
  if (ordered(slot, tag)) return Status::success;
  const SpinGuard guard(lock_);
  if (Status status; capturing_locked(stream, &status)) return Status::stream_capture_isolation;
  if (slot != shared_slot) tag.mask &= ~bit(slot);
  for (std::uint64_t rest = tag.mask; rest; rest &= rest - 1) {
    const int other = std::countr_zero(rest);
    const std::uint64_t need = std::min(tag.seq, last_free_[other].load(relaxed));
    if (completed_[other].load(relaxed) >= need) continue;
    if (slot != shared_slot && known_[slot][other].load(relaxed) >= need) continue;
    if (const Status status = wait_locked(slot, stream, other, need); !ok(status)) return status;
  }
  return Status::success;
}

void StreamOrder::record(Tag tag) noexcept {
  const SpinGuard guard(lock_);
  for (std::uint64_t rest = tag.mask; rest; rest &= rest - 1) {
    const int other = std::countr_zero(rest);
    (void)cover_locked(other, std::min(tag.seq, last_free_[other].load(relaxed)));
  }
}

void StreamOrder::poll_locked(Slot& slot) noexcept {
  const auto index = &slot - slot_.data();
  while (!slot.in_flight.empty()) {
    calls_.fetch_add(1, relaxed);
    if (!ok(driver_.event_query(device_, slot.in_flight.front().event))) return;
    raise_to(completed_[index], std::min(slot.in_flight.front().epoch, slot.lost - 1));
    events_.push_back(slot.in_flight.front().event);
    slot.in_flight.pop_front();
  }
}

void StreamOrder::poll() noexcept {
  const SpinGuard guard(lock_);
  for (int i = 0; i < slots; ++i) {
    if (!slot_[i].in_flight.empty()) poll_locked(slot_[i]);
  }
}

// The device has been waited for: all that was freed up to `covered` is done.
void StreamOrder::revive_locked(int index, std::uint64_t covered) noexcept {
  Slot& slot = slot_[index];
  raise_to(completed_[index], covered);
  const bool lost_since = slot.lost != never && slot.last_lost > covered;
  slot.lost = lost_since ? covered + 1 : never;
  if (!lost_since) dead_.fetch_and(~bit(index), relaxed);
}

// An event is waited for while its slot keeps it in flight: only poll_locked and this function take
// events out, and an event that is recorded again meanwhile only makes the wait longer.
Status StreamOrder::synchronize() noexcept {
  look_at_captures();
  std::vector<EventHandle> pending;
  std::uint64_t covered = 0;
  std::uint64_t dead = 0;
  {
    const SpinGuard guard(lock_);
    covered = epoch_.fetch_add(1);  // what is freed from here on is not waited for
    for (int i = 0; i < slots; ++i) {
      const std::uint64_t last = last_free_[i].load(relaxed);
      if (completed_[i].load(relaxed) >= last) continue;
      (void)cover_locked(i, last);
      for (const Flight& flight : slot_[i].in_flight) pending.push_back(flight.event);
    }
    dead = dead_.load(relaxed);
  }
  if (dead && !any_captures()) {  // the driver refuses it during a capture, and spoils that
    // The stream of some free is gone and no event can be recorded for it: only the device itself
    // still knows when that work is done.
    if (const Status status = driver_.synchronize(device_); !ok(status)) return status;
    const SpinGuard guard(lock_);
    for (std::uint64_t rest = dead; rest; rest &= rest - 1) {
      revive_locked(std::countr_zero(rest), covered);
    }
  }
  for (const EventHandle event : pending) {
    if (const Status status = driver_.event_synchronize(device_, event); !ok(status)) return status;
  }
  poll();
  return Status::success;
}

}  // namespace ringmem::pool
