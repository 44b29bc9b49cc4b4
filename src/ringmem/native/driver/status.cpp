#include "driver/status.hpp"

#include "driver/fork.hpp"

namespace ringmem {
namespace {

struct Entry {
  Status status;
  const char* name;
  const char* description;  // of not_initialized: see fork.hpp
};

constexpr Entry entries[] = {
    {Status::success, "CUDA_SUCCESS", "no error"},
    {Status::invalid_value, "CUDA_ERROR_INVALID_VALUE", "an argument is outside its valid range"},
    {Status::out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", "not enough memory"},
    {Status::not_initialized, "CUDA_ERROR_NOT_INITIALIZED", nullptr},
    {Status::deinitialized, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down"},
    {Status::stub_library, "CUDA_ERROR_STUB_LIBRARY", "the driver library is a stub"},
    {Status::call_requires_newer_driver, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
     "the call needs a newer driver"},
    {Status::no_device, "CUDA_ERROR_NO_DEVICE", "there is no device"},
    {Status::invalid_device, "CUDA_ERROR_INVALID_DEVICE", "there is no such device"},
    {Status::invalid_context, "CUDA_ERROR_INVALID_CONTEXT", "no valid context is current"},
    {Status::map_failed, "CUDA_ERROR_MAP_FAILED", "mapping failed"},
    {Status::unmap_failed, "CUDA_ERROR_UNMAP_FAILED", "unmapping failed"},
    {Status::already_mapped, "CUDA_ERROR_ALREADY_MAPPED", "the address is mapped already"},
    {Status::not_mapped, "CUDA_ERROR_NOT_MAPPED", "the address is not mapped"},
    {Status::peer_access_unsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "the devices cannot access each other's memory"},
    {Status::file_not_found, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {Status::shared_object_symbol_not_found, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND",
     "the driver lacks this function"},
    {Status::operating_system, "CUDA_ERROR_OPERATING_SYSTEM", "a call of the operating system failed"},
    {Status::invalid_handle, "CUDA_ERROR_INVALID_HANDLE", "the handle is not valid"},
    {Status::illegal_state, "CUDA_ERROR_ILLEGAL_STATE", "a resource is in the wrong state"},
    {Status::not_found, "CUDA_ERROR_NOT_FOUND", "a named thing was not found"},
    {Status::not_ready, "CUDA_ERROR_NOT_READY", "work has not completed yet"},
    {Status::illegal_address, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "the device touched memory that is not mapped for it; the device is unusable from here on"},
    {Status::peer_access_already_enabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is enabled already"},
    {Status::peer_access_not_enabled, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
     "peer access is not enabled"},
    {Status::context_is_destroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the context is gone"},
    {Status::host_memory_already_registered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "the host memory is page-locked already"},
    {Status::host_memory_not_registered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "the host memory was not page-locked by registration"},
    {Status::misaligned_address, "CUDA_ERROR_MISALIGNED_ADDRESS", "the address is misaligned"},
    {Status::launch_failed, "CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"},
    {Status::not_permitted, "CUDA_ERROR_NOT_PERMITTED", "the operation is not permitted"},
    {Status::not_supported, "CUDA_ERROR_NOT_SUPPORTED",
     "the device or its driver cannot do this"},
    {Status::system_not_ready, "CUDA_ERROR_SYSTEM_NOT_READY", "the system is not ready"},
    {Status::stream_capture_unsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "not permitted while the stream is capturing"},
    {Status::stream_capture_invalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "an earlier error spoiled the capture of the graph"},
    {Status::stream_capture_unjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "a stream that joined the capture has work that the capturing stream never waited for"},
    {Status::stream_capture_isolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "work inside and outside the capture of a graph cannot wait for each other"},
    {Status::stream_capture_implicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "would depend on a capturing stream"},
    {Status::captured_event, "CUDA_ERROR_CAPTURED_EVENT",
     "the event was last recorded in the capture of a graph"},
    {Status::timeout, "CUDA_ERROR_TIMEOUT", "the time was up"},
    {Status::unknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Entry* find(Status status) noexcept {
  for (const Entry& entry : entries) {
    if (entry.status == status) return &entry;
  }
  return nullptr;
}

std::string message(Status status, const std::string& operation, const std::string& detail) {
  std::string text = operation + " failed: " + status_name(status) + " (" +
                     std::to_string(static_cast<int>(status)) + "): " + status_description(status);
  if (!detail.empty()) text += "; " + detail;
  return text;
}

}  // namespace

std::string status_name(Status status) {
  const Entry* entry = find(status);
  return entry ? entry->name : "CUDA_ERROR_" + std::to_string(static_cast<int>(status));
}

const char* status_description(Status status) noexcept {
  if (status == Status::not_initialized) return not_initialized_reason();
  const Entry* entry = find(status);
  return entry ? entry->description : "an error without a name here";
}

DriverError::DriverError(Status s, std::string op, std::string more)
    : std::runtime_error(message(s, op, more)),
      status(s),
      operation(std::move(op)),
      detail(std::move(more)) {}

OutOfMemory::OutOfMemory(std::string op, const Shortage& known, std::string more)
    : DriverError(Status::out_of_memory, std::move(op), std::move(more)), shortage(known) {}

}  // namespace ringmem
