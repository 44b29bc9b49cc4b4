// The CUDA driver as a Driver. Loads the library at its first operation; binds the primary context
// of the device around every call that needs one and leaves the caller's context as it was. No call
// spoils a graph capture elsewhere in the process, but for synchronize(), which the driver refuses.
#pragma once

#include <memory>
#include <string>

#include "driver/driver.hpp"

namespace ringmem {

// Without a usable driver every operation is not_initialized; so it is in the child of a fork that
// came after loading, since CUDA does not survive one. A function that the driver lacks is
// not_supported. Primary contexts are retained at their first use and kept.
class CudaDriver final : public Driver {
 public:
  CudaDriver();
  ~CudaDriver() override;

  // Why there is no usable driver; empty where there is one. Loads it.
  const std::string& load_error() const noexcept;
  // What is asked for: "libcuda.so.1", or the value of RINGMEM_CUDA_LIBRARY. Loads it.
  const std::string& library() const noexcept;

#include "driver/overrides.inc"

 private:
  struct State;
  class Scope;
  class Relaxed;

  // Loads at the first call; not_initialized where that failed.
  inline Status ready() const noexcept;
  Status load() const noexcept;  // its slow half
  inline Status check_device(int device) const noexcept;
  bool captures(StreamHandle handle) const noexcept;
  Status check_locations(const AccessGrant* grants, std::size_t count) const noexcept;

  // Calls a function of the library with no context, or in that of `device`.
  template <class Function, class... Arguments>
  Status plain(Function function, Arguments... arguments) const noexcept;
  template <class Function, class... Arguments>
  Status within(int device, Function function, Arguments... arguments) const noexcept;
  // One that needs the context only where `stream` is a default one, as a stream of its own has one.
  template <class Function, class... Arguments>
  Status ordered(int device, StreamHandle stream, Function function,
                 Arguments... arguments) const noexcept;

  std::unique_ptr<State> state_;
};

// The one CUDA driver of the process. Never destroyed.
const std::shared_ptr<CudaDriver>& cuda_driver();

}  // namespace ringmem
