// The state behind a HostDriver: its devices with their memory and streams, and the tables that
// turn numbers into objects. The operations themselves are in the files named after them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "driver/fork.hpp"
#include "driver/host/handles.hpp"
#include "driver/host/heap.hpp"
#include "driver/host/host_driver.hpp"
#include "driver/host/page_table.hpp"
#include "driver/host/pool.hpp"
#include "driver/host/process.hpp"
#include "driver/host/stream.hpp"
#include "driver/host/virtual_memory.hpp"

namespace ringmem::host {

void validate(const HostConfig& config);

// What cuEventRecord made of an event: a place in a stream, and when it was reached.
struct Record {
  Point point;
  std::atomic<std::int64_t> reached_ns{0};
};

struct Event {
  int device = 0;
  EventFlags flags;
  std::mutex mutex;
  std::shared_ptr<Record> record;  // guarded by `mutex`; null until recorded
};

// A heap that comes into being when it is first used.
class LazyHeap {
 public:
  Status get(std::uint64_t span, PageTable& table, Heap** heap);
  bool made() const noexcept { return made_.load(std::memory_order_acquire) != nullptr; }

 private:
  std::mutex mutex_;
  std::unique_ptr<Heap> heap_;
  std::atomic<Heap*> made_{nullptr};
};

// The default stream of one thread. Swept when the thread is gone.
struct ThreadStream {
  std::weak_ptr<const std::uint64_t> thread;
  std::shared_ptr<Stream> stream;
};

struct Device {
  Device(int number, std::uint64_t capacity, Clock::duration latency);

  const int ordinal;
  const std::shared_ptr<Engine> engine;
  Budget memory;
  LazyHeap heap;
  std::atomic<AccessSet> reach;  // whose plain memory it may touch: its own, and enabled peers'
  std::shared_ptr<Stream> legacy;

  std::mutex mutex;                              // guards what follows
  std::vector<std::shared_ptr<Stream>> streams;  // until destroyed and drained
  std::unordered_map<std::uint64_t, ThreadStream> per_thread;  // by thread
  std::vector<std::shared_ptr<Pool>> pools;      // until destroyed and empty
  std::shared_ptr<Pool> default_pool;
  PoolHandle default_handle = 0;
  std::shared_ptr<Pool> current_pool;
  PoolHandle current_handle = 0;
};

class Machine {
 public:
  explicit Machine(const HostConfig& configuration);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  bool foreign() const noexcept { return fork_generation() != born_; }  // a fork's child
  Device* device(int ordinal) noexcept {
    if (ordinal < 0 || ordinal >= config.devices) return nullptr;
    return devices[static_cast<std::size_t>(ordinal)].get();
  }
  bool connected(int a, int b) const noexcept;
  AccessSet all_devices() const noexcept;

  // The stream behind a handle; `device` says whose default stream is meant.
  Status stream(Device& device, StreamHandle handle, std::shared_ptr<Stream>* stream);
  std::shared_ptr<Stream> thread_stream(Device& device);
  // What must be done before something submitted to `stream` now: the legacy stream's order.
  std::vector<Point> implicit_order(Stream& stream);
  Status submit(Stream& stream, Work work, std::vector<Point> after = {}, bool late = true,
                Point* point = nullptr);
  // The point that everything submitted to `stream` so far has been done, its order included.
  Status mark(const std::shared_ptr<Stream>& stream, Point* point);
  // Waits for all that is submitted to a device, then gives back what its pools can spare.
  Status synchronize(Device& device);
  void settle_pools(Device& device);
  void prune_streams(Device& device);

  Status device_heap(Device& device, Heap** heap);
  Status host_heap(Heap** heap);

  // The pool with this handle, or the device's own.
  Status default_pool(Device& device, std::shared_ptr<Pool>* pool, PoolHandle* handle);

  const HostConfig config;
  PageTable table;
  Budget host_memory;
  LazyHeap host_space;
  std::vector<std::unique_ptr<Device>> devices;
  HandleTable<Stream> streams{HandleKind::stream};
  HandleTable<Event> events{HandleKind::event};
  HandleTable<Pool> pools{HandleKind::pool};
  VirtualMemory virtual_memory;

 private:
  const std::uint64_t born_;
};

// What several of the operations' files need.
Status alloc_on_host(Machine& machine, Device& device, std::size_t nbytes, RegionKind kind,
                     AccessSet access, std::uint64_t* ptr);
Status free_plain_async(Machine& machine, const RegionRef& region, Stream& stream);
Status free_pool_block(Machine& machine, const std::shared_ptr<Pool>& pool, std::uint64_t ptr,
                       Point point);

// Runs an operation: not in a child of the driver's process, and nothing thrown.
template <class Operation>
Status guarded(Machine& machine, Operation&& operation) noexcept {
  if (machine.foreign()) return refused_in_child();
  try {
    return operation();
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory;
  } catch (const std::system_error&) {
    return Status::operating_system;
  } catch (...) {
    return Status::unknown;
  }
}

// The same for one device, unless a sticky error has made it unusable.
template <class Operation>
Status on_device(Machine& machine, int ordinal, Operation&& operation) noexcept {
  return guarded(machine, [&]() -> Status {
    Device* device = machine.device(ordinal);
    if (!device) return Status::invalid_device;
    const Status fault = device->engine->fault.load(std::memory_order_acquire);
    return ok(fault) ? operation(*device) : fault;
  });
}

// The same for work on a stream; the stream's device may be another one, and executes.
template <class Operation>
Status on_stream(Machine& machine, int ordinal, StreamHandle handle,
                 Operation&& operation) noexcept {
  return on_device(machine, ordinal, [&](Device& device) -> Status {
    std::shared_ptr<Stream> stream;
    if (const Status status = machine.stream(device, handle, &stream); !ok(status)) return status;
    return operation(*machine.device(stream->device()), stream);
  });
}

}  // namespace ringmem::host
