// Order, asynchrony and violations on simulated devices: what happens while and after a call
// returns.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver/host/host_driver.hpp"

using namespace ringmem;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;
constexpr std::size_t granule = 2 * MiB;

HostConfig small(int devices = 1, double latency_s = 0) {
  HostConfig config;
  config.devices = devices;
  config.capacity = 64 * MiB;
  config.latency_s = latency_s;
  return config;
}

unsigned char* bytes(DevicePtr ptr) { return reinterpret_cast<unsigned char*>(ptr); }
DevicePtr address(const void* ptr) { return reinterpret_cast<DevicePtr>(ptr); }

std::uint32_t load(DevicePtr ptr) {
  return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(ptr)).load();
}
void store(DevicePtr ptr, std::uint32_t value) {
  std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(ptr)).store(value);
}

StreamHandle stream_of(Driver& driver, bool non_blocking = true, int device = 0) {
  StreamHandle stream = 0;
  StreamFlags flags;
  flags.non_blocking = non_blocking;
  CHECK_OK(driver.stream_create(device, flags, &stream));
  return stream;
}

EventHandle event_of(Driver& driver, bool timing = false) {
  EventHandle event = 0;
  EventFlags flags;
  flags.timing = timing;
  CHECK_OK(driver.event_create(0, flags, &event));
  return event;
}

// Pinned memory, which stays until the driver goes.
DevicePtr pinned(Driver& driver, std::size_t nbytes = 4096) {
  void* ptr = nullptr;
  CHECK_OK(driver.host_alloc(0, nbytes, {}, &ptr));
  std::memset(ptr, 0, nbytes);
  return address(ptr);
}

DevicePtr device_memory(Driver& driver, std::size_t nbytes = 4096, int device = 0) {
  DevicePtr ptr = 0;
  CHECK_OK(driver.mem_alloc(device, nbytes, &ptr));
  return ptr;
}

// Holds a stream up until open(): a wait for a value in pinned memory.
struct Gate {
  Gate(Driver& driver, StreamHandle stream, int device = 0) : word(pinned(driver)) {
    CHECK_OK(driver.stream_wait_value(device, stream, word, 1));
  }
  void open() const { store(word, 1); }
  DevicePtr word;
};

}  // namespace

TEST(an_asynchronous_copy_is_late) {
  HostDriver driver(small(1, 0.05));
  const StreamHandle stream = stream_of(driver);
  const DevicePtr src = pinned(driver), dst = device_memory(driver);
  std::memset(bytes(src), 7, 4096);
  bytes(dst)[0] = 0;
  const auto start = std::chrono::steady_clock::now();
  CHECK_OK(driver.copy_async(0, dst, src, 4096, stream));
  CHECK_EQ(int{bytes(dst)[0]}, 0);
  CHECK_EQ(driver.stream_query(0, stream), Status::not_ready);
  CHECK_OK(driver.stream_synchronize(0, stream));
  CHECK(std::chrono::steady_clock::now() - start >= 50ms);
  CHECK_EQ(int{bytes(dst)[0]}, 7);
  CHECK_OK(driver.stream_query(0, stream));
}

TEST(latency_is_not_added_up) {
  HostDriver driver(small(1, 0.05));
  const StreamHandle stream = stream_of(driver);
  const DevicePtr src = pinned(driver), dst = device_memory(driver);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) CHECK_OK(driver.copy_async(0, dst, src, 64, stream));
  CHECK_OK(driver.stream_synchronize(0, stream));
  CHECK(std::chrono::steady_clock::now() - start < 500ms);
}

TEST(a_pageable_source_may_be_reused_at_once) {
  HostDriver driver(small(1, 0.02));
  const StreamHandle stream = stream_of(driver);
  const DevicePtr dst = device_memory(driver);
  std::vector<unsigned char> source(4096, 5);
  CHECK_OK(driver.copy_async(0, dst, address(source.data()), 4096, stream));
  std::fill(source.begin(), source.end(), static_cast<unsigned char>(9));
  CHECK_OK(driver.stream_synchronize(0, stream));
  CHECK_EQ(int{bytes(dst)[4095]}, 5);
  std::vector<unsigned char> target(4096, 0);
  CHECK_OK(driver.copy_async(0, address(target.data()), dst, 4096, stream));
  CHECK_EQ(int{target[4095]}, 5);  // to pageable memory: over when the call returns
}

