// The result of a driver call. Numbers and names are the CUDA driver's (CUresult), so that a
// simulated failure reads like a real one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace ringmem {

enum class Status : std::int32_t {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  deinitialized = 4,
  stub_library = 34,
  call_requires_newer_driver = 36,
  no_device = 100,
  invalid_device = 101,
  invalid_context = 201,
  map_failed = 205,
  unmap_failed = 206,
  already_mapped = 208,
  not_mapped = 211,
  peer_access_unsupported = 217,
  file_not_found = 301,
  shared_object_symbol_not_found = 302,
  operating_system = 304,
  invalid_handle = 400,
  illegal_state = 401,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  peer_access_already_enabled = 704,
  peer_access_not_enabled = 705,
  context_is_destroyed = 709,
  host_memory_already_registered = 712,
  host_memory_not_registered = 713,
  misaligned_address = 716,
  launch_failed = 719,
  not_permitted = 800,
  not_supported = 801,
  system_not_ready = 802,
  stream_capture_unsupported = 900,
  stream_capture_invalidated = 901,
  stream_capture_unjoined = 904,
  stream_capture_isolation = 905,
  stream_capture_implicit = 906,
  captured_event = 907,
  timeout = 909,
  unknown = 999,
};

[[nodiscard]] constexpr bool ok(Status status) noexcept { return status == Status::success; }

// The capture of a graph is in the way: the same call may succeed once it is over.
[[nodiscard]] constexpr bool forbidden_by_capture(Status status) noexcept {
  return status == Status::stream_capture_unsupported ||
         status == Status::stream_capture_isolation || status == Status::stream_capture_implicit;
}

// "CUDA_ERROR_OUT_OF_MEMORY" for Status::out_of_memory; "CUDA_ERROR_<code>" for one without a name.
std::string status_name(Status status);

// One short sentence on what the status means.
const char* status_description(Status status) noexcept;

// What native code throws when a driver call failed. The binding turns it into the Python class
// that belongs to `status`; `operation` is the driver's name of the call, e.g. "cuMemCreate".
class DriverError : public std::runtime_error {
 public:
  DriverError(Status status, std::string operation, std::string detail = {});

  Status status;
  std::string operation;
  std::string detail;
};

// What whoever raised it knows when memory ran out, in bytes.
struct Shortage {
  std::optional<std::size_t> requested;
  std::optional<std::size_t> free;
  std::optional<std::size_t> largest_free_block;
  std::optional<std::size_t> reserved;
};

// Status::out_of_memory with figures: OutOfMemoryError in Python has them as attributes.
class OutOfMemory : public DriverError {
 public:
  OutOfMemory(std::string operation, const Shortage& shortage, std::string detail = {});

  Shortage shortage;
};

// An argument that would be wrong on every device: names the argument, its value, what would do.
class InvalidValue : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Use of an object after close().
class Closed : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void check(Status status, const char* operation, std::string detail = {}) {
  if (!ok(status)) [[unlikely]] {
    throw DriverError(status, operation, std::move(detail));
  }
}

}  // namespace ringmem
