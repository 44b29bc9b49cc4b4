// Loading, contexts and devices.
#include "driver/cuda/cuda_driver.hpp"

#include <pthread.h>

#include <cstdio>

#include "driver/cuda/cuda_calls.hpp"

namespace ringmem {
namespace {

using F = CudaFunctions;

const std::string& fork_error() noexcept {
  static const std::string text = fork_explanation;
  return text;
}

}  // namespace

CudaDriver::CudaDriver() : state_(std::make_unique<State>()) {}
CudaDriver::~CudaDriver() = default;

const std::shared_ptr<CudaDriver>& cuda_driver() {
  static const auto* driver = new std::shared_ptr<CudaDriver>(std::make_shared<CudaDriver>());
  return *driver;
}

Status CudaDriver::load() const noexcept {
  std::call_once(state_->once, [this] {
    State& state = *state_;
    state.library = load_cuda_library();
    const std::size_t count = state.library.devices.size();
    state.contexts = std::make_unique<std::atomic<CUcontext>[]>(count);
    if (!state.library.error.empty()) return;
    pthread_atfork(nullptr, nullptr, [] { State::lost_by_fork.store(true); });
    state.usable.store(true, std::memory_order_release);
  });
  if (!state_->usable.load(std::memory_order_acquire)) return no_driver();
  return State::lost_by_fork.load(std::memory_order_relaxed) ? refused_in_child()
                                                             : Status::success;
}

const std::string& CudaDriver::load_error() const noexcept {
  return !ok(ready()) && State::lost_by_fork.load() ? fork_error() : state_->library.error;
}

const std::string& CudaDriver::library() const noexcept {
  (void)ready();
  return state_->library.path;
}

Status CudaDriver::check_locations(const AccessGrant* grants, std::size_t count) const noexcept {
  if (Status status = ready(); !ok(status)) return status;
  if (count == 0) return Status::invalid_value;
  for (std::size_t i = 0; i < count; ++i) {
    if (grants[i].location.kind != LocationKind::device) continue;
    if (Status status = check_device(grants[i].location.id); !ok(status)) return status;
  }
  return Status::success;
}

// No lock: retaining takes long, and twice is harmless where the loser gives its reference back.
Status CudaDriver::State::retain(int device, CUcontext* context) noexcept {
  std::atomic<CUcontext>& slot = contexts[static_cast<std::size_t>(device)];
  CUcontext known = slot.load(std::memory_order_acquire);
  if (!known) {
    const CUdevice cu_device = library.devices[static_cast<std::size_t>(device)];
    CUcontext retained = nullptr;
    if (CUresult r = library.functions.DevicePrimaryCtxRetain(&retained, cu_device)) {
      return static_cast<Status>(r);
    }
    if (slot.compare_exchange_strong(known, retained, std::memory_order_acq_rel)) {
      known = retained;
    } else {
      library.functions.DevicePrimaryCtxRelease(cu_device);
    }
  }
  *context = known;
  return Status::success;
}

const char* CudaDriver::platform() const noexcept { return "cuda"; }

Status CudaDriver::device_count(int* count) noexcept {
  if (Status status = ready(); !ok(status)) return status;
  *count = static_cast<int>(state_->library.devices.size());
  return Status::success;
}

Status CudaDriver::driver_version(int* version) noexcept {
  if (Status status = ready(); !ok(status)) return status;
  *version = state_->library.version;
  return Status::success;
}

Status CudaDriver::device_info(int device, DeviceInfo* info) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  const CUdevice cu_device = state_->library.devices[static_cast<std::size_t>(device)];
  char name[256] = {};
  if (Status s = plain(&F::DeviceGetName, name, int{sizeof name - 1}, cu_device); !ok(s)) return s;
  CUuuid uuid{};
  if (Status s = plain(&F::DeviceGetUuid, &uuid, cu_device); !ok(s)) return s;
  char text[48] = "GPU";
  int length = 3;
  for (int i = 0; i < 16; ++i) {
    const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    length += std::snprintf(text + length, sizeof text - static_cast<std::size_t>(length),
                            dash ? "-%02x" : "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  info->name = name;
  info->uuid = text;
  return Status::success;
}

Status CudaDriver::attribute(int device, Attribute attribute, int* value) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  return plain(&F::DeviceGetAttribute, value, static_cast<CUdevice_attribute>(attribute),
               state_->library.devices[static_cast<std::size_t>(device)]);
}

Status CudaDriver::memory_info(int device, MemoryInfo* info) noexcept {
  MemoryInfo result;
  const Status status = within(device, &F::MemGetInfo, &result.free, &result.total);
  if (ok(status)) *info = result;
  return status;
}

Status CudaDriver::synchronize(int device) noexcept { return within(device, &F::CtxSynchronize); }

Status CudaDriver::primary_context(int device, std::uint64_t* context) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  return cuda::into<CUcontext>(
      context, [&](CUcontext* out) { return state_->primary(device, out); });
}

// --- peers ---------------------------------------------------------------------------------------

Status CudaDriver::peer_can_access(int device, int peer, bool* can) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  if (Status status = check_device(peer); !ok(status)) return status;
  const auto& devices = state_->library.devices;
  return cuda::into<int>(can, [&](int* out) {
    return plain(&F::DeviceCanAccessPeer, out, devices[static_cast<std::size_t>(device)],
                 devices[static_cast<std::size_t>(peer)]);
  });
}

Status CudaDriver::peer_enable(int device, int peer) noexcept {
  if (Status status = check_device(peer); !ok(status)) return status;
  CUcontext context = nullptr;
  if (Status status = state_->primary(peer, &context); !ok(status)) return status;
  return within(device, &F::CtxEnablePeerAccess, context, 0u);
}

Status CudaDriver::peer_disable(int device, int peer) noexcept {
  if (Status status = check_device(peer); !ok(status)) return status;
  CUcontext context = nullptr;
  if (Status status = state_->primary(peer, &context); !ok(status)) return status;
  return within(device, &F::CtxDisablePeerAccess, context);
}

Status CudaDriver::relax_capture(bool relaxed, bool* previous) noexcept {
  // The mode that this thread had before we relaxed it, and whether we did: an application's own
  // mode is put back exactly, and never changed by a "back" without a "there".
  thread_local CUstreamCaptureMode before = CU_STREAM_CAPTURE_MODE_GLOBAL;
  thread_local bool ours = false;
  if (Status status = ready(); !ok(status)) return status;
  if (!relaxed && !ours) {
    *previous = false;
    return Status::success;
  }
  CUstreamCaptureMode mode = relaxed ? CU_STREAM_CAPTURE_MODE_RELAXED : before;
  const Status status =
      cuda::call(state_->library.functions.ThreadExchangeStreamCaptureMode, &mode);
  if (!ok(status)) return status;
  *previous = mode == CU_STREAM_CAPTURE_MODE_RELAXED;
  if (relaxed && !*previous) before = mode;
  ours = relaxed && (ours || !*previous);
  return status;
}

}  // namespace ringmem