TEST(a_bad_host_address_is_refused_without_a_signal) {
  HostDriver driver(small());
  const DevicePtr memory = device_memory(driver);
  CHECK_EQ(driver.copy_async(0, memory, 0x1000, 64, default_stream), Status::invalid_value);
  CHECK_EQ(driver.copy_async(0, 0x1000, memory, 64, default_stream), Status::invalid_value);
  CHECK_EQ(driver.copy_async(0, memory, 0, 64, default_stream), Status::invalid_value);
  CHECK_EQ(driver.copy_async(0, memory, memory + 64, SIZE_MAX, default_stream),
           Status::invalid_value);
  CHECK_OK(driver.synchronize(0));  // the device is as good as before
}

TEST(registered_memory_that_vanished_is_a_violation_and_no_crash) {
  HostDriver driver(small());
  void* memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK_OK(driver.host_register(0, memory, 8192, {}));
  CHECK_EQ(mprotect(memory, 8192, PROT_NONE), 0);  // as good as gone, and nobody else's by now
  const DevicePtr dst = device_memory(driver);
  CHECK_OK(driver.copy_async(0, dst, address(memory), 4096, default_stream));
  CHECK_EQ(driver.stream_synchronize(0, default_stream), Status::illegal_address);
}

TEST(two_dimensional_copies_move_rows_only) {
  HostDriver driver(small());
  const DevicePtr src = device_memory(driver, 1 << 16), dst = device_memory(driver, 1 << 16);
  for (int i = 0; i < 1 << 16; ++i) bytes(src)[i] = static_cast<unsigned char>(i >> 8);
  std::memset(bytes(dst), 0xEE, 1 << 16);
  CHECK_OK(driver.copy_2d_async(0, {dst, 100, src, 256, 60, 10}, default_stream));
  CHECK_OK(driver.stream_synchronize(0, default_stream));
  for (int row = 0; row < 10; ++row) {
    CHECK_EQ(int{bytes(dst)[row * 100]}, row);
    CHECK_EQ(int{bytes(dst)[row * 100 + 59]}, row);
    CHECK_EQ(int{bytes(dst)[row * 100 + 60]}, 0xEE);
  }
  std::vector<unsigned char> host(300, 3);
  CHECK_OK(driver.copy_2d_async(0, {dst, 100, address(host.data()), 30, 30, 10}, default_stream));
  CHECK_OK(driver.stream_synchronize(0, default_stream));
  CHECK_EQ(int{bytes(dst)[929]}, 3);
  CHECK_EQ(driver.copy_2d_async(0, {dst, 10, src, 256, 60, 10}, default_stream),
           Status::invalid_value);
  CHECK_EQ(driver.copy_2d_async(0, {dst, 1 << 30, src, 1 << 30, 60, SIZE_MAX}, default_stream),
           Status::invalid_value);
}

TEST(fills_are_of_whole_elements) {
  HostDriver driver(small());
  const DevicePtr ptr = device_memory(driver);
  CHECK_OK(driver.fill_async(0, ptr, 0x01020304, 4, 100, default_stream));
  CHECK_OK(driver.fill_async(0, ptr + 400, 0xABCD, 2, 100, default_stream));
  CHECK_OK(driver.fill_async(0, ptr + 600, 0x7F, 1, 3, default_stream));
  CHECK_OK(driver.stream_synchronize(0, default_stream));
  CHECK_EQ(load(ptr + 396), 0x01020304U);
  CHECK_EQ(load(ptr + 400), 0xABCDABCDU);
  CHECK_EQ(int{bytes(ptr)[602]}, 0x7F);
  CHECK_EQ(driver.fill_async(0, ptr + 1, 0, 2, 1, default_stream), Status::invalid_value);
  CHECK_EQ(driver.fill_async(0, ptr, 0, 3, 1, default_stream), Status::invalid_value);
  CHECK_EQ(driver.fill_async(0, ptr, 0, 4, SIZE_MAX, default_stream), Status::invalid_value);
  int local = 0;
  CHECK_EQ(driver.fill_async(0, address(&local), 0, 4, 1, default_stream), Status::invalid_value);
}

