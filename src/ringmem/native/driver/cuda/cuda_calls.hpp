// What the files of CudaDriver share: its state, the context scope, and the casts between the
// waist's numbers and CUDA's types.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>

#include "driver/cuda/cuda_driver.hpp"
#include "driver/cuda/cuda_library.hpp"
#include "driver/fork.hpp"

namespace ringmem {

struct CudaDriver::State {
  std::once_flag once;
  std::atomic<bool> usable{false};  // loaded, and a driver is there: set last
  CudaLibrary library;
  std::unique_ptr<std::atomic<CUcontext>[]> contexts;  // primary, by ordinal; null: not retained

  // Set in the child of a fork when the driver was in use before. A flag instead of getpid, which is
  // a system call.
  static inline std::atomic<bool> lost_by_fork{false};

  // The primary context; retained at the first call. `device` has been checked.
  Status primary(int device, CUcontext* context) noexcept {
    *context = contexts[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
    return *context ? Status::success : retain(device, context);
  }
  Status retain(int device, CUcontext* context) noexcept;
};

inline Status CudaDriver::ready() const noexcept {
  if (!state_->usable.load(std::memory_order_acquire)) [[unlikely]] return load();
  return State::lost_by_fork.load(std::memory_order_relaxed) ? refused_in_child()
                                                             : Status::success;
}

inline Status CudaDriver::check_device(int device) const noexcept {
  if (Status status = ready(); !ok(status)) return status;
  return static_cast<std::size_t>(device) < state_->library.devices.size()
             ? Status::success
             : Status::invalid_device;  // a negative one is a large one here
}

// The calling thread is in the relaxed capture mode in this scope, in its own again after it. Around
// every call, since most (a query, a release, an asynchronous allocation) spoil a graph capture
// elsewhere in the process otherwise; it costs 15 ns.
class CudaDriver::Relaxed {
 public:
  explicit Relaxed(const CudaFunctions& cu) noexcept
      : exchange_(cu.ThreadExchangeStreamCaptureMode),
        switched_(exchange_ && exchange_(&mode_) == CUDA_SUCCESS) {}
  ~Relaxed() {
    if (switched_) exchange_(&mode_);
  }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const decltype(CudaFunctions::ThreadExchangeStreamCaptureMode) exchange_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  const bool switched_;
};

// The primary context of a device is current in this scope, the caller's again after it.
class CudaDriver::Scope {
 public:
  Scope(State& state, int device) noexcept : cu_(state.library.functions) {
    CUcontext wanted = nullptr;
    CUcontext current = nullptr;
    status_ = state.primary(device, &wanted);
    if (!ok(status_)) return;
    status_ = static_cast<Status>(cu_.CtxGetCurrent(&current));
    if (!ok(status_) || current == wanted) return;
    status_ = static_cast<Status>(cu_.CtxPushCurrent(wanted));
    pushed_ = ok(status_);
  }
  ~Scope() {
    CUcontext popped = nullptr;
    if (pushed_) cu_.CtxPopCurrent(&popped);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  Status status() const noexcept { return status_; }

 private:
  const CudaFunctions& cu_;
  Status status_;
  bool pushed_ = false;
};

namespace cuda {

// A missing function is not_supported.
template <class Function, class... Arguments>
Status call(Function function, Arguments... arguments) noexcept {
  return function ? static_cast<Status>(function(arguments...)) : Status::not_supported;
}

// Writes `result` from what `call` gave in CUDA's own type, and only on success.
template <class Raw, class Result, class Call>
Status into(Result* result, Call&& call) noexcept {
  Raw raw{};
  const Status status = call(&raw);
  if (ok(status)) {
    if constexpr (std::is_pointer_v<Raw> && !std::is_pointer_v<Result>) {
      *result = reinterpret_cast<std::uintptr_t>(raw);
    } else {
      *result = static_cast<Result>(raw);
    }
  }
  return status;
}

inline void* pointer(std::uint64_t number) noexcept {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(number));
}
inline CUstream stream(StreamHandle handle) noexcept {
  return static_cast<CUstream>(pointer(handle));
}
inline CUevent event(EventHandle handle) noexcept { return static_cast<CUevent>(pointer(handle)); }
inline CUmemoryPool pool(PoolHandle handle) noexcept {
  return static_cast<CUmemoryPool>(pointer(handle));
}
inline void* descriptor(int fd) noexcept { return pointer(static_cast<std::uint64_t>(fd)); }

inline CUmemLocation location(Location at) noexcept {
  CUmemLocation result{};
  result.type = at.kind == LocationKind::device ? CU_MEM_LOCATION_TYPE_DEVICE
                : at.kind == LocationKind::host ? CU_MEM_LOCATION_TYPE_HOST
                                                : CU_MEM_LOCATION_TYPE_HOST_NUMA;
  result.id = at.kind == LocationKind::host ? 0 : at.id;
  return result;
}

// Null when the host has no memory for it.
inline std::unique_ptr<CUmemAccessDesc[]> access_list(const AccessGrant* grants,
                                                      std::size_t count) noexcept {
  std::unique_ptr<CUmemAccessDesc[]> list(new (std::nothrow) CUmemAccessDesc[count]{});
  for (std::size_t i = 0; list && i < count; ++i) {
    list[i].location = location(grants[i].location);
    list[i].flags = static_cast<CUmemAccess_flags>(grants[i].access);
  }
  return list;
}

}  // namespace cuda

template <class Function, class... Arguments>
Status CudaDriver::plain(Function function, Arguments... arguments) const noexcept {
  if (Status status = ready(); !ok(status)) return status;
  const Relaxed relaxed(state_->library.functions);
  return cuda::call(state_->library.functions.*function, arguments...);
}

template <class Function, class... Arguments>
Status CudaDriver::within(int device, Function function, Arguments... arguments) const noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  if (!(state_->library.functions.*function)) return Status::not_supported;
  const Relaxed relaxed(state_->library.functions);
  const Scope scope(*state_, device);
  if (!ok(scope.status())) return scope.status();
  return cuda::call(state_->library.functions.*function, arguments...);
}

template <class Function, class... Arguments>
Status CudaDriver::ordered(int device, StreamHandle stream, Function function,
                           Arguments... arguments) const noexcept {
  if (stream <= per_thread_stream) return within(device, function, arguments...);
  if (Status status = check_device(device); !ok(status)) return status;
  const Relaxed relaxed(state_->library.functions);
  return cuda::call(state_->library.functions.*function, arguments...);
}

}  // namespace ringmem
