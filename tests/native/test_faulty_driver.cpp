// FaultyDriver from several threads at once (for the thread sanitizer), and its promises that are
// easiest to see in C++: outputs are written only on success.
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/host/host_driver.hpp"

using namespace ringmem;

namespace {

DriverRef small_host() {
  HostConfig config;
  config.capacity = std::size_t{256} << 20;
  return make_host_driver(config);
}

std::size_t alive(const FaultyDriver& faulty) {
  std::size_t total = 0;
  for (std::size_t count : faulty.live().counts()) total += count;
  return total;
}

}  // namespace

TEST(outputs_are_written_only_on_success) {
  FaultyDriver faulty(small_host());
  for (FaultWhen when : {FaultWhen::before, FaultWhen::after}) {
    faulty.plan().fail(static_cast<int>(Operation::mem_alloc), 1, 1, Status::out_of_memory, when);
    DevicePtr ptr = 77;
    CHECK_EQ(faulty.mem_alloc(0, 4096, &ptr), Status::out_of_memory);
    CHECK_EQ(ptr, 77u);
    faulty.plan().fail(static_cast<int>(Operation::memory_info), 1, 1, Status::unknown, when);
    MemoryInfo info{1, 2};
    CHECK_EQ(faulty.memory_info(0, &info), Status::unknown);
    CHECK_EQ(info.free, 1u);
  }
  CHECK_EQ(alive(faulty), 0u);
}

TEST(the_sooner_of_two_rules_fails_the_call_and_both_have_counted_it) {
  FaultyDriver faulty(small_host());
  const int operation = static_cast<int>(Operation::device_count);
  faulty.plan().fail(operation, 1, 1, Status::timeout, FaultWhen::before);
  faulty.plan().fail(FaultPlan::any_operation, 2, 1, Status::unknown, FaultWhen::before);
  int count = 0;
  CHECK_EQ(faulty.device_count(&count), Status::timeout);
  CHECK_EQ(faulty.device_count(&count), Status::unknown);
  CHECK_EQ(faulty.device_count(&count), Status::success);
  CHECK_EQ(faulty.plan().pending(), 0u);
}

TEST(threads_that_create_fail_and_release_leave_nothing) {
  FaultyDriver faulty(small_host());
  faulty.plan().fail(FaultPlan::any_operation, 50, 100, Status::unknown, FaultWhen::after);
  const auto churn = [&] {
    PhysicalProps props;
    for (int i = 0; i < 200; ++i) {
      PhysicalHandle handle = 0;
      DevicePtr range = 0;
      const std::size_t nbytes = std::size_t{2} << 20;
      if (!ok(faulty.mem_create(nbytes, props, &handle))) continue;
      if (ok(faulty.address_reserve(nbytes, 0, 0, &range))) {
        if (ok(faulty.mem_map(range, nbytes, handle))) (void)faulty.mem_unmap(range, nbytes);
        (void)faulty.address_free(range, nbytes);
      }
      (void)faulty.mem_release(handle);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(churn);
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(faulty.plan().pending(), 0u);
  CHECK_EQ(alive(faulty), 0u);
}

TEST_MAIN()
