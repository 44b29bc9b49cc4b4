#include "driver/host/machine.hpp"

#include <algorithm>

namespace ringmem::host {
namespace {

// Addresses a heap reserves for memory of which `capacity` bytes can be live: enough that their
// fragmentation does not decide, and not all there are (128 TiB).
constexpr std::uint64_t span_for(std::uint64_t capacity) noexcept {
  const std::uint64_t spare = std::min(3 * capacity, std::uint64_t{2} << 40);
  return round_up(capacity + spare, std::uint64_t{32} << 20);
}

// A number of the calling thread; the object goes with the thread.
const std::shared_ptr<const std::uint64_t>& thread_number() {
  static std::atomic<std::uint64_t> next{1};
  thread_local const auto number = std::make_shared<const std::uint64_t>(next.fetch_add(1));
  return number;
}

Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Status LazyHeap::get(std::uint64_t span, PageTable& table, Heap** heap) {
  if (Heap* found = made_.load(std::memory_order_acquire)) {
    *heap = found;
    return Status::success;
  }
  const std::lock_guard lock(mutex_);
  if (!heap_) {
    if (const Status status = Heap::create(span, &heap_); !ok(status)) return status;
    table.add_territory(heap_->base(), heap_->span());
    made_.store(heap_.get(), std::memory_order_release);
  }
  *heap = heap_.get();
  return Status::success;
}

Device::Device(int number, std::uint64_t capacity, Clock::duration latency)
    : ordinal(number),
      engine(std::make_shared<Engine>()),
      memory(capacity),
      reach(bit_of(number)),
      legacy(std::make_shared<Stream>(engine, number, false)) {
  engine->latency = latency;
  streams.push_back(legacy);
}

Machine::Machine(const HostConfig& configuration)
    : config(configuration),
      host_memory(system_memory()),
      virtual_memory(*this),
      born_(fork_generation()) {
  for (int i = 0; i < config.devices; ++i)
    devices.push_back(
        std::make_unique<Device>(i, config.capacity, to_duration(config.latency_s)));
}

Machine::~Machine() {
  for (const auto& device : devices) device->engine->stopping.store(true);
  for (const auto& device : devices) {
    for (const auto& stream : device->streams) {
      stream->close();
      stream->wake();
    }
  }
  for (const auto& device : devices) {
    for (const auto& stream : device->streams) stream->join();
  }
  table.clear();
}

bool Machine::connected(int a, int b) const noexcept {
  if (a == b) return false;
  if (config.all_peers) return true;
  return std::any_of(config.peers.begin(), config.peers.end(), [&](const auto& pair) {
    return (pair.first == a && pair.second == b) || (pair.first == b && pair.second == a);
  });
}

AccessSet Machine::all_devices() const noexcept {
  return bit_of(config.devices) - 1;
}

Status Machine::stream(Device& device, StreamHandle handle, std::shared_ptr<Stream>* stream) {
  if (handle == default_stream || handle == legacy_stream) {
    *stream = device.legacy;
  } else if (handle == per_thread_stream) {
    *stream = thread_stream(device);
  } else {
    *stream = streams.find(handle);
  }
  if (!*stream) return Status::invalid_handle;
  return (*stream)->engine().fault.load(std::memory_order_acquire);
}

std::shared_ptr<Stream> Machine::thread_stream(Device& device) {
  const auto& number = thread_number();
  {
    const std::lock_guard lock(device.mutex);
    const auto found = device.per_thread.find(*number);
    if (found != device.per_thread.end()) return found->second.stream;
    std::erase_if(device.per_thread, [](const auto& entry) {
      if (!entry.second.thread.expired()) return false;
      entry.second.stream->close();
      return true;
    });
    auto made = std::make_shared<Stream>(device.engine, device.ordinal, false);
    device.streams.push_back(made);
    device.per_thread[*number] = {number, std::move(made)};
  }
  prune_streams(device);
  return thread_stream(device);
}

// The legacy stream waits for what blocking streams of its device have been given, and they wait
// for what it has been given. Collected before submitting: so nothing waits in a circle.
std::vector<Point> Machine::implicit_order(Stream& stream) {
  std::vector<Point> order;
  if (stream.non_blocking()) return order;
  Device& device = *this->device(stream.device());
  if (&stream != device.legacy.get()) {
    if (!device.legacy->idle()) order.push_back(device.legacy->last());
    return order;
  }
  const std::lock_guard lock(device.mutex);
  for (const auto& other : device.streams) {
    if (other.get() != &stream && !other->non_blocking() && !other->idle())
      order.push_back(other->last());
  }
  return order;
}

Status Machine::submit(Stream& stream, Work work, std::vector<Point> after, bool late,
                       Point* point) {
  std::vector<Point> order = implicit_order(stream);
  order.insert(order.end(), std::make_move_iterator(after.begin()),
               std::make_move_iterator(after.end()));
  return stream.submit(std::move(work), std::move(order), late, point);
}

Status Machine::mark(const std::shared_ptr<Stream>& stream, Point* point) {
  std::vector<Point> order = implicit_order(*stream);
  if (!order.empty()) return stream->submit({}, std::move(order), false, point);
  *point = stream->last();
  return Status::success;
}

Status Machine::synchronize(Device& device) {
  std::vector<Point> points;
  {
    const std::lock_guard lock(device.mutex);
    for (const auto& stream : device.streams) {
      if (!stream->idle()) points.push_back(stream->last());
    }
  }
  for (const Point& point : points) point.wait();
  if (const Status fault = device.engine->fault.load(); !ok(fault)) return fault;
  settle_pools(device);
  return Status::success;
}

void Machine::settle_pools(Device& device) {
  std::vector<std::shared_ptr<Pool>> settled;
  {
    const std::lock_guard lock(device.mutex);
    if (device.pools.empty()) return;
    settled = device.pools;
  }
  for (const auto& pool : settled) pool->settle();
  const std::lock_guard lock(device.mutex);
  std::erase_if(device.pools, [](const auto& pool) { return pool->destroyed_and_empty(); });
}

void Machine::prune_streams(Device& device) {
  std::vector<std::shared_ptr<Stream>> gone;
  {
    const std::lock_guard lock(device.mutex);
    const auto end = std::stable_partition(device.streams.begin(), device.streams.end(),
                                           [](const auto& s) { return !s->finished(); });
    gone.assign(end, device.streams.end());
    device.streams.erase(end, device.streams.end());
  }
  for (const auto& stream : gone) stream->join();
}

Status Machine::device_heap(Device& device, Heap** heap) {
  return device.heap.get(span_for(config.capacity), table, heap);
}

Status Machine::host_heap(Heap** heap) {
  return host_space.get(span_for(host_memory.limit()), table, heap);
}

Status Machine::default_pool(Device& device, std::shared_ptr<Pool>* pool, PoolHandle* handle) {
  Heap* heap = nullptr;
  if (const Status status = device_heap(device, &heap); !ok(status)) return status;
  const std::lock_guard lock(device.mutex);
  if (!device.default_pool) {
    Pool::Setup setup;
    setup.props.location = {LocationKind::device, device.ordinal};
    setup.device = device.ordinal;
    setup.table = &table;
    setup.budget = &device.memory;
    setup.heap = heap;
    auto made = std::make_shared<Pool>(std::move(setup));
    device.pools.push_back(made);
    device.default_handle = pools.insert(made);
    device.default_pool = std::move(made);
  }
  if (!device.current_pool) {
    device.current_pool = device.default_pool;
    device.current_handle = device.default_handle;
  }
  *pool = device.default_pool;
  *handle = device.default_handle;
  return Status::success;
}

}  // namespace ringmem::host
