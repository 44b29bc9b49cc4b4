// The loop of one ring of a CPU ring kernel: ring_kernel.cuh's service warp and worker in one
// thread. Message i of the input ring is answered in slot i of the output ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "ring/cpu_kernel.hpp"
#include "ring/producer.hpp"

namespace ringmem::ring {

// A ring's state, between guards that nobody may write: a handler that does is found out after its
// batch, and ended.
inline constexpr std::size_t guard_nbytes = 64;
inline constexpr int guard_byte = 0xa5;
struct State {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
};

class CpuLoop {
 public:
  // Takes up where an earlier loop over these rings stopped. Throws Corrupted for what is no ring.
  CpuLoop(const KernelPair& pair, CpuHandler handler, State state,
          const std::atomic<bool>& fault, u64 deadline_ns);

  // Until it is told to leave. The last thing it stores anywhere is has_terminated.
  // What calls the handler is not noexcept: at the end of the interpreter a thread in Python code is
  // ended by pthread_exit, which unwinds it.
  void run();

 private:
  using Slots = EndpointBase<Counters>;
  using EndReason = layout::EndReason;
  enum class Order { run, pause, leave };

  Order look_at_control(u64 now) noexcept;
  bool drained() noexcept;
  u64 handle_ready();
  void take_over() noexcept;
  bool take_one();
  bool has_room() noexcept;
  bool guards_hold() const noexcept;
  i32 call(const Line* from, void* reply);
  void flush_staged() noexcept;
  void account(u64 done, u64 seen_ns) noexcept;
  void write_dead_letter(i32 status) noexcept;
  void set_paused(bool paused) noexcept;
  void publish(u64 now, bool always) noexcept;
  void write_telemetry() noexcept;
  void wait(u64 now) noexcept;

  KernelPair pair_;
  Slots input_, output_, dead_letter_;
  CpuHandler handler_;
  IdlePolicy idle_;
  State state_;
  const std::atomic<bool>* fault_;
  u64 deadline_ns_;

  std::vector<Line> message_, reply_;  // contiguous copies, in lines for their alignment
  // Replies to the messages just below `next_` that wait to be streamed; only where the handler is
  // so fast that nobody notices.
  std::vector<Line> staged_;
  u64 run_ = 0;         // slots that `staged_` has room for; 0: never
  u64 staged_slots_ = 0;
  bool staging_ = false;
  u64 next_ = 0;         // message to handle
  u64 output_head_ = 0;  // of the host, as last seen
  u64 dead_tail_ = 0;
  EndReason reason_ = EndReason::none;
  bool draining_ = false, paused_ = false;
  u64 start_ns_ = 0, busy_ns_ = 0;  // busy: when it last found a message
  u64 beat_ = 0, looked_ns_ = 0, silent_ns_ = 0;  // silent: since the heart last beat

  u64 processed_ = 0, published_ = ~u64{0}, published_ns_ = 0, dropped_ = 0, errors_ = 0;
  u64 latency_total_ns_ = 0, latency_max_ns_ = 0, latency_min_ns_ = ~u64{0}, last_ns_ = 0;
  i32 last_error_ = 0;
};

}  // namespace ringmem::ring
