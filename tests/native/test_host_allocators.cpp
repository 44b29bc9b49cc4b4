// Releases that wait: the reaper, and the allocators of pinned, managed and registered memory.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/host/host_driver.hpp"
#include "driver/operations.hpp"
#include "memory/host_allocators.hpp"
#include "memory/reaper.hpp"

using namespace ringmem;

namespace {

constexpr double long_s = 20.0;

std::shared_ptr<FaultyDriver> make_driver() {
  HostConfig config;
  config.capacity = std::size_t{64} << 20;
  return std::make_shared<FaultyDriver>(make_host_driver(config));
}

void fail(FaultyDriver& driver, const char* operation, int times = 1,
          Status status = Status::unknown) {
  driver.plan().fail(find_operation(operation), 1, times, status, FaultWhen::before);
}

std::size_t live(const FaultyDriver& driver) {
  std::size_t sum = 0;
  for (std::size_t count : driver.live().counts()) sum += count;
  return sum;
}

bool flush() { return Reaper::instance().flush(long_s); }

// A stream that waits until the gate opens.
struct Gate {
  explicit Gate(Driver& d) : driver(d) {
    check(driver.stream_create(0, {}, &stream), "stream_create");
    check(driver.host_alloc(0, 4096, {}, &memory), "host_alloc");
    auto* word = static_cast<std::atomic<std::uint32_t>*>(memory);
    word->store(0);
    check(driver.stream_wait_value(0, stream, reinterpret_cast<DevicePtr>(memory), 1), "wait");
  }
  ~Gate() {
    open();
    driver.stream_synchronize(0, stream);
    driver.stream_destroy(0, stream);
    driver.host_free(0, memory);
  }
  void open() { static_cast<std::atomic<std::uint32_t>*>(memory)->store(1); }

  Driver& driver;
  StreamHandle stream = 0;
  void* memory = nullptr;
};

template <class A>
Block take(A& allocator) {
  return allocator.allocate(4096, default_stream);
}

}  // namespace

TEST(pinned_and_managed_memory_goes_and_comes_back) {
  auto driver = make_driver();
  PinnedAllocator pinned(driver, 0, {});
  ManagedAllocator managed(driver, 0, ManagedAttach::global);
  for (Allocator* allocator : {static_cast<Allocator*>(&pinned), static_cast<Allocator*>(&managed)}) {
    Block block = allocator->allocate(4096, default_stream);
    CHECK(block.ptr != 0);
    CHECK_EQ(live(*driver), 1u);
    CHECK_OK(allocator->deallocate(block, default_stream));
    CHECK(flush());
    CHECK_EQ(live(*driver), 0u);
  }
}

TEST(a_release_waits_for_every_recorded_stream) {
  auto driver = make_driver();
  PinnedAllocator allocator(driver, 0, {});
  {
    Gate first(*driver), second(*driver);
    Block block = take(allocator);
    const std::size_t before = driver->plan().calls()[find_operation("host_free")];
    CHECK_OK(allocator.record_stream(block, first.stream));
    CHECK_OK(allocator.record_stream(block, second.stream));
    CHECK_OK(allocator.record_stream(block, second.stream));
    CHECK_OK(allocator.deallocate(block, default_stream));
    for (Gate* gate : {&first, &second}) {
      CHECK(!Reaper::instance().flush(0.05));
      CHECK_EQ(driver->plan().calls()[find_operation("host_free")], before);
      gate->open();
    }
    CHECK(flush());
    CHECK_EQ(driver->plan().calls()[find_operation("host_free")], before + 1);
  }
  CHECK_EQ(live(*driver), 0u);
}

// What the driver itself makes wait (host_free, for every kernel) is not ours to overtake.
TEST(a_release_that_is_not_due_holds_up_no_other) {
  auto driver = make_driver();
  PinnedAllocator allocator(driver, 0, {});
  {
    Gate gate(*driver);
    CHECK_OK(allocator.deallocate(take(allocator), gate.stream));
    std::atomic<bool> ran{false};
    ReaperJob job;
    job.driver = driver;
    job.run = [&ran] {
      ran = true;
      return Status::success;
    };
    Reaper::instance().post(std::move(job));
    for (int i = 0; i < 5000 && Reaper::instance().pending() > 1; ++i) usleep(1000);
    CHECK(ran);
    CHECK_EQ(Reaper::instance().pending(), 1u);
    gate.open();
    CHECK(flush());
  }
  Reaper::instance().collect();
  CHECK_EQ(live(*driver), 0u);
}