TEST(a_violation_is_found_when_it_is_executed_and_sticks) {
  HostDriver driver(small(2));
  const StreamHandle stream = stream_of(driver);
  const DevicePtr src = pinned(driver);
  DevicePtr range = 0, other = 0;
  CHECK_OK(driver.address_reserve(granule, 0, 0, &range));
  Gate gate(driver, stream);
  CHECK_OK(driver.copy_async(0, range, src, 64, stream));
  CHECK_EQ(driver.stream_query(0, stream), Status::not_ready);
  gate.open();
  CHECK_EQ(driver.stream_synchronize(0, stream), Status::illegal_address);
  CHECK_EQ(driver.mem_alloc(0, 64, &other), Status::illegal_address);
  CHECK_EQ(driver.stream_query(0, stream), Status::illegal_address);
  CHECK_EQ(driver.synchronize(0), Status::illegal_address);
  CHECK_OK(driver.mem_alloc(1, 64, &other));  // the other device lives
  CHECK_OK(driver.address_free(range, granule));
}

TEST(a_mapping_without_access_or_read_only_is_protected_from_its_device) {
  for (const Access access : {Access::none, Access::read}) {
    HostDriver driver(small(2));
    DevicePtr ptr = 0;
    PhysicalHandle handle = 0;
    PhysicalProps props;
    CHECK_OK(driver.address_reserve(granule, 0, 0, &ptr));
    CHECK_OK(driver.mem_create(granule, props, &handle));
    CHECK_OK(driver.mem_map(ptr, granule, handle));
    const AccessGrant grants[] = {{{LocationKind::device, 0}, access},
                                  {{LocationKind::device, 1}, Access::readwrite}};
    CHECK_OK(driver.mem_set_access(ptr, granule, grants, 2));
    CHECK_OK(driver.fill_async(1, ptr, 1, 1, 64, default_stream));
    CHECK_OK(driver.synchronize(1));
    const DevicePtr mine = device_memory(driver);
    CHECK_OK(driver.copy_async(0, mine, ptr, 64, default_stream));
    const Status reading = driver.synchronize(0);
    CHECK_EQ(reading, access == Access::none ? Status::illegal_address : Status::success);
    if (access == Access::read) {
      CHECK_OK(driver.copy_async(0, ptr, mine, 64, default_stream));
      CHECK_EQ(driver.synchronize(0), Status::illegal_address);
    }
    CHECK_OK(driver.synchronize(1));
  }
}

TEST(peers_must_be_enabled_for_fills_and_not_for_copies) {
  HostDriver driver(small(2));
  const DevicePtr theirs = device_memory(driver, 4096, 1), mine = device_memory(driver);
  CHECK_OK(driver.fill_async(1, theirs, 6, 1, 64, default_stream));
  CHECK_OK(driver.synchronize(1));
  CHECK_OK(driver.copy_peer_async(0, mine, 1, theirs, 64, default_stream));
  CHECK_OK(driver.copy_async(0, mine + 64, theirs, 64, default_stream));
  CHECK_OK(driver.synchronize(0));
  CHECK_EQ(int{bytes(mine)[127]}, 6);
  CHECK_OK(driver.peer_enable(0, 1));
  CHECK_EQ(driver.peer_enable(0, 1), Status::peer_access_already_enabled);
  CHECK_OK(driver.fill_async(0, theirs, 1, 1, 64, default_stream));
  CHECK_OK(driver.synchronize(0));
  CHECK_OK(driver.peer_disable(0, 1));
  CHECK_EQ(driver.peer_disable(0, 1), Status::peer_access_not_enabled);
  CHECK_OK(driver.fill_async(0, theirs, 1, 1, 64, default_stream));
  CHECK_EQ(driver.synchronize(0), Status::illegal_address);
}

