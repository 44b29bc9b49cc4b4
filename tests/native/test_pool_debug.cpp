// The debug allocator finds what it is made to find, names the place, and finds nothing else.
#include <cstring>
#include <thread>

#include "check.hpp"
#include "driver/host/host_driver.hpp"
#include "pool/debug.hpp"

using namespace ringmem;
using Kind = DebugReport::Kind;

namespace {

struct Bench {
  DriverRef driver = make_host_driver({});
  StreamHandle first = 0;
  StreamHandle second = 0;
  Pool pool{driver, 0};
  DebugAllocator debug{pool};

  Bench() {
    CHECK_OK(driver->stream_create(0, {}, &first));
    CHECK_OK(driver->stream_create(0, {}, &second));
    DebugAllocator::ask_for_places([] { return std::string("program.py:7"); });
  }
  std::vector<DebugReport> settle() {
    CHECK_OK(driver->stream_synchronize(0, first));
    CHECK_OK(driver->stream_synchronize(0, second));
    return debug.take_reports();
  }
};

void spin(void* argument) {
  while (!static_cast<std::atomic<bool>*>(argument)->load()) std::this_thread::yield();
}

}  // namespace

TEST(good_programs_are_not_reported) {
  Bench b;
  for (const std::size_t nbytes : {1ul, 255ul, 40000ul, 3000001ul}) {
    Block block = b.debug.allocate(nbytes, b.first);
    CHECK_OK(b.driver->fill_async(0, block.ptr, 7, 1, nbytes, b.first));
    CHECK_EQ(b.debug.live_blocks().at(0).allocated_at, "program.py:7");
    CHECK_OK(b.debug.deallocate(block, b.first));
  }
  CHECK_EQ(b.settle().size(), 0u);
}

TEST(memory_is_poisoned_when_allocated_and_freed) {
  Bench b;
  const Block block = b.debug.allocate(4096, b.first);
  CHECK_OK(b.driver->stream_synchronize(0, b.first));
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(block.ptr);
  CHECK_EQ(int{bytes[0]}, int{DebugAllocator::fresh_byte});
  CHECK_EQ(int{bytes[4095]}, int{DebugAllocator::fresh_byte});
  CHECK_OK(b.debug.deallocate(block, b.first));
  CHECK_OK(b.driver->stream_synchronize(0, b.first));
  CHECK_EQ(int{bytes[4095]}, int{DebugAllocator::freed_byte});
}

TEST(writing_past_either_end_is_found) {
  Bench b;
  const Block over = b.debug.allocate(1000, b.first);
  CHECK_OK(b.driver->fill_async(0, over.ptr, 1, 1, 1001, b.first));
  CHECK_OK(b.debug.deallocate(over, b.first));
  std::vector<DebugReport> reports = b.settle();
  CHECK_EQ(reports.size(), 1u);
  CHECK(reports[0].kind == Kind::overrun && reports[0].ptr == over.ptr);
  CHECK_EQ(reports[0].allocated_at, "program.py:7");

  const Block under = b.debug.allocate(1000, b.first);
  CHECK_OK(b.driver->fill_async(0, under.ptr - 4, 1, 1, 4, b.first));
  CHECK_OK(b.debug.deallocate(under, b.first));
  reports = b.settle();
  CHECK_EQ(reports.size(), 1u);
  CHECK(reports[0].kind == Kind::underrun);
}

TEST(double_and_foreign_frees_are_told_apart) {
  Bench b;
  const Block block = b.debug.allocate(100, b.first);
  CHECK_OK(b.debug.deallocate(block, b.first));
  CHECK_EQ(b.debug.deallocate(block, b.first), Status::illegal_state);
  CHECK_EQ(b.debug.deallocate({0x1234, 1, nullptr}, b.first), Status::illegal_state);
  const std::vector<DebugReport> reports = b.settle();
  CHECK_EQ(reports.size(), 2u);
  CHECK(reports[0].kind == Kind::double_free && reports[1].kind == Kind::foreign);
  CHECK_EQ(reports[0].allocated_at, "program.py:7");
}

TEST(a_stream_that_never_waited_is_found) {
  Bench b;
  std::atomic<bool> go{false};
  CHECK_OK(b.driver->launch_host_function(0, b.first, spin, &go));  // the first stream is behind
  Block block = b.debug.allocate(100, b.first);
  CHECK_OK(b.debug.record_stream(block, b.second));
  CHECK_OK(b.driver->stream_synchronize(0, b.second));
  CHECK_OK(b.debug.deallocate(block, b.second));
  CHECK_OK(b.driver->stream_synchronize(0, b.second));
  go = true;
  const std::vector<DebugReport> reports = b.settle();
  CHECK(reports.size() >= 2);
  CHECK(reports[0].kind == Kind::unordered_use && reports[1].kind == Kind::unordered_free);
}

TEST(a_stream_that_waited_is_not_reported) {
  Bench b;
  std::atomic<bool> go{false};
  EventHandle event = 0;
  CHECK_OK(b.driver->event_create(0, {}, &event));
  CHECK_OK(b.driver->launch_host_function(0, b.first, spin, &go));
  Block block = b.debug.allocate(100, b.first);
  CHECK_OK(b.driver->event_record(0, event, b.first));
  CHECK_OK(b.driver->stream_wait_event(0, b.second, event));
  CHECK_OK(b.debug.record_stream(block, b.second));
  go = true;
  CHECK_EQ(b.settle().size(), 0u);
  CHECK_OK(b.debug.deallocate(block, b.first));
  CHECK_EQ(b.settle().size(), 0u);
  CHECK_OK(b.driver->event_destroy(0, event));
}

TEST_MAIN()