TEST(a_deallocation_that_fails_did_nothing_and_may_be_repeated) {
  for (const char* operation : {"event_create", "event_record"}) {
    auto driver = make_driver();
    PinnedAllocator allocator(driver, 0, {});
    Block block = take(allocator);
    StreamHandle stream = 0;
    CHECK_OK(driver->stream_create(0, {}, &stream));
    CHECK_OK(allocator.record_stream(block, stream));
    fail(*driver, operation);
    CHECK_EQ(allocator.deallocate(block, default_stream), Status::unknown);
    CHECK_EQ(live(*driver), 2u);  // the block and the stream: no event
    CHECK_OK(allocator.deallocate(block, default_stream));
    CHECK(flush());
    CHECK_OK(driver->stream_destroy(0, stream));
    CHECK_EQ(live(*driver), 0u);
  }
}

TEST(the_reaper_repeats_a_call_that_fails_and_reports_one_that_keeps_failing) {
  static std::atomic<int> reports{0};
  Reaper::Hooks hooks;
  hooks.failed = [](const std::string& what, Status status) {
    reports += what == "cuMemFreeHost of 4096 bytes" && status == Status::unknown;
  };
  Reaper::instance().set_hooks(hooks);
  auto driver = make_driver();
  PinnedAllocator allocator(driver, 0, {});
  fail(*driver, "host_free", 2);
  CHECK_OK(allocator.deallocate(take(allocator), default_stream));
  CHECK(flush());
  CHECK_EQ(reports.load(), 0);
  CHECK_EQ(live(*driver), 0u);
  fail(*driver, "host_free", 3);
  CHECK_OK(allocator.deallocate(take(allocator), default_stream));
  CHECK(flush());
  CHECK_EQ(reports.load(), 1);
  CHECK_EQ(live(*driver), 1u);
  Reaper::instance().set_hooks({});
}

TEST(running_out_waits_once_for_what_is_on_its_way_back) {
  auto driver = make_driver();
  PinnedAllocator allocator(driver, 0, {});
  Block first = take(allocator);
  driver->plan().delay(find_operation("host_free"), std::chrono::duration<double>(0.02));
  CHECK_OK(allocator.deallocate(first, default_stream));
  fail(*driver, "host_alloc", 1, Status::out_of_memory);
  Block second = take(allocator);
  CHECK(second.ptr != 0);
  fail(*driver, "host_alloc", 1, Status::out_of_memory);
  CHECK_THROWS(take(allocator), DriverError);  // nothing is on its way: no second try
  CHECK_OK(allocator.deallocate(second, default_stream));
  CHECK(flush());
  CHECK_EQ(live(*driver), 0u);
}

TEST(registered_memory_keeps_its_owner_until_it_is_collected) {
  auto driver = make_driver();
  std::vector<char> memory(1 << 16);
  auto owner = std::make_shared<int>(7);
  {
    RegisteredMemory registered(driver, 0, {}, owner);
    Block block = registered.adopt(reinterpret_cast<DevicePtr>(memory.data()), memory.size());
    CHECK_EQ(live(*driver), 1u);
    CHECK_THROWS(registered.allocate(1, default_stream), DriverError);
    CHECK_OK(registered.deallocate(block, default_stream));
  }
  CHECK(flush());
  CHECK_EQ(live(*driver), 0u);
  CHECK(owner.use_count() > 1);
  Reaper::instance().collect();
  CHECK_EQ(owner.use_count(), 1);
}

TEST(many_threads_post_at_once) {
  auto driver = make_driver();
  PinnedAllocator allocator(driver, 0, {});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 200; ++j) {
        CHECK_OK(allocator.deallocate(take(allocator), default_stream));
        if (j % 50 == 0) Reaper::instance().collect();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(flush());
  CHECK_EQ(live(*driver), 0u);
}

#ifndef __SANITIZE_THREAD__  // which refuses threads in a forked child
TEST(a_forked_child_has_nothing_pending_and_a_reaper_of_its_own) {
  auto driver = make_driver();
  PinnedAllocator allocator(driver, 0, {});
  Gate gate(*driver);
  CHECK_OK(allocator.deallocate(take(allocator), gate.stream));
  const pid_t child = fork();
  if (child == 0) {
    if (Reaper::instance().pending() != 0) _exit(1);
    std::atomic<bool> ran{false};
    ReaperJob job;
    job.run = [&ran] {
      ran = true;
      return Status::success;
    };
    Reaper::instance().post(std::move(job));
    _exit(Reaper::instance().flush(long_s) && ran ? 0 : 2);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(Reaper::instance().pending(), 1u);
  gate.open();
  CHECK(flush());
}
#endif

// The last: what done jobs hold is let go of, for the leak checkers.
TEST(collecting_leaves_nothing) {
  CHECK(flush());
  CHECK(Reaper::instance().collect().size() > 0);
  CHECK_EQ(Reaper::instance().collect().size(), 0u);
}

TEST_MAIN()