TEST(events_order_streams) {
  HostDriver driver(small());
  const StreamHandle a = stream_of(driver), b = stream_of(driver);
  const EventHandle event = event_of(driver);
  const DevicePtr word = pinned(driver);
  CHECK_OK(driver.event_query(0, event));  // never recorded
  CHECK_OK(driver.stream_wait_event(0, b, event));
  Gate gate(driver, a);
  CHECK_OK(driver.event_record(0, event, a));
  CHECK_EQ(driver.event_query(0, event), Status::not_ready);
  CHECK_OK(driver.stream_wait_event(0, b, event));
  CHECK_OK(driver.stream_write_value(0, b, word, 5));
  std::this_thread::sleep_for(20ms);
  CHECK_EQ(load(word), 0U);
  CHECK_EQ(driver.stream_query(0, b), Status::not_ready);
  CHECK_OK(driver.event_destroy(0, event));  // who waits for it is not disturbed
  gate.open();
  CHECK_OK(driver.stream_synchronize(0, b));
  CHECK_EQ(load(word), 5U);
  CHECK_EQ(driver.event_query(0, event), Status::invalid_handle);
  CHECK_EQ(driver.stream_wait_event(0, b, event), Status::invalid_handle);
}

TEST(elapsed_time_needs_two_recorded_timing_events) {
  HostDriver driver(small());
  const StreamHandle stream = stream_of(driver);
  const EventHandle start = event_of(driver, true), end = event_of(driver, true);
  const EventHandle plain = event_of(driver);
  float ms = -1;
  CHECK_EQ(driver.event_elapsed(0, start, end, &ms), Status::invalid_handle);
  CHECK_OK(driver.event_record(0, start, stream));
  Gate gate(driver, stream);
  CHECK_OK(driver.event_record(0, end, stream));
  CHECK_EQ(driver.event_elapsed(0, start, end, &ms), Status::not_ready);
  CHECK_OK(driver.event_record(0, plain, stream));
  CHECK_EQ(driver.event_elapsed(0, start, plain, &ms), Status::invalid_handle);
  std::this_thread::sleep_for(20ms);
  gate.open();
  CHECK_OK(driver.event_synchronize(0, end));
  CHECK_OK(driver.event_elapsed(0, start, end, &ms));
  CHECK(ms >= 20 && ms < 5000);
}

TEST(the_legacy_stream_orders_blocking_streams_only) {
  HostDriver driver(small());
  const StreamHandle blocking = stream_of(driver, false), free = stream_of(driver, true);
  const DevicePtr a = pinned(driver), b = pinned(driver), c = pinned(driver);
  Gate gate(driver, blocking);
  CHECK_OK(driver.stream_write_value(0, default_stream, a, 1));  // behind `blocking`
  CHECK_OK(driver.stream_write_value(0, per_thread_stream, b, 1));  // behind the legacy stream
  CHECK_OK(driver.stream_write_value(0, free, c, 1));
  CHECK_OK(driver.stream_synchronize(0, free));
  CHECK_EQ(load(c), 1U);
  CHECK_EQ(driver.stream_query(0, default_stream), Status::not_ready);
  CHECK_EQ(driver.stream_query(0, per_thread_stream), Status::not_ready);
  CHECK_EQ(load(a) + load(b), 0U);
  gate.open();
  CHECK_OK(driver.stream_synchronize(0, per_thread_stream));
  CHECK_EQ(load(a), 1U);
  CHECK_EQ(load(b), 1U);
}

TEST(values_are_compared_cyclically) {
  HostDriver driver(small());
  const StreamHandle stream = stream_of(driver);
  const DevicePtr word = pinned(driver);
  store(word, 0xfffffff0U);
  CHECK_OK(driver.stream_wait_value(0, stream, word, 5));  // 5 lies ahead of 2³² - 16
  std::this_thread::sleep_for(10ms);
  CHECK_EQ(driver.stream_query(0, stream), Status::not_ready);
  store(word, 6);
  CHECK_OK(driver.stream_synchronize(0, stream));
  CHECK_EQ(driver.stream_wait_value(0, stream, word + 1, 5), Status::invalid_value);
}

TEST(host_functions_run_in_order) {
  HostDriver driver(small());
  const StreamHandle stream = stream_of(driver);
  static std::vector<int> order;
  order.clear();
  static int numbers[3] = {0, 1, 2};
  Gate gate(driver, stream);
  for (int& number : numbers)
    CHECK_OK(driver.launch_host_function(
        0, stream, [](void* n) { order.push_back(*static_cast<int*>(n)); }, &number));
  gate.open();
  CHECK_OK(driver.stream_synchronize(0, stream));
  CHECK(order == (std::vector<int>{0, 1, 2}));
}

