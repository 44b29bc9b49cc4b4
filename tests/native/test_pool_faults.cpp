// Whatever driver call fails, at whatever time: the pool's books stay right, no two live blocks
// overlap, every live block has memory, and in the end nothing is left behind.
#include <map>
#include <random>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "paper_driver.hpp"
#include "pool/pool.hpp"

using namespace ringmem;
using testing::PaperDriver;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr StreamHandle streams[] = {0, 3, 4};

// The program: at a scale of 24 handles are larger than a page, and change their size at the
// limit.
struct Shape {
  bool tight;
  std::size_t scale;
};
constexpr Shape shapes[] = {{false, 1}, {true, 1}, {false, 24}};

struct Outcome {
  std::uint64_t calls = 0;  // of the operation that was to fail
  std::uint64_t released = 0;  // handles, in all
  int failures = 0;         // that callers saw
};

// A program that grows, moves pages, trims and orders streams, under a limit.
Outcome run(Operation operation, std::uint64_t nth, std::uint64_t times, Status status,
            FaultWhen when, Shape shape) {
  const std::size_t unit = shape.scale * mib;
  auto paper = std::make_shared<PaperDriver>(512 * unit);
  auto faulty = std::make_shared<FaultyDriver>(paper);
  paper->set_late(shape.scale > 1 ? 0 : 20);
  Outcome outcome;
  {
    PoolOptions options;
    options.limit = (shape.scale > 1 ? 56 : 112) * unit;
    options.tight = shape.tight;
    Pool pool(faulty, 0, options);
    faulty->plan().fail(static_cast<int>(operation), nth, times, status, when);
    std::mt19937 random(7);
    std::map<DevicePtr, std::pair<Block, StreamHandle>> live;
    std::size_t bytes = 0;
    for (int i = 0; i < 400; ++i) {
      paper->tick();
      const StreamHandle stream = streams[random() % 3];
      const std::size_t nbytes = 1 + random() % (random() % 3 ? 12 * unit : 40000);
      try {
        if (bytes + nbytes <= 64 * unit) {
          const Block block = pool.allocate(nbytes, stream);
          const auto [at, inserted] = live.emplace(block.ptr, std::pair{block, stream});
          CHECK(inserted);
          if (at != live.begin()) {
            CHECK(std::prev(at)->first + std::prev(at)->second.first.nbytes <= block.ptr);
          }
          CHECK(paper->place_of(block.ptr) != 0 && paper->place_of(block.ptr + nbytes - 1) != 0);
          bytes += nbytes;
        }
        if (i % 50 == 49 && shape.scale == 1) check(pool.trim(8 * unit), "trim");
      } catch (const DriverError&) {
        ++outcome.failures;
      }
      while (!live.empty() && (bytes > 48 * unit || random() % 3 == 0)) {
        auto at = std::next(live.begin(), static_cast<int>(random() % live.size()));
        CHECK_OK(pool.deallocate(at->second.first, at->second.second));
        bytes -= at->second.first.nbytes;
        live.erase(at);
      }
      if (i % 16 == 0) CHECK_EQ(pool.inconsistency(), std::string());
    }
    outcome.calls = faulty->plan().calls()[static_cast<std::size_t>(operation)];
    outcome.released = pool.statistics().handles_released;
    for (const auto& [ptr, entry] : live) CHECK_OK(pool.deallocate(entry.first, entry.second));
    try {
      (void)pool.close();
    } catch (const DriverError&) {
      ++outcome.failures;
    }
    faulty->plan().clear();
    CHECK(pool.close());  // what could not be given back then is given back now
    CHECK_EQ(pool.inconsistency(), std::string());
  }
  CHECK_EQ(paper->live_handles(), 0u);
  CHECK_EQ(paper->live_mappings(), 0u);
  CHECK_EQ(paper->live_ranges(), 0u);
  if (operation != Operation::event_destroy) CHECK_EQ(paper->live_events(), 0u);
  return outcome;
}

void sweep(Operation operation, Status status) {
  for (const Shape shape : shapes) {
    const std::uint64_t calls = run(operation, 1u << 30, 1, status, FaultWhen::before, shape).calls;
    CHECK(calls > 0);
    const std::uint64_t step = std::max<std::uint64_t>(1, calls / (shape.scale > 1 ? 10 : 60));
    for (const FaultWhen when : {FaultWhen::before, FaultWhen::after}) {
      for (std::uint64_t nth = 1; nth <= calls; nth += step) {
        const int before = testing::failures();
        (void)run(operation, nth, 1, status, when, shape);
        if (shape.scale == 1) (void)run(operation, nth, 3, status, when, shape);
        if (testing::failures() == before) continue;
        testing::fail(__FILE__, __LINE__,
                      std::string(cuda_name(operation)) + ", call " + std::to_string(nth) +
                          (when == FaultWhen::before ? ", before" : ", after") +
                          (shape.tight ? ", tight" : "") + ", scale " + std::to_string(shape.scale));
        return;
      }
    }
  }
}

}  // namespace

TEST(memory_info_fails) { sweep(Operation::memory_info, Status::unknown); }
TEST(granularity_fails) { sweep(Operation::granularity, Status::not_supported); }
TEST(address_reserve_fails) { sweep(Operation::address_reserve, Status::out_of_memory); }
TEST(create_fails) { sweep(Operation::mem_create, Status::out_of_memory); }
TEST(create_fails_strangely) { sweep(Operation::mem_create, Status::unknown); }
TEST(map_fails) { sweep(Operation::mem_map, Status::map_failed); }
TEST(set_access_fails) { sweep(Operation::mem_set_access, Status::unknown); }
TEST(unmap_fails) { sweep(Operation::mem_unmap, Status::unmap_failed); }
TEST(release_fails) { sweep(Operation::mem_release, Status::unknown); }
TEST(event_create_fails) { sweep(Operation::event_create, Status::out_of_memory); }
TEST(event_record_fails) { sweep(Operation::event_record, Status::invalid_handle); }
TEST(event_query_fails) { sweep(Operation::event_query, Status::unknown); }
TEST(stream_wait_fails) { sweep(Operation::stream_wait_event, Status::unknown); }

TEST_MAIN()
