// The driver's own allocators: stream order, recorded streams, and what a failure leaves behind.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/host/host_driver.hpp"
#include "driver/operations.hpp"
#include "memory/driver_allocators.hpp"

using namespace ringmem;

namespace {

std::shared_ptr<FaultyDriver> make_driver(bool pools = true) {
  HostConfig config;
  config.devices = 2;
  config.capacity = std::size_t{64} << 20;
  config.pools = pools;
  return std::make_shared<FaultyDriver>(make_host_driver(config));
}

void fail(FaultyDriver& driver, const char* operation, FaultWhen when = FaultWhen::before) {
  driver.plan().fail(find_operation(operation), 1, 1, Status::unknown, when);
}

std::size_t live(const FaultyDriver& driver, LiveKind kind) {
  return driver.live().counts()[static_cast<std::size_t>(kind)];
}

std::size_t live(const FaultyDriver& driver) {
  std::size_t sum = 0;
  for (std::size_t count : driver.live().counts()) sum += count;
  return sum;
}

// A stream that waits for a word of pinned memory.
struct Gate {
  explicit Gate(DriverRef d, int on = 0) : driver(std::move(d)), device(on) {
    check(driver->stream_create(device, {}, &stream), "stream_create");
    check(driver->host_alloc(device, 4096, {}, &memory), "host_alloc");
    word()->store(0);
    DevicePtr ptr = 0;
    check(driver->host_device_pointer(device, memory, &ptr), "host_device_pointer");
    check(driver->stream_wait_value(device, stream, ptr, 1), "stream_wait_value");
  }
  ~Gate() {
    open();
    driver->stream_synchronize(device, stream);
    driver->stream_destroy(device, stream);
    driver->host_free(device, memory);
  }
  std::atomic<std::uint32_t>* word() { return static_cast<std::atomic<std::uint32_t>*>(memory); }
  void open() { word()->store(1); }

  DriverRef driver;
  int device;
  StreamHandle stream = 0;
  void* memory = nullptr;
};

StreamHandle make_stream(Driver& driver, int device = 0) {
  StreamHandle stream = 0;
  check(driver.stream_create(device, {}, &stream), "stream_create");
  return stream;
}

}  // namespace

TEST(pool_is_made_at_first_use_keeps_everything_and_goes_with_the_allocator) {
  auto driver = make_driver();
  {
    StreamOrderedAllocator allocator(driver, 0);
    CHECK_EQ(live(*driver, LiveKind::pool), 0u);
    Block block = allocator.allocate(1000, default_stream);
    CHECK_EQ(block.nbytes, 1000u);
    CHECK(block.ptr != 0);
    std::uint64_t threshold = 0;
    check(driver->pool_get(0, allocator.pool(), PoolAttribute::release_threshold, &threshold), "");
    CHECK_EQ(threshold, UINT64_MAX);
    CHECK_OK(allocator.deallocate(block, default_stream));
    CHECK_EQ(live(*driver, LiveKind::pool), 1u);
  }
  CHECK_EQ(live(*driver), 0u);
}

TEST(threads_that_race_for_the_pool_share_one) {
  for (int round = 0; round < 20; ++round) {
    auto driver = make_driver();
    StreamOrderedAllocator allocator(driver, 0);
    std::atomic<bool> go{false};
    PoolHandle seen[4] = {};
    std::thread threads[4];
    for (int i = 0; i < 4; ++i) {
      threads[i] = std::thread([&, i] {
        while (!go) std::this_thread::yield();
        seen[i] = allocator.pool();
      });
    }
    go = true;
    for (std::thread& thread : threads) thread.join();
    for (PoolHandle pool : seen) CHECK_EQ(pool, seen[0]);
    CHECK_EQ(live(*driver, LiveKind::pool), 1u);
  }
}

TEST(a_free_waits_on_the_device_for_recorded_streams) {
  auto driver = make_driver();
  StreamOrderedAllocator allocator(driver, 0);
  const StreamHandle freeing = make_stream(*driver);
  {
    Gate one(driver);
    Gate other(driver, 1);  // a peer's stream
    Block block = allocator.allocate(4096, freeing);
    check(allocator.record_stream(block, one.stream), "record_stream");
    check(allocator.record_stream(block, other.stream), "record_stream");
    check(allocator.record_stream(block, one.stream), "record_stream");
    CHECK_OK(allocator.deallocate(block, freeing));  // returns: nothing waits on the host
    CHECK_EQ(driver->stream_query(0, freeing), Status::not_ready);
    one.open();
    check(driver->stream_synchronize(0, one.stream), "stream_synchronize");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK_EQ(driver->stream_query(0, freeing), Status::not_ready);
    other.open();
    CHECK_EQ(driver->stream_synchronize(0, freeing), Status::success);
  }
  CHECK_EQ(live(*driver, LiveKind::event), 2u);  // kept for the next free, one each
  driver->stream_destroy(0, freeing);
}