TEST(destroyed_streams_finish_their_work) {
  HostDriver driver(small());
  const StreamHandle stream = stream_of(driver);
  const DevicePtr word = pinned(driver);
  Gate gate(driver, stream);
  CHECK_OK(driver.stream_write_value(0, stream, word, 3));
  CHECK_OK(driver.stream_destroy(0, stream));
  CHECK_EQ(driver.stream_destroy(0, stream), Status::invalid_handle);
  CHECK_EQ(driver.stream_query(0, stream), Status::invalid_handle);
  gate.open();
  CHECK_OK(driver.synchronize(0));
  CHECK_EQ(load(word), 3U);
}

TEST(a_driver_goes_though_a_stream_waits_for_ever) {
  std::atomic<int> ran{0};
  {
    HostDriver driver(small(2, 5.0));
    const StreamHandle stuck = stream_of(driver), behind = stream_of(driver);
    const StreamHandle late = stream_of(driver);
    const EventHandle event = event_of(driver);
    CHECK_OK(driver.stream_wait_value(0, stuck, pinned(driver), 1));
    CHECK_OK(driver.event_record(0, event, stuck));
    CHECK_OK(driver.stream_wait_event(0, behind, event));
    CHECK_OK(driver.launch_host_function(
        0, behind, [](void* n) { ++*static_cast<std::atomic<int>*>(n); }, &ran));
    CHECK_OK(driver.launch_host_function(
        0, late, [](void* n) { *static_cast<std::atomic<int>*>(n) += 10; }, &ran));
  }
  CHECK_EQ(ran.load(), 10);  // what nothing held up was done, what waited was not
}

TEST(a_host_function_may_drop_the_driver) {
  static std::atomic<bool> gone{false};
  auto* driver = new std::shared_ptr<HostDriver>(std::make_shared<HostDriver>(small()));
  HostDriver& raw = **driver;
  CHECK_OK(raw.launch_host_function(
      0, default_stream,
      [](void* d) {
        std::this_thread::sleep_for(10ms);
        delete static_cast<std::shared_ptr<HostDriver>*>(d);
        gone = true;
      },
      driver));
  for (int i = 0; i < 500 && !gone; ++i) std::this_thread::sleep_for(10ms);
  CHECK(gone.load());
  std::this_thread::sleep_for(50ms);
}

TEST(unmapping_under_a_copy_is_a_violation_and_no_crash) {
  HostDriver driver(small(2));
  constexpr std::size_t size = 16 * granule;
  DevicePtr ptr = 0;
  PhysicalHandle handle = 0;
  CHECK_OK(driver.address_reserve(size, 0, 0, &ptr));
  CHECK_OK(driver.mem_create(size, {}, &handle));
  const AccessGrant grant{{LocationKind::device, 1}, Access::readwrite};
  const DevicePtr target = pinned(driver, size);
  const StreamHandle stream = stream_of(driver, true, 1);
  Status seen = Status::success;
  for (int round = 0; round < 50 && ok(seen); ++round) {
    CHECK_OK(driver.mem_map(ptr, size, handle));
    CHECK_OK(driver.mem_set_access(ptr, size, &grant, 1));
    for (int i = 0; i < 3; ++i) CHECK_OK(driver.copy_async(1, target, ptr, size, stream));
    std::this_thread::sleep_for(1ms);
    CHECK_OK(driver.mem_unmap(ptr, size));
    seen = driver.stream_synchronize(1, stream);
  }
  CHECK_EQ(seen, Status::illegal_address);
}

TEST(taking_access_away_under_a_copy_is_a_violation_and_no_crash) {
  HostDriver driver(small(2));
  constexpr std::size_t size = 16 * granule;
  DevicePtr ptr = 0;
  PhysicalHandle handle = 0;
  CHECK_OK(driver.address_reserve(size, 0, 0, &ptr));
  CHECK_OK(driver.mem_create(size, {}, &handle));
  CHECK_OK(driver.mem_map(ptr, size, handle));
  const DevicePtr target = pinned(driver, size);
  const StreamHandle stream = stream_of(driver, true, 1);
  Status seen = Status::success;
  for (int round = 0; round < 50 && ok(seen); ++round) {
    AccessGrant grant{{LocationKind::device, 1}, Access::readwrite};
    CHECK_OK(driver.mem_set_access(ptr, size, &grant, 1));
    for (int i = 0; i < 3; ++i) CHECK_OK(driver.copy_async(1, target, ptr, size, stream));
    std::this_thread::sleep_for(1ms);
    grant.access = Access::none;
    CHECK_OK(driver.mem_set_access(ptr, size, &grant, 1));
    seen = driver.stream_synchronize(1, stream);
  }
  CHECK_EQ(seen, Status::illegal_address);
}

