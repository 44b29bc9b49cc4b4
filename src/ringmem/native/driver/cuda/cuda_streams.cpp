// Copies, fills, streams and events.
#include "driver/cuda/cuda_calls.hpp"

namespace ringmem {

using F = CudaFunctions;
using cuda::event;
using cuda::into;
using cuda::stream;

// --- copies and fills ----------------------------------------------------------------------------

Status CudaDriver::copy_async(int device, DevicePtr dst, DevicePtr src, std::size_t nbytes,
                              StreamHandle handle) noexcept {
  return within(device, &F::MemcpyAsync, CUdeviceptr{dst}, CUdeviceptr{src}, nbytes,
                stream(handle));
}

Status CudaDriver::copy_2d_async(int device, const Copy2D& copy, StreamHandle handle) noexcept {
  CUDA_MEMCPY2D cu_copy{};
  cu_copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  cu_copy.srcDevice = copy.src;
  cu_copy.srcPitch = copy.src_pitch;
  cu_copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  cu_copy.dstDevice = copy.dst;
  cu_copy.dstPitch = copy.dst_pitch;
  cu_copy.WidthInBytes = copy.width;
  cu_copy.Height = copy.height;
  return within(device, &F::Memcpy2DAsync, &cu_copy, stream(handle));
}

// The default stream is that of `dst_device`.
Status CudaDriver::copy_peer_async(int dst_device, DevicePtr dst, int src_device, DevicePtr src,
                                   std::size_t nbytes, StreamHandle handle) noexcept {
  if (Status status = check_device(dst_device); !ok(status)) return status;
  if (Status status = check_device(src_device); !ok(status)) return status;
  CUcontext dst_context = nullptr;
  CUcontext src_context = nullptr;
  if (Status status = state_->primary(dst_device, &dst_context); !ok(status)) return status;
  if (Status status = state_->primary(src_device, &src_context); !ok(status)) return status;
  return within(dst_device, &F::MemcpyPeerAsync, CUdeviceptr{dst}, dst_context, CUdeviceptr{src},
                src_context, nbytes, stream(handle));
}

Status CudaDriver::fill_async(int device, DevicePtr ptr, std::uint32_t value, int value_bytes,
                              std::size_t count, StreamHandle handle) noexcept {
  const CUdeviceptr to = ptr;
  switch (value_bytes) {
    case 1:
      return within(device, &F::MemsetD8Async, to, static_cast<unsigned char>(value), count,
                    stream(handle));
    case 2:
      return within(device, &F::MemsetD16Async, to, static_cast<unsigned short>(value), count,
                    stream(handle));
    case 4:
      return within(device, &F::MemsetD32Async, to, value, count, stream(handle));
    default:
      return Status::invalid_value;
  }
}

// --- streams -------------------------------------------------------------------------------------

Status CudaDriver::stream_create(int device, StreamFlags flags, StreamHandle* handle) noexcept {
  const unsigned bits = flags.non_blocking ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
  return into<CUstream>(handle, [&](CUstream* out) {
    return within(device, &F::StreamCreateWithPriority, out, bits, flags.priority);
  });
}

Status CudaDriver::stream_destroy(int device, StreamHandle handle) noexcept {
  return within(device, &F::StreamDestroy, stream(handle));
}

// Of a stream with a handle of its own; needs no context.
bool CudaDriver::captures(StreamHandle handle) const noexcept {
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  return handle > per_thread_stream &&
         ok(cuda::call(state_->library.functions.StreamIsCapturing, stream(handle), &state)) &&
         state != CU_STREAM_CAPTURE_STATUS_NONE;
}

// The driver would refuse these two as well, and spoil the capture.

Status CudaDriver::stream_query(int device, StreamHandle handle) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  if (captures(handle)) return Status::stream_capture_unsupported;
  return within(device, &F::StreamQuery, stream(handle));
}

Status CudaDriver::stream_synchronize(int device, StreamHandle handle) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  if (captures(handle)) return Status::stream_capture_unsupported;
  return within(device, &F::StreamSynchronize, stream(handle));
}

Status CudaDriver::stream_wait_event(int device, StreamHandle handle,
                                     EventHandle waited) noexcept {
  return within(device, &F::StreamWaitEvent, stream(handle), event(waited),
                unsigned{CU_EVENT_WAIT_DEFAULT});
}

