// A ring kernel on the CPU: one thread for each ring runs the loop that ring_kernel.cuh runs on a
// GPU, over the same layout, with the same control block.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include "ring/kernel_pair.hpp"

namespace ringmem::ring {

// What is called for each message. The message is a copy of its own; the reply is zeroed.
struct CpuHandler {
  using Plain = i32 (*)(const void* message, void* reply, void* state);
  using WithLanes = i32 (*)(const void* message, void* reply, void* state, i32 lane, i32 lanes);

  Plain plain = nullptr;  // exactly one of the two
  WithLanes with_lanes = nullptr;

  i32 operator()(const void* message, void* reply, void* state) const {
    return plain != nullptr ? plain(message, reply, state) : with_lanes(message, reply, state, 0, 1);
  }
};

// How an idle loop waits. A thread that finds nothing spins, then yields to other threads, then
// naps for a twentieth of the time that it has been idle: a message that comes meanwhile waits for so
// long at most. With naps of a millisecond an idle ring costs about 1 % of a core.
struct IdlePolicy {
  u64 spin_ns = 50'000;
  u64 yield_ns = 1'000'000;  // from here on it naps
  u64 nap_share = 20;
  u64 longest_nap_ns = 1'000'000;
};

class CpuLoop;

class CpuKernel {
 public:
  enum class Gate { shut, open, cancelled };  // before the loops of one start
  using SharedGate = std::shared_ptr<std::atomic<Gate>>;

  CpuKernel(CpuHandler handler, std::size_t rings, std::size_t state_nbytes);
  CpuKernel(const CpuKernel&) = delete;
  CpuKernel& operator=(const CpuKernel&) = delete;
  // A loop that does not end within a second (its handler never returns) is left behind.
  ~CpuKernel();

  // Starts the threads. `deadline_ns` 0: none. Throws what attach() throws for a damaged ring, and
  // DriverError when the system has no thread left; then none runs.
  void start(const std::vector<KernelPair>& pairs, u64 deadline_ns);
  bool ended() const noexcept;
  bool join(std::chrono::nanoseconds timeout);

  // Of one ring, `state_nbytes` long, zeroed at construction; the handler's while the loop runs.
  std::byte* state(std::size_t ring) noexcept;
  std::size_t state_nbytes() const noexcept;

  // Called by a handler that failed and cannot say so by its status: the loop ends with
  // EndReason::faulted before it answers that message.
  void fault(std::size_t ring) noexcept;

 private:
  struct Shared;
  static void make_thread(const std::shared_ptr<Shared>& shared, const SharedGate& gate,
                          CpuLoop&& loop);

  std::shared_ptr<Shared> shared_;
};

}  // namespace ringmem::ring