TEST(every_thread_has_a_default_stream_of_its_own) {
  HostDriver driver(small());
  const DevicePtr word = pinned(driver);
  Gate gate(driver, per_thread_stream);
  for (int i = 0; i < 5; ++i) {
    std::thread([&] {
      CHECK_OK(driver.stream_write_value(0, per_thread_stream, word, 1));
      CHECK_OK(driver.stream_synchronize(0, per_thread_stream));
    }).join();
  }
  CHECK_EQ(load(word), 1U);
  CHECK_EQ(driver.stream_query(0, per_thread_stream), Status::not_ready);
  gate.open();
  CHECK_OK(driver.stream_synchronize(0, per_thread_stream));
}

TEST(mem_free_waits_for_the_device) {
  HostDriver driver(small());
  const StreamHandle stream = stream_of(driver);
  const DevicePtr ptr = device_memory(driver);
  Gate gate(driver, stream);
  CHECK_OK(driver.fill_async(0, ptr, 1, 1, 4096, stream));
  std::thread opener([&] {
    std::this_thread::sleep_for(30ms);
    gate.open();
  });
  const auto start = std::chrono::steady_clock::now();
  CHECK_OK(driver.mem_free(0, ptr));
  CHECK(std::chrono::steady_clock::now() - start >= 20ms);
  opener.join();
  CHECK_OK(driver.synchronize(0));
}

TEST(many_threads_use_one_driver) {
  HostDriver driver(small(2));
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&driver, number] {
      const int device = number % 2;
      const StreamHandle stream = stream_of(driver, number < 2, device);
      EventHandle event = 0;
      CHECK_OK(driver.event_create(device, {}, &event));
      for (int i = 0; i < 50; ++i) {
        DevicePtr a = 0, b = 0, range = 0;
        CHECK_OK(driver.mem_alloc_async(device, 100000, stream, &a));
        CHECK_OK(driver.mem_alloc_async(device, 3000, stream, &b));
        CHECK_OK(driver.fill_async(device, a, static_cast<std::uint32_t>(i), 4, 1000, stream));
        CHECK_OK(driver.copy_async(device, b, a, 3000, stream));
        CHECK_OK(driver.event_record(device, event, stream));
        CHECK_OK(driver.stream_wait_event(device, default_stream, event));
        std::uint32_t value = 0;
        CHECK_OK(driver.copy_async(device, address(&value), b + 4, 4, stream));
        CHECK_EQ(value, static_cast<std::uint32_t>(i));
        CHECK_OK(driver.mem_free_async(device, a, stream));
        CHECK_OK(driver.mem_free_async(device, b, stream));
        PhysicalHandle handle = 0;
        PhysicalProps props;
        props.location.id = device;
        const AccessGrant grant{{LocationKind::device, device}, Access::readwrite};
        CHECK_OK(driver.address_reserve(granule, 0, 0, &range));
        CHECK_OK(driver.mem_create(granule, props, &handle));
        CHECK_OK(driver.mem_map(range, granule, handle));
        CHECK_OK(driver.mem_set_access(range, granule, &grant, 1));
        CHECK_OK(driver.fill_async(device, range, 1, 1, 1000, stream));
        CHECK_OK(driver.stream_synchronize(device, stream));
        CHECK_OK(driver.mem_unmap(range, granule));
        CHECK_OK(driver.mem_release(handle));
        CHECK_OK(driver.address_free(range, granule));
      }
      CHECK_OK(driver.event_destroy(device, event));
      CHECK_OK(driver.stream_destroy(device, stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int device = 0; device < 2; ++device) {
    MemoryInfo info;
    CHECK_OK(driver.synchronize(device));
    CHECK_OK(driver.memory_info(device, &info));
    CHECK_EQ(info.free, info.total);
  }
}

TEST_MAIN()
