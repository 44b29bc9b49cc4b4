#include "ring/mover.hpp"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "driver/fork.hpp"
#include "ring/geometry.hpp"
#include "ring/poller.hpp"
#include "ring/thread.hpp"

namespace ringmem::ring {
namespace {

u64& word_of(layout::RingHeader& header, Index index) noexcept {
  return index == Index::tail ? header.producer.tail : header.consumer.head;
}

constexpr u64 offset_of(Index index) noexcept {
  return index == Index::tail ? offsetof(layout::RingHeader, producer.tail)
                              : offsetof(layout::RingHeader, consumer.head);
}

DevicePtr address(const void* ptr) noexcept { return reinterpret_cast<DevicePtr>(ptr); }

}  // namespace

Mover::Mover(DriverRef driver, int device, StreamHandle stream, const MoverPlaces& places)
    : driver_(std::move(driver)),
      device_(device),
      stream_(stream),
      places_(places),
      generation_(fork_generation()) {
  // Both sides of a ring that was used before stand where it stands.
  moved_ = places.to_device ? load(places.ring->consumer.head) : load(places.ring->producer.tail);
  told_head_ = load(places.ring->consumer.head);
}

u64 Mover::flush() {
  const u64 before = moved();
  const u64 count = places_.to_device ? push(places_.waits) : pull(!places_.waits);
  return shared_ ? moved() - before : count;
}

u64 Mover::push(bool wait) {
  require_same_process();
  const std::lock_guard lock(mutex_);
  require_no_error();
  const u64 tail = load(places_.ring->producer.tail);
  const u64 start = moved();
  if (tail == start) return 0;
  copy_slots(start, tail - start);
  if (wait && places_.mapped) {
    synchronize();
    store(places_.header->producer.tail, tail);
  } else {
    publish(Index::tail, tail, start);
    if (wait) synchronize();
  }
  moved_.store(tail, std::memory_order_release);
  return tail - start;
}

u64 Mover::pull(bool in_order) {
  require_same_process();
  const std::lock_guard lock(mutex_);
  require_no_error();
  u64 count = pull_once();
  if (!in_order) return count;
  // A copy was waited for behind the stream's work; with none to make, that work is waited for here.
  // What it wrote since the first look comes now; usually nothing.
  if (count == 0) synchronize();
  count += pull_once();
  return count;
}

u64 Mover::pull_once() {
  const u64 tail = fetch(Index::tail);
  const u64 start = moved();
  const u64 count = tail - start;
  if (count == 0) return 0;
  if (count > places_.capacity) {
    throw Corrupted("the device says that it wrote " + std::to_string(tail) + " messages; " +
                    std::to_string(start) + " were moved, and the ring holds " +
                    std::to_string(places_.capacity));
  }
  copy_slots(start, count);
  synchronize();
  moved_.store(tail, std::memory_order_release);
  return count;
}

void Mover::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
}

u64 Mover::device_index(Index index) {
  require_same_process();
  if (places_.mapped) return load(word_of(*places_.header, index));
  const std::lock_guard lock(mutex_);
  return fetch(index);
}

void Mover::take_back() {
  const u64 head = device_index(Index::head);
  const u64 known = load(places_.ring->consumer.head);
  if (head - known > moved() - known) {
    throw Corrupted("the device says that it took " + std::to_string(head) + " messages; " +
                    std::to_string(moved()) + " were moved");
  }
  store(places_.ring->consumer.head, head);
}

void Mover::tell_head(u64 head) {
  require_same_process();
  if (places_.mapped) {
    store(places_.header->consumer.head, head);
    return;
  }
  const std::lock_guard lock(mutex_);
  publish(Index::head, head, told_head_);
  told_head_ = head;
}

// --- under the lock ----------------------------------------------------------------------------------
u64 Mover::fetch(Index index) {
  u64& word = word_of(*places_.header, index);
  if (!places_.mapped) {
    copy(address(&word), places_.device_header + offset_of(index), sizeof word);
    synchronize();
  }
  return load(word);
}

// In the stream's order. A driver writes 32 bits at once; the upper half changes once in 2^32
// messages, and then the whole word is copied, with nothing under way.
void Mover::publish(Index index, u64 value, u64 before) {
  const DevicePtr target = places_.device_header + offset_of(index);
  if (value >> 32 == before >> 32) {
    const Status status =
        driver_->stream_write_value(device_, stream_, target, static_cast<u32>(value));
    // CUDA writes no values into memory of a pool, and calls that an invalid value.
    if (status != Status::not_supported && status != Status::invalid_value) {
      check(status, "cuStreamWriteValue32");
      return;
    }
  }
  synchronize();
  *places_.word = value;
  copy(target, address(places_.word), sizeof value);
  synchronize();
}

// Whole slots from message `start` on: one run, or two at the wrap.
void Mover::copy_slots(u64 start, u64 count) {
  const u64 first = start & (places_.capacity - 1);
  const u64 straight = std::min(count, places_.capacity - first);
  const auto run = [this](u64 slot, u64 slots) {
    const u64 offset = slot * places_.slot_nbytes;
    DevicePtr dst = places_.device_slots + offset, src = places_.host_slots + offset;
    if (!places_.to_device) std::swap(dst, src);
    copy(dst, src, slots * places_.slot_nbytes);
  };
  run(first, straight);
  if (straight < count) run(0, count - straight);
}

void Mover::copy(DevicePtr dst, DevicePtr src, u64 nbytes) {
  check(driver_->copy_async(device_, dst, src, nbytes, stream_), "cuMemcpyAsync");
}

void Mover::synchronize() {
  check(driver_->stream_synchronize(device_, stream_), "cuStreamSynchronize");
}

void Mover::require_same_process() const {
  if (generation_ != fork_generation()) {
    throw Closed("the bridge belongs to the parent process; a fork must make one of its own");
  }
}

void Mover::require_no_error() const {
  if (error_) std::rethrow_exception(error_);
}

// --- the thread --------------------------------------------------------------------------------------
MoverThread::MoverThread(Mover& in, Mover& out, std::chrono::nanoseconds interval)
    : generation_(fork_generation()) {
  in.share();
  out.share();
  // Detached: a fork's child, where no such thread is, must not join it.
  start_thread([state = state_, &in, &out, interval] { run(state, in, out, interval); });
}

void MoverThread::check() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->error) std::rethrow_exception(state_->error);
}

void MoverThread::stop() noexcept {
  if (generation_ != fork_generation()) return;
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  state_->changed.wait(lock, [this] { return state_->ended; });
}

void MoverThread::run(const std::shared_ptr<State>& state, Mover& in, Mover& out,
                      std::chrono::nanoseconds interval) {
  pthread_setname_np(pthread_self(), "ringmem-dma");
  prctl(PR_SET_TIMERSLACK, 1'000UL, 0UL, 0UL, 0UL);  // ns; 50 µs otherwise, more than most intervals
  std::unique_lock lock(state->mutex);
  while (!state->stop && !state->error) {
    lock.unlock();
    std::exception_ptr error;
    try {
      in.push(true);
      out.pull(false);
    } catch (...) {
      error = std::current_exception();
      in.fail(error);
      out.fail(error);
    }
    lock.lock();
    state->error = error;
    if (!error) state->changed.wait_for(lock, interval, [&] { return state->stop; });
  }
  state->ended = true;
  state->changed.notify_all();
}

}  // namespace ringmem::ring
