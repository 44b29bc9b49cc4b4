#include "ring/cpu_kernel.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "driver/fork.hpp"
#include "driver/status.hpp"
#include "ring/cpu_loop.hpp"
#include "ring/poller.hpp"

namespace ringmem::ring {

namespace {

void open_gate(std::atomic<CpuKernel::Gate>& gate, CpuKernel::Gate to) noexcept {
  gate.store(to);
  gate.notify_all();
}

}  // namespace

// What the threads and their owner share; it lives as long as the last of them.
struct CpuKernel::Shared {
  struct Ring {
    std::vector<std::byte> state;
    std::atomic<bool> fault{false};
  };

  explicit Shared(std::size_t count) : rings(count) {}

  CpuHandler handler;
  std::vector<Ring> rings;
  std::size_t state_nbytes = 0;
  std::uint64_t generation = fork_generation();
  std::mutex mutex;
  std::condition_variable done;
  std::size_t running = 0;
};

CpuKernel::CpuKernel(CpuHandler handler, std::size_t rings, std::size_t state_nbytes)
    : shared_(std::make_shared<Shared>(rings)) {
  shared_->handler = handler;
  shared_->state_nbytes = state_nbytes;
  for (Shared::Ring& ring : shared_->rings) ring.state.resize(state_nbytes + 2 * guard_nbytes);
}

CpuKernel::~CpuKernel() {
  if (shared_->generation == fork_generation()) join(std::chrono::seconds(1));
}

// No loop runs before all threads are there: those that spin would leave no core to make the rest.
void CpuKernel::make_thread(const std::shared_ptr<Shared>& shared, const SharedGate& gate,
                            CpuLoop&& loop) {
  {
    std::lock_guard lock(shared->mutex);
    ++shared->running;
  }
  try {
    std::thread([shared, gate, loop = std::move(loop)]() mutable {
      pthread_setname_np(pthread_self(), "ringmem-ring");
      prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // ns; the default of 50 µs would double a nap
      gate->wait(Gate::shut);
      if (gate->load() == Gate::open) loop.run();
      std::lock_guard lock(shared->mutex);
      --shared->running;
      shared->done.notify_all();
    }).detach();
  } catch (...) {
    std::lock_guard lock(shared->mutex);
    --shared->running;
    throw;
  }
}

void CpuKernel::start(const std::vector<KernelPair>& pairs, u64 deadline_ns) {
  if (!ended()) throw InvalidValue("the kernel is running");
  if (pairs.size() != shared_->rings.size()) {
    throw InvalidValue(std::to_string(pairs.size()) + " ring pairs given for " +
                       std::to_string(shared_->rings.size()) + " rings");
  }
  std::vector<CpuLoop> loops;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    Shared::Ring& ring = shared_->rings[i];
    ring.fault.store(false);
    std::memset(state(i) - guard_nbytes, guard_byte, guard_nbytes);
    std::memset(state(i) + shared_->state_nbytes, guard_byte, guard_nbytes);
    loops.emplace_back(pairs[i], shared_->handler, State{state(i), shared_->state_nbytes}, ring.fault,
                       deadline_ns);
  }
  const auto gate = std::make_shared<std::atomic<Gate>>(Gate::shut);
  std::size_t made = 0;
  try {
    for (CpuLoop& loop : loops) {
      make_thread(shared_, gate, std::move(loop));
      ++made;
    }
  } catch (const std::exception& error) {
    open_gate(*gate, Gate::cancelled);
    join(std::chrono::seconds(1));
    throw DriverError(Status::operating_system, "pthread_create",
                      std::string(error.what()) + " after " + std::to_string(made) + " of " +
                          std::to_string(loops.size()) + " rings");
  }
  open_gate(*gate, Gate::open);
}

bool CpuKernel::ended() const noexcept {
  std::lock_guard lock(shared_->mutex);
  return shared_->running == 0;
}

bool CpuKernel::join(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(shared_->mutex);
  return shared_->done.wait_for(lock, timeout, [this] { return shared_->running == 0; });
}

std::byte* CpuKernel::state(std::size_t ring) noexcept {
  return shared_->rings[ring].state.data() + guard_nbytes;
}

std::size_t CpuKernel::state_nbytes() const noexcept { return shared_->state_nbytes; }

void CpuKernel::fault(std::size_t ring) noexcept {
  shared_->rings[ring].fault.store(true, std::memory_order_relaxed);
}

}  // namespace ringmem::ring
