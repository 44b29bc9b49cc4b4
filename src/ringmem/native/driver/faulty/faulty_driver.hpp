// A driver around another one that fails the n-th call of an operation, delays calls, counts live
// objects and pretends that graphs are captured. It is how tests prove that whatever fails, nothing
// is lost.
#pragma once

#include <cstdint>

#include "driver/driver.hpp"
#include "driver/faulty/captures.hpp"
#include "driver/faulty/fault_plan.hpp"
#include "driver/faulty/live_objects.hpp"

namespace ringmem {

// What "failed afterwards" means: copies, fills, settings and releases have happened although the
// status says otherwise. Where success would have handed something to the caller (an allocation, a
// handle, a mapping, a registration, a descriptor, peer access), that is destroyed again first, so
// a caller that believes the status loses nothing. A host function that "failed" is never called.
class FaultyDriver final : public Driver {
 public:
  explicit FaultyDriver(DriverRef inner);

  FaultPlan& plan() noexcept { return plan_; }
  const LiveObjects& live() const noexcept { return live_; }
  Captures& captures() noexcept { return captures_; }
  const DriverRef& inner() const noexcept { return inner_; }

#include "driver/overrides.inc"

 private:
  template <class Call>
  Status act(Operation operation, int device, Call&& call);
  template <class T, class Call>
  Status query(Operation operation, int device, T* out, Call&& call);
  template <class T, class Call, class Undo>
  Status make(Operation operation, int device, T* out, Call&& call, Undo&& undo);
  template <class T, class Call, class Undo>
  Status create(Operation operation, int device, LiveKind kind, T* out, Call&& call, Undo&& undo);
  template <class Call, class Undo>
  Status attach(Operation operation, int device, LiveKind kind, std::uint64_t key, Call&& call,
                Undo&& undo);
  template <class Call>
  Status release(Operation operation, int device, std::initializer_list<LiveKind> kinds,
                 std::uint64_t key, Call&& call, std::uint64_t length = 1);

  DriverRef inner_;
  FaultPlan plan_;
  LiveObjects live_;
  Captures captures_;
};

}  // namespace ringmem