namespace {

// Before cuStreamGetDevice (12.8), and of a stream that captures, which that call would spoil: the
// device of the stream's context.
Status device_by_context(const CudaFunctions& cu, CUstream of, CUdevice* device) noexcept {
  CUcontext context = nullptr;
  if (Status status = cuda::call(cu.StreamGetCtx, of, &context); !ok(status)) return status;
  if (Status status = cuda::call(cu.CtxPushCurrent, context); !ok(status)) return status;
  const Status status = cuda::call(cu.CtxGetDevice, device);
  cuda::call(cu.CtxPopCurrent, &context);
  return status;
}

}  // namespace

// A default stream is of every device: the driver answers for the caller's current context.
Status CudaDriver::stream_device(StreamHandle handle, int* device) noexcept {
  if (Status status = ready(); !ok(status)) return status;
  const CudaFunctions& cu = state_->library.functions;
  const Relaxed relaxed(cu);
  CUdevice cu_device = 0;
  const Status status = cu.StreamGetDevice && !captures(handle)
                            ? cuda::call(cu.StreamGetDevice, stream(handle), &cu_device)
                            : device_by_context(cu, stream(handle), &cu_device);
  if (!ok(status)) return status;
  const auto& devices = state_->library.devices;
  for (std::size_t ordinal = 0; ordinal < devices.size(); ++ordinal) {
    if (devices[ordinal] != cu_device) continue;
    *device = static_cast<int>(ordinal);
    return Status::success;
  }
  return Status::invalid_device;
}

Status CudaDriver::stream_capturing(int device, StreamHandle handle, bool* capturing) noexcept {
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  const Status status = within(device, &F::StreamIsCapturing, stream(handle), &state);
  // The legacy default stream while another that waits for it captures: nothing runs on it either.
  const bool implicit = status == Status::stream_capture_implicit;
  if (!ok(status) && !implicit) return status;
  *capturing = implicit || state != CU_STREAM_CAPTURE_STATUS_NONE;
  return Status::success;
}

Status CudaDriver::stream_wait_value(int device, StreamHandle handle, DevicePtr ptr,
                                     std::uint32_t value) noexcept {
  return within(device, &F::StreamWaitValue32, stream(handle), CUdeviceptr{ptr}, value,
                unsigned{CU_STREAM_WAIT_VALUE_GEQ});
}

Status CudaDriver::stream_write_value(int device, StreamHandle handle, DevicePtr ptr,
                                      std::uint32_t value) noexcept {
  return within(device, &F::StreamWriteValue32, stream(handle), CUdeviceptr{ptr}, value,
                unsigned{CU_STREAM_WRITE_VALUE_DEFAULT});
}

Status CudaDriver::launch_host_function(int device, StreamHandle handle, HostFunction function,
                                        void* argument) noexcept {
  return within(device, &F::LaunchHostFunc, stream(handle), function, argument);
}

// --- events --------------------------------------------------------------------------------------

Status CudaDriver::event_create(int device, EventFlags flags, EventHandle* handle) noexcept {
  const unsigned bits = (flags.timing ? 0u : unsigned{CU_EVENT_DISABLE_TIMING}) |
                        (flags.blocking_sync ? unsigned{CU_EVENT_BLOCKING_SYNC} : 0u);
  return into<CUevent>(
      handle, [&](CUevent* out) { return within(device, &F::EventCreate, out, bits); });
}

Status CudaDriver::event_destroy(int device, EventHandle handle) noexcept {
  return within(device, &F::EventDestroy, event(handle));
}

Status CudaDriver::event_record(int device, EventHandle recorded, StreamHandle handle) noexcept {
  return within(device, &F::EventRecord, event(recorded), stream(handle));
}

Status CudaDriver::event_query(int device, EventHandle handle) noexcept {
  return within(device, &F::EventQuery, event(handle));
}

Status CudaDriver::event_synchronize(int device, EventHandle handle) noexcept {
  return within(device, &F::EventSynchronize, event(handle));
}

Status CudaDriver::event_elapsed(int device, EventHandle start, EventHandle end,
                                 float* milliseconds) noexcept {
  return into<float>(milliseconds, [&](float* out) {
    return within(device, &F::EventElapsedTime, out, event(start), event(end));
  });
}

}  // namespace ringmem
