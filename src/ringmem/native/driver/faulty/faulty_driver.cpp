#include "driver/faulty/faulty_driver.hpp"

#include <unistd.h>

#include <thread>
#include <utility>

namespace ringmem {

using K = LiveKind;

FaultyDriver::FaultyDriver(DriverRef inner) : inner_(std::move(inner)) {}

const char* FaultyDriver::platform() const noexcept { return inner_->platform(); }

// --- the five shapes of an operation -------------------------------------------------------------

namespace {

int device_of(Location location) noexcept {
  return location.kind == LocationKind::device ? location.id : FaultPlan::no_device;
}

void wait(std::chrono::duration<double> delay) {
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
}

std::uint64_t key_of(const void* ptr) noexcept { return reinterpret_cast<std::uintptr_t>(ptr); }
std::uint64_t key_of(std::uint64_t handle) noexcept { return handle; }

std::uint64_t link_key(int device, int peer) noexcept {
  return (static_cast<std::uint64_t>(device) << 32) | static_cast<std::uint32_t>(peer);
}

}  // namespace

// Does something; gives nothing back.
template <class Call>
Status FaultyDriver::act(Operation operation, int device, Call&& call) {
  const Verdict verdict = plan_.next(operation, device);
  wait(verdict.delay);
  if (!verdict.perform) return verdict.status;
  const Status status = call();
  return ok(status) ? verdict.status : status;
}

// Answers with a value; `out` is written only on success.
template <class T, class Call>
Status FaultyDriver::query(Operation operation, int device, T* out, Call&& call) {
  T value{};
  const Status status = act(operation, device, [&] { return call(&value); });
  if (ok(status)) *out = std::move(value);
  return status;
}

// Makes something that the caller must give back, not counted here; undone if to fail afterwards.
template <class T, class Call, class Undo>
Status FaultyDriver::make(Operation operation, int device, T* out, Call&& call, Undo&& undo) {
  T value{};
  bool made = false;
  const Status status = act(operation, device, [&] {
    const Status result = call(&value);
    made = ok(result);
    return result;
  });
  if (ok(status)) {
    *out = value;
  } else if (made) {
    undo(value);
  }
  return status;
}

// The same, and the new object counts as live.
template <class T, class Call, class Undo>
Status FaultyDriver::create(Operation operation, int device, LiveKind kind, T* out, Call&& call,
                            Undo&& undo) {
  T value{};
  const Status status = make(operation, device, &value, call, undo);
  if (ok(status)) {
    live_.add(kind, key_of(value));
    *out = value;
  }
  return status;
}

// Puts something into a state that the caller must end: `key` is live until then.
template <class Call, class Undo>
Status FaultyDriver::attach(Operation operation, int device, LiveKind kind, std::uint64_t key,
                            Call&& call, Undo&& undo) {
  std::uint64_t attached = 0;
  return create(
      operation, device, kind, &attached,
      [&](std::uint64_t* out) {
        *out = key;
        return call();
      },
      [&](std::uint64_t) { undo(); });
}

// Gives back the live objects of `kinds` whose key lies in [key, key + length).
template <class Call>
Status FaultyDriver::release(Operation operation, int device, std::initializer_list<LiveKind> kinds,
                             std::uint64_t key, Call&& call, std::uint64_t length) {
  return act(operation, device, [&] {
    const LiveObjects::Taken taken = live_.take(kinds, key, length);
    const Status status = call();
    if (!ok(status)) live_.put_back(taken);
    return status;
  });
}

// --- operations that only act or only answer -----------------------------------------------------

#define ACT(name, device, parameters, arguments)                                     \
  Status FaultyDriver::name parameters noexcept {                                    \
    return act(Operation::name, device, [&] { return inner_->name arguments; });     \
  }
// The last parameter is the output, `out` in the arguments.
// One that spoils the capture of a graph, or is refused because of one.
#define GUARDED(name, captures, device, parameters, arguments)                       \
  Status FaultyDriver::name parameters noexcept {                                    \
    return act(Operation::name, device, [&] {                                        \
      const Status status = captures;                                                \
      return ok(status) ? inner_->name arguments : status;                           \
    });                                                                              \
  }
#define QUERY(name, device, result, parameters, arguments)                           \
  Status FaultyDriver::name parameters noexcept {                                    \
    return query(Operation::name, device, result,                                    \
                 [&](auto* out) { return inner_->name arguments; });                 \
  }
inline constexpr int none = FaultPlan::no_device;
using size = std::size_t;

QUERY(device_count, none, count, (int* count), (out))
QUERY(driver_version, none, version, (int* version), (out))
QUERY(device_info, device, info, (int device, DeviceInfo* info), (device, out))
QUERY(attribute, device, value, (int device, Attribute which, int* value), (device, which, out))
QUERY(memory_info, device, info, (int device, MemoryInfo* info), (device, out))
GUARDED(synchronize, captures_.synchronize(), device, (int device), (device))
QUERY(primary_context, device, context, (int device, std::uint64_t* context), (device, out))
QUERY(host_device_pointer, device, dptr, (int device, void* ptr, DevicePtr* dptr),
      (device, ptr, out))
QUERY(pointer_info, device, info, (int device, DevicePtr ptr, PointerInfo* info),
      (device, ptr, out))
ACT(stream_attach, device,
    (int device, StreamHandle stream, DevicePtr ptr, size nbytes, ManagedAttach attach),
    (device, stream, ptr, nbytes, attach))
ACT(prefetch, device, (int device, DevicePtr ptr, size nbytes, Location to, StreamHandle stream),
    (device, ptr, nbytes, to, stream))
ACT(advise, device, (int device, DevicePtr ptr, size nbytes, Advice advice, Location location),
    (device, ptr, nbytes, advice, location))
ACT(discard, device, (int device, DevicePtr ptr, size nbytes, StreamHandle stream),
    (device, ptr, nbytes, stream))
QUERY(pool_default, device, pool, (int device, PoolHandle* pool), (device, out))
QUERY(pool_current, device, pool, (int device, PoolHandle* pool), (device, out))
ACT(pool_set_current, device, (int device, PoolHandle pool), (device, pool))
ACT(pool_trim, device, (int device, PoolHandle pool, size keep_bytes), (device, pool, keep_bytes))
QUERY(pool_get, device, value,
      (int device, PoolHandle pool, PoolAttribute which, std::uint64_t* value),
      (device, pool, which, out))
ACT(pool_set, device, (int device, PoolHandle pool, PoolAttribute which, std::uint64_t value),
    (device, pool, which, value))
ACT(pool_set_access, device, (int device, PoolHandle pool, const AccessGrant* grants, size count),
    (device, pool, grants, count))
QUERY(pool_get_access, device, access,
      (int device, PoolHandle pool, Location location, Access* access),
      (device, pool, location, out))
QUERY(pool_export_pointer, device, exported,
      (int device, DevicePtr ptr, PoolPointerExport* exported), (device, ptr, out))
QUERY(granularity, device_of(props.location), nbytes,
      (const PhysicalProps& props, bool recommended, size* nbytes), (props, recommended, out))
ACT(mem_set_access, count > 0 ? device_of(grants[0].location) : none,
    (DevicePtr ptr, size nbytes, const AccessGrant* grants, size count),
    (ptr, nbytes, grants, count))
QUERY(mem_get_access, device_of(location), access,
      (DevicePtr ptr, Location location, Access* access), (ptr, location, out))
ACT(copy_async, device,
    (int device, DevicePtr dst, DevicePtr src, size nbytes, StreamHandle stream),
    (device, dst, src, nbytes, stream))
ACT(copy_2d_async, device, (int device, const Copy2D& copy, StreamHandle stream),
    (device, copy, stream))
ACT(copy_peer_async, dst_device,
    (int dst_device, DevicePtr dst, int src_device, DevicePtr src, size nbytes,
     StreamHandle stream),
    (dst_device, dst, src_device, src, nbytes, stream))
ACT(fill_async, device,
    (int device, DevicePtr ptr, std::uint32_t value, int value_bytes, size count,
     StreamHandle stream),
    (device, ptr, value, value_bytes, count, stream))
GUARDED(stream_query, captures_.stream_query({device, stream}), device,
        (int device, StreamHandle stream), (device, stream))
GUARDED(stream_synchronize, captures_.stream_query({device, stream}), device,
        (int device, StreamHandle stream), (device, stream))
QUERY(stream_device, none, device, (StreamHandle stream, int* device), (stream, out))
GUARDED(stream_wait_event, captures_.stream_wait_event({device, stream}, event), device,
        (int device, StreamHandle stream, EventHandle event), (device, stream, event))
ACT(stream_wait_value, device,
    (int device, StreamHandle stream, DevicePtr ptr, std::uint32_t value),
    (device, stream, ptr, value))
ACT(stream_write_value, device,
    (int device, StreamHandle stream, DevicePtr ptr, std::uint32_t value),
    (device, stream, ptr, value))
GUARDED(event_query, captures_.event_query(event), device, (int device, EventHandle event),
        (device, event))
GUARDED(event_synchronize, captures_.event_query(event), device, (int device, EventHandle event),
        (device, event))
QUERY(event_elapsed, device, milliseconds,
      (int device, EventHandle start, EventHandle end, float* milliseconds),
      (device, start, end, out))
QUERY(peer_can_access, device, can, (int device, int peer, bool* can), (device, peer, out))
QUERY(relax_capture, none, previous, (bool relaxed, bool* previous), (relaxed, out))

#undef ACT
#undef GUARDED
#undef QUERY

Status FaultyDriver::event_record(int device, EventHandle event, StreamHandle stream) noexcept {
  return act(Operation::event_record, device, [&] {
    const Status status = inner_->event_record(device, event, stream);
    if (ok(status)) captures_.event_recorded(event, {device, stream});
    return status;
  });
}

Status FaultyDriver::stream_capturing(int device, StreamHandle stream, bool* capturing) noexcept {
  return query(Operation::stream_capturing, device, capturing, [&](bool* out) {
    const Status status = inner_->stream_capturing(device, stream, out);
    if (ok(status)) *out = *out || captures_.capturing({device, stream});
    return status;
  });
}

// --- operations that create and release ----------------------------------------------------------

// parameters, then the call of the real operation into `out`, then the undo of `made`.
#define CREATE(name, device, kind, result, parameters, arguments, undo)              \
  Status FaultyDriver::name parameters noexcept {                                    \
    return create(                                                                   \
        Operation::name, device, kind, result,                                       \
        [&](auto* out) { return inner_->name arguments; },                           \
        [&](auto made) { inner_->undo; });                                           \
  }
#define ATTACH(name, device, kind, key, parameters, arguments, undo)                 \
  Status FaultyDriver::name parameters noexcept {                                    \
    return attach(                                                                   \
        Operation::name, device, kind, key, [&] { return inner_->name arguments; },  \
        [&] { inner_->undo; });                                                      \
  }
#define RELEASE(name, device, kinds, key, parameters, arguments)                     \
  Status FaultyDriver::name parameters noexcept {                                    \
    return release(Operation::name, device, kinds, key,                              \
                   [&] { return inner_->name arguments; });                          \
  }
inline constexpr std::initializer_list<LiveKind> any_memory = {K::device_memory, K::managed,
                                                               K::async_block};

CREATE(mem_alloc, device, K::device_memory, ptr, (int device, size nbytes, DevicePtr* ptr),
       (device, nbytes, out), mem_free(device, made))
RELEASE(mem_free, device, any_memory, ptr, (int device, DevicePtr ptr), (device, ptr))
CREATE(host_alloc, device, K::pinned, ptr, (int device, size nbytes, HostFlags flags, void** ptr),
       (device, nbytes, flags, out), host_free(device, made))
RELEASE(host_free, device, {K::pinned}, key_of(ptr), (int device, void* ptr), (device, ptr))
ATTACH(host_register, device, K::registered, key_of(ptr),
       (int device, void* ptr, size nbytes, HostFlags flags), (device, ptr, nbytes, flags),
       host_unregister(device, ptr))
RELEASE(host_unregister, device, {K::registered}, key_of(ptr), (int device, void* ptr),
        (device, ptr))
CREATE(managed_alloc, device, K::managed, ptr,
       (int device, size nbytes, ManagedAttach attach, DevicePtr* ptr),
       (device, nbytes, attach, out), mem_free(device, made))

CREATE(mem_alloc_async, device, K::async_block, ptr,
       (int device, size nbytes, StreamHandle stream, DevicePtr* ptr),
       (device, nbytes, stream, out), mem_free_async(device, made, stream))
RELEASE(mem_free_async, device, any_memory, ptr, (int device, DevicePtr ptr, StreamHandle stream),
        (device, ptr, stream))
CREATE(pool_create, device, K::pool, pool, (int device, const PoolProps& props, PoolHandle* pool),
       (device, props, out), pool_destroy(device, made))
RELEASE(pool_destroy, device, {K::pool}, pool, (int device, PoolHandle pool), (device, pool))
CREATE(pool_alloc_async, device, K::async_block, ptr,
       (int device, PoolHandle pool, size nbytes, StreamHandle stream, DevicePtr* ptr),
       (device, pool, nbytes, stream, out), mem_free_async(device, made, stream))
CREATE(pool_import, device, K::pool, pool, (int device, int fd, PoolHandle* pool),
       (device, fd, out), pool_destroy(device, made))
CREATE(pool_import_pointer, device, K::async_block, ptr,
       (int device, PoolHandle pool, const PoolPointerExport& exported, DevicePtr* ptr),
       (device, pool, exported, out), mem_free_async(device, made, default_stream))

CREATE(address_reserve, none, K::address_range, ptr,
       (size nbytes, size alignment, DevicePtr hint, DevicePtr* ptr),
       (nbytes, alignment, hint, out), address_free(made, nbytes))
RELEASE(address_free, none, {K::address_range}, ptr, (DevicePtr ptr, size nbytes), (ptr, nbytes))
CREATE(mem_create, device_of(props.location), K::physical, handle,
       (size nbytes, const PhysicalProps& props, PhysicalHandle* handle), (nbytes, props, out),
       mem_release(made))
CREATE(mem_import, none, K::physical, handle, (int fd, PhysicalHandle* handle), (fd, out),
       mem_release(made))
CREATE(mem_retain, none, K::physical, handle, (DevicePtr ptr, PhysicalHandle* handle), (ptr, out),
       mem_release(made))
RELEASE(mem_release, none, {K::physical}, handle, (PhysicalHandle handle), (handle))
ATTACH(mem_map, none, K::mapping, ptr, (DevicePtr ptr, size nbytes, PhysicalHandle handle),
       (ptr, nbytes, handle), mem_unmap(ptr, nbytes))

Status FaultyDriver::mem_unmap(DevicePtr ptr, size nbytes) noexcept {
  return release(
      Operation::mem_unmap, none, {K::mapping}, ptr,
      [&] { return inner_->mem_unmap(ptr, nbytes); }, nbytes);
}

CREATE(stream_create, device, K::stream, stream,
       (int device, StreamFlags flags, StreamHandle* stream), (device, flags, out),
       stream_destroy(device, made))
RELEASE(stream_destroy, device, {K::stream}, stream, (int device, StreamHandle stream),
        (device, stream))
CREATE(event_create, device, K::event, event, (int device, EventFlags flags, EventHandle* event),
       (device, flags, out), event_destroy(device, made))
RELEASE(event_destroy, device, {K::event}, event, (int device, EventHandle event), (device, event))
ATTACH(peer_enable, device, K::peer_link, link_key(device, peer), (int device, int peer),
       (device, peer), peer_disable(device, peer))
RELEASE(peer_disable, device, {K::peer_link}, link_key(device, peer), (int device, int peer),
        (device, peer))

#undef CREATE
#undef ATTACH
#undef RELEASE

// Failing afterwards would leave `argument` to the caller and to the function: fails before.
Status FaultyDriver::launch_host_function(int device, StreamHandle stream, HostFunction function,
                                          void* argument) noexcept {
  const Verdict verdict = plan_.next(Operation::launch_host_function, device);
  wait(verdict.delay);
  if (!ok(verdict.status)) return verdict.status;
  return inner_->launch_host_function(device, stream, function, argument);
}

// A descriptor is the caller's, who closes it without the driver: nothing to count.
Status FaultyDriver::mem_export(PhysicalHandle handle, int* fd) noexcept {
  return make(
      Operation::mem_export, none, fd, [&](int* out) { return inner_->mem_export(handle, out); },
      [](int made) { ::close(made); });
}

Status FaultyDriver::pool_export(int device, PoolHandle pool, int* fd) noexcept {
  return make(
      Operation::pool_export, device, fd,
      [&](int* out) { return inner_->pool_export(device, pool, out); },
      [](int made) { ::close(made); });
}

}  // namespace ringmem