TEST(the_freeing_stream_itself_needs_no_event) {
  auto driver = make_driver();
  StreamOrderedAllocator allocator(driver, 0);
  const StreamHandle stream = make_stream(*driver);
  Block block = allocator.allocate(4096, stream);
  check(allocator.record_stream(block, stream), "record_stream");
  CHECK_OK(allocator.deallocate(block, stream));
  CHECK_EQ(live(*driver, LiveKind::event), 0u);
  driver->stream_destroy(0, stream);
}

TEST(a_free_that_fails_can_be_repeated_and_loses_nothing) {
  for (const char* operation :
       {"event_create", "event_record", "stream_wait_event", "mem_free_async"}) {
    auto driver = make_driver();
    const StreamHandle freeing = make_stream(*driver), user = make_stream(*driver);
    {
      StreamOrderedAllocator allocator(driver, 0);
      Block block = allocator.allocate(4096, freeing);
      check(allocator.record_stream(block, user), "record_stream");
      fail(*driver, operation);
      CHECK_EQ(allocator.deallocate(block, freeing), Status::unknown);
      CHECK_OK(allocator.deallocate(block, freeing));
    }
    driver->stream_destroy(0, freeing);
    driver->stream_destroy(0, user);
    CHECK_EQ(live(*driver), 0u);
  }
}

TEST(an_allocation_that_fails_leaves_nothing) {
  for (FaultWhen when : {FaultWhen::before, FaultWhen::after}) {
    for (const char* operation : {"pool_create", "pool_set", "pool_alloc_async"}) {
      auto driver = make_driver();
      {
        StreamOrderedAllocator allocator(driver, 0);
        fail(*driver, operation, when);
        CHECK_THROWS(allocator.allocate(4096, default_stream), DriverError);
        Block block = allocator.allocate(4096, default_stream);
        CHECK_OK(allocator.deallocate(block, default_stream));
      }
      CHECK_EQ(live(*driver), 0u);
    }
  }
}

TEST(no_memory_says_how_much_was_wanted_and_is_free) {
  for (bool pools : {true, false}) {
    auto driver = make_driver(pools);
    std::unique_ptr<Allocator> allocator;
    if (pools) allocator = std::make_unique<StreamOrderedAllocator>(driver, 0);
    else allocator = std::make_unique<PlainAllocator>(driver, 0);
    std::string text;
    try {
      allocator->allocate(std::size_t{128} << 20, default_stream);
    } catch (const OutOfMemory& error) {
      CHECK_EQ(error.status, Status::out_of_memory);
      CHECK_EQ(error.shortage.requested.value_or(0), std::size_t{128} << 20);
      CHECK_EQ(error.shortage.free.value_or(0), std::size_t{64} << 20);
      text = error.what();
    }
    CHECK(text.find("134217728 bytes requested on cpu:0") != std::string::npos);
    CHECK(text.find("of 67108864 free") != std::string::npos);
  }
}

TEST(no_bytes_are_refused_before_the_driver) {
  auto driver = make_driver();
  StreamOrderedAllocator ordered(driver, 0);
  PlainAllocator plain(driver, 0);
  for (Allocator* allocator : {static_cast<Allocator*>(&ordered), static_cast<Allocator*>(&plain)}) {
    CHECK_THROWS(allocator->allocate(0, default_stream), InvalidValue);
  }
  CHECK_EQ(live(*driver), 0u);
}

TEST(a_recorded_stream_that_does_not_exist_is_refused) {
  auto driver = make_driver();
  StreamOrderedAllocator allocator(driver, 0);
  const StreamHandle gone = make_stream(*driver);
  driver->stream_destroy(0, gone);
  Block block = allocator.allocate(4096, default_stream);
  CHECK(!ok(allocator.record_stream(block, gone)));
  CHECK_OK(allocator.deallocate(block, default_stream));
}

TEST(plain_memory_is_not_freed_while_recorded_work_is_pending) {
  auto driver = make_driver(false);
  PlainAllocator allocator(driver, 0);
  CHECK(allocator.may_block());
  Gate gate(driver, 1);
  Block block = allocator.allocate(4096, default_stream);
  check(allocator.record_stream(block, gate.stream), "record_stream");
  std::atomic<bool> freed{false};
  std::thread thread([&] {
    CHECK_OK(allocator.deallocate(block, default_stream));
    freed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!freed);
  CHECK_EQ(live(*driver, LiveKind::device_memory), 1u);
  gate.open();
  thread.join();
  CHECK_EQ(live(*driver, LiveKind::device_memory), 0u);
}

TEST(a_plain_free_that_fails_can_be_repeated) {
  for (const char* operation :
       {"stream_synchronize", "event_create", "event_record", "event_synchronize", "mem_free"}) {
    auto driver = make_driver(false);
    PlainAllocator allocator(driver, 0);
    const StreamHandle user = make_stream(*driver);
    Block block = allocator.allocate(4096, default_stream);
    check(allocator.record_stream(block, user), "record_stream");
    fail(*driver, operation);
    CHECK_EQ(allocator.deallocate(block, default_stream), Status::unknown);
    CHECK_OK(allocator.deallocate(block, default_stream));
    driver->stream_destroy(0, user);
    CHECK_EQ(live(*driver), 0u);
  }
}

TEST_MAIN()
