// Handles that buffers of one kind on one device gave back, up to a bound in bytes, for the next
// buffer that grows. A handle is handed out only after its pages were filled with zero: the mapping
// thread does that at an address of its own, so nobody waits for it. Lives as long as a buffer
// that uses it, and is emptied when memory runs out.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "mapping/guard.hpp"
#include "mapping/physical.hpp"
#include "mapping/worker.hpp"

namespace ringmem::mapping {

class Recycler final : public Job, public std::enable_shared_from_this<Recycler> {
 public:
  // The one for memory like this; shared by everybody who holds it.
  static std::shared_ptr<Recycler> of(const DriverRef& driver, const PhysicalProps& props);

  // Bytes that a recycler keeps at most; 0 keeps none. For all of them, from now on.
  static void set_limit(std::size_t nbytes) noexcept;
  static std::size_t limit() noexcept;

  Recycler(DriverRef driver, const PhysicalProps& props) noexcept
      : driver_(std::move(driver)), props_(props) {}
  ~Recycler() override;

  // A zeroed handle of exactly `nbytes`, or null.
  PhysicalRef take(std::size_t nbytes) noexcept;
  // Unmapped memory that nobody else uses. What is over the bound, was exported, or is no device
  // memory is released instead. Returns what a release said.
  Status offer(PhysicalRef memory) noexcept;
  // Releases everything that is kept.
  void drain() noexcept;
  // All of one driver: before anybody is told that memory is out.
  static void drain_all(const Driver& driver) noexcept;

  std::size_t kept() const noexcept { return kept_.load(std::memory_order_relaxed); }
  std::size_t ready() noexcept;  // bytes of these that take() can hand out
  Progress step() noexcept override;

 private:
  struct Cleaning {
    PhysicalRef memory;
    DevicePtr ptr = 0;  // where it is mapped for the fill
    std::shared_ptr<Guard> guard;
    bool unmap_failed = false;
  };

  bool begin_cleaning(Cleaning& cleaning) noexcept;
  bool end_cleaning(Cleaning& cleaning) noexcept;
  void forget(PhysicalRef& memory) noexcept;

  DriverRef driver_;
  PhysicalProps props_;
  ProcessMark process_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<PhysicalRef>> clean_;
  std::deque<PhysicalRef> dirty_;
  std::atomic<std::size_t> kept_{0};  // bytes in clean_, dirty_ and cleaning_
  // The mapping thread's own.
  std::vector<Cleaning> cleaning_;
  StreamHandle stream_ = 0;
};

}  // namespace ringmem::mapping
