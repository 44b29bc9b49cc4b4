// What a bridge's flush does: whole slots copied between the host's ring and the device's, and the
// producer's index behind them; and the thread that does so at an interval.
//
// On the copied side that index, not the sequence of a line, says what has arrived, because a copy
// may arrive in any order. Costs of a flush over the copy itself: one index store where both sides
// see the device's header, else one 32-bit write in stream order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "driver/driver.hpp"
#include "layout/kernel.hpp"
#include "ring/words.hpp"

namespace ringmem::ring {

// Where the two rings of one direction are. The memory is the caller's and outlives the mover.
struct MoverPlaces {
  layout::RingHeader* ring = nullptr;    // of the host's ring
  layout::RingHeader* header = nullptr;  // of the device's ring: itself where `mapped`, else a copy
  DevicePtr device_header = 0;           // the device's header, as the device sees it
  DevicePtr host_slots = 0;
  DevicePtr device_slots = 0;
  u64* word = nullptr;  // 8 bytes that a copy may read from
  u64 capacity = 0;     // slots, a power of two
  u64 slot_nbytes = 0;
  bool to_device = true;
  bool mapped = true;  // the device's header is memory that both sides see
  bool waits = true;   // flush() waits for the stream
};

enum class Index : std::uint8_t { tail, head };  // producer.tail, consumer.head

// One direction. A lock of its own makes one flush of several threads', held while the copies of
// that flush run; nothing else ever waits for it. Throws DriverError and Corrupted; messages that a
// failed flush did not move are moved by the next.
class Mover {
 public:
  Mover(DriverRef driver, int device, StreamHandle stream, const MoverPlaces& places);

  // push() or pull(), as the places say; returns how many messages moved, those of a MoverThread in
  // the meantime among them. All that a flush from Python does: between two of them megabytes went
  // through the caches, and every line of Python costs a tenth of a microsecond to find again.
  u64 flush();
  // Copies to the device what the host's producer published; returns how many messages. Waits for
  // the stream where `wait`; else the index follows the copies in the stream's order.
  u64 push(bool wait);
  // Copies to the host what the device wrote, and waits for it; returns how many messages. Where
  // `in_order`, all that the stream's work so far writes is among it.
  u64 pull(bool in_order);
  // Messages moved (or submitted) since the beginning; any thread may ask.
  u64 moved() const noexcept { return moved_.load(std::memory_order_acquire); }

  // From now on a thread moves too; and: it had to stop, and every flush says why.
  void share() noexcept { shared_ = true; }
  void fail(std::exception_ptr error) noexcept;

  // An index that the device writes.
  u64 device_index(Index index);
  // The device has taken the messages below its head: their slots are the host's again.
  void take_back();
  // The host has taken the messages below `head`.
  void tell_head(u64 head);

 private:
  void require_same_process() const;
  void require_no_error() const;
  void copy(DevicePtr dst, DevicePtr src, u64 nbytes);
  void copy_slots(u64 start, u64 count);
  u64 pull_once();
  void synchronize();
  u64 fetch(Index index);
  void publish(Index index, u64 value, u64 before);

  DriverRef driver_;
  int device_;
  StreamHandle stream_;
  MoverPlaces places_;
  std::mutex mutex_;
  std::atomic<u64> moved_{0};
  u64 told_head_ = 0;
  bool shared_ = false;       // set before the thread is there
  std::exception_ptr error_;  // of the thread
  std::uint64_t generation_;
};

// A thread that pushes one direction and pulls another at an interval, and needs no GIL. It ends at
// stop(), or at the first error, which check() throws from then on.
class MoverThread {
 public:
  MoverThread(Mover& in, Mover& out, std::chrono::nanoseconds interval);
  MoverThread(const MoverThread&) = delete;
  MoverThread& operator=(const MoverThread&) = delete;
  ~MoverThread() { stop(); }

  void check() const;
  void stop() noexcept;  // idempotent; waits until the thread is gone

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool stop = false, ended = false;
    std::exception_ptr error;
  };
  static void run(const std::shared_ptr<State>& state, Mover& in, Mover& out,
                  std::chrono::nanoseconds interval);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::uint64_t generation_;
};

}  // namespace ringmem::ring
