// Virtual memory on the CPU device: primitives, growable and sparse buffers, the mapping thread.
#include "mapping/arithmetic.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/host/host_driver.hpp"
#include "mapping/growable.hpp"
#include "mapping/limits.hpp"
#include "mapping/sparse.hpp"

using namespace ringmem;
using namespace ringmem::mapping;

namespace {

constexpr std::size_t page = 64 << 10;  // a small granularity keeps the tests light

HostConfig small() {
  HostConfig config;
  config.capacity = 64 * mebibyte;
  config.granularity = page;
  return config;
}

struct World {
  // Without recycling the mapping thread does only what a test asks for.
  explicit World(HostConfig config = small(), std::size_t recycled = 0)
      : faulty(std::make_shared<FaultyDriver>(make_host_driver(config))), driver(faulty) {
    Recycler::set_limit(recycled);
  }
  // What the mapping thread still cleans would be counted in the next test.
  ~World() {
    driver.reset();
    for (int i = 0; i < 5000 && faulty.use_count() > 1; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::shared_ptr<FaultyDriver> faulty;
  DriverRef driver;

  std::size_t live() const {
    std::size_t sum = 0;
    for (const std::size_t count : faulty->live().counts()) sum += count;
    return sum;
  }
  // Waits for the mapping thread to let go of what it still holds.
  std::size_t live_at_last() const {
    for (int i = 0; i < 2000 && live() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return live();
  }
  std::uint64_t calls(Operation operation) const {
    return faulty->plan().calls()[static_cast<std::size_t>(operation)];
  }
};

// The mapping thread counts a mapping off after the driver let go of it.
std::size_t live_mappings_at_last() {
  for (int i = 0; i < 2000 && live_mappings() > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return live_mappings();
}

const PhysicalProps device_0{};
const std::vector<AccessGrant> readwrite{AccessGrant{}};
const std::vector<StreamRef> nobody;

unsigned char* bytes(DevicePtr ptr) { return reinterpret_cast<unsigned char*>(ptr); }

std::shared_ptr<Growable> growable(const World& world, std::size_t nbytes,
                                   std::size_t max_handle = default_max_handle) {
  return Growable::create(world.driver, GrowableOptions{nbytes, device_0, readwrite, max_handle});
}

std::shared_ptr<Sparse> sparse(const World& world, std::size_t pages, bool read_zero = false) {
  return Sparse::create(world.driver,
                        SparseOptions{pages * page, page, device_0, readwrite, read_zero, 0});
}

}  // namespace

TEST(arithmetic_refuses_what_overflows_or_is_no_page) {
  CHECK_EQ(round_up(1, 4096, "n"), std::size_t{4096});
  CHECK_EQ(round_up(8192, 4096, "n"), std::size_t{8192});
  CHECK_THROWS(round_up(~std::size_t{0}, 4096, "n"), InvalidValue);
  CHECK_THROWS(checked_add(~std::size_t{0}, 1, "n"), InvalidValue);
  CHECK_THROWS(require_multiple(5, 4096, "n"), InvalidValue);
  CHECK_THROWS(require_inside(10, ~std::size_t{0} - 5, 100, "n"), InvalidValue);
  CHECK_EQ(require_inside(10, 90, 100, "n"), std::size_t{100});
}

TEST(a_plan_covers_all_bytes_in_few_handles) {
  const std::size_t two = 2 * mebibyte;
  CHECK_EQ(plan_handles(0, 16 * gibibyte, two, default_max_handle).size(), std::size_t{36});
  CHECK(plan_handles(0, two, two, default_max_handle) == std::vector<std::size_t>{two});
  for (const std::size_t offset : {std::size_t{0}, two, 5 * gibibyte}) {
    for (const std::size_t nbytes : {two, 62 * mebibyte, 3 * gibibyte + two}) {
      std::size_t sum = 0;
      for (const std::size_t size : plan_handles(offset, nbytes, two, default_max_handle)) {
        CHECK(size > 0 && size % two == 0 && size <= default_max_handle);
        sum += size;
      }
      CHECK_EQ(sum, nbytes);
    }
  }
  // A largest handle below a page, or that is none, still makes whole pages.
  for (const std::size_t size : plan_handles(0, 10 * two, two, 3 * mebibyte)) CHECK_EQ(size, two);
  CHECK_EQ(plan_handles(0, two, two, 1).size(), std::size_t{1});
}

TEST(release_is_leaf_first_in_any_order) {
  World world;
  for (int order = 0; order < 6; ++order) {
    auto range = AddressRange::reserve(world.driver, 4 * page, 0, device_0);
    auto memory = PhysicalMemory::create(world.driver, page, device_0);
    auto mapped = range->map(memory, page, readwrite);
    bytes(mapped->ptr())[0] = 7;
    const int first = order / 2, second = (order / 2 + 1 + order % 2) % 3;
    for (const int step : {first, second, 3 - first - second}) {
      if (step == 0) range->close();
      if (step == 1) memory->close();
      if (step == 2) mapped->unmap(nobody, {});
    }
    CHECK_EQ(world.live(), std::size_t{0});
    CHECK_THROWS(range->ptr(), Closed);
    CHECK_THROWS(mapped->ptr(), Closed);
    range->close(), memory->close(), mapped->unmap(nobody, {});
  }
  CHECK_EQ(live_mappings_at_last(), std::size_t{0});
}

TEST(one_memory_at_several_addresses_is_the_same_bytes) {
  World world;
  auto range = AddressRange::reserve(world.driver, 4 * page, 0, device_0);
  auto memory = PhysicalMemory::create(world.driver, 1, device_0);
  CHECK_EQ(memory->nbytes(), page);
  auto a = range->map(memory, 0, readwrite);
  auto b = range->map(memory, 2 * page, {AccessGrant{{}, Access::read}});
  bytes(a->ptr())[5] = 42;
  CHECK_EQ(int{bytes(b->ptr())[5]}, 42);
  CHECK(a->get_access({}) == Access::readwrite);
  CHECK(b->get_access({}) == Access::read);
  b->set_access(readwrite);
  CHECK(b->get_access({}) == Access::readwrite);
}

TEST(wrong_offsets_and_overlaps_are_refused_before_the_driver) {
  World world;
  auto range = AddressRange::reserve(world.driver, 4 * page, 0, device_0);
  auto two = PhysicalMemory::create(world.driver, 2 * page, device_0);
  auto mapped = range->map(two, page, readwrite);
  const auto before = world.calls(Operation::mem_map);
  CHECK_THROWS(range->map(two, 0, readwrite), InvalidValue);
  CHECK_THROWS(range->map(two, page, readwrite), InvalidValue);
  CHECK_THROWS(range->map(two, 2 * page, readwrite), InvalidValue);
  CHECK_THROWS(range->map(two, 3 * page, readwrite), InvalidValue);
  CHECK_THROWS(range->map(two, 1, readwrite), InvalidValue);
  CHECK_THROWS(range->map(two, ~std::size_t{0} - page + 1, readwrite), InvalidValue);
  CHECK_EQ(world.calls(Operation::mem_map), before);
  CHECK_THROWS(AddressRange::reserve(world.driver, 0, 0, device_0), InvalidValue);
  CHECK_THROWS(AddressRange::reserve(world.driver, page, 3, device_0), InvalidValue);
  CHECK_THROWS(AddressRange::reserve(world.driver, ~std::size_t{0}, 0, device_0), InvalidValue);
  CHECK_THROWS(PhysicalMemory::create(world.driver, 0, device_0), InvalidValue);
}

TEST(a_device_without_the_capability_is_told_so) {
  HostConfig config = small();
  config.export_fd = false;
  World world(config);
  CHECK_THROWS(PhysicalMemory::create(world.driver, page, PhysicalProps{{}, true, false}),
               DriverError);
  auto memory = PhysicalMemory::create(world.driver, page, device_0);
  CHECK_THROWS(memory->export_fd(), DriverError);
  config.virtual_memory = false;
  World none(config);
  CHECK_THROWS(AddressRange::reserve(none.driver, page, 0, device_0), DriverError);
  CHECK_THROWS(growable(none, page), DriverError);
}

TEST(access_for_a_device_that_cannot_reach_is_refused) {
  HostConfig config = small();
  config.devices = 2;
  config.all_peers = false;
  World world(config);
  const AccessGrant other{{LocationKind::device, 1}, Access::readwrite};
  auto range = AddressRange::reserve(world.driver, page, 0, device_0);
  auto memory = PhysicalMemory::create(world.driver, page, device_0);
  CHECK_THROWS(range->map(memory, 0, {AccessGrant{}, other}), DriverError);
  CHECK_EQ(range->mappings(), std::size_t{0});
}

TEST(exported_memory_lives_in_its_descriptor) {
  World world;
  const PhysicalProps shareable{{}, true, false};
  auto range = AddressRange::reserve(world.driver, 2 * page, 0, device_0);
  auto memory = PhysicalMemory::create(world.driver, page, shareable);
  auto mapped = range->map(memory, 0, readwrite);
  bytes(mapped->ptr())[9] = 99;
  const int fd = memory->export_fd();
  mapped->unmap(nobody, {});
  memory->close();
  auto imported = PhysicalMemory::import_fd(world.driver, fd, page, shareable);
  close(fd);
  auto again = range->map(imported, page, readwrite);
  CHECK_EQ(int{bytes(again->ptr())[9]}, 99);
  CHECK_THROWS(PhysicalMemory::import_fd(world.driver, -1, page, shareable), InvalidValue);
  CHECK_THROWS(PhysicalMemory::import_fd(world.driver, 0, page, shareable), DriverError);
}

TEST(growth_keeps_address_and_bytes) {
  World world;
  auto buffer = growable(world, 32 * mebibyte, 8 * page);
  const DevicePtr ptr = buffer->ptr();
  for (std::size_t pages = 1; pages <= 40; ++pages) {
    buffer->resize(pages * page - 3, nobody);
    bytes(ptr)[(pages - 1) * page] = static_cast<unsigned char>(pages);
    CHECK_EQ(buffer->ptr(), ptr);
  }
  for (std::size_t pages = 1; pages <= 40; ++pages) {
    CHECK_EQ(std::size_t{bytes(ptr)[(pages - 1) * page]}, pages);
  }
  CHECK_EQ(buffer->nbytes(), 40 * page - 3);
  CHECK_EQ(buffer->committed(), 40 * page);
  CHECK_THROWS(buffer->resize(32 * mebibyte + 1, nobody), InvalidValue);
  CHECK_EQ(buffer->nbytes(), 40 * page - 3);
  buffer->close(nobody);
  CHECK(buffer->closed());
  CHECK_THROWS(buffer->resize(1, nobody), Closed);
  buffer->close(nobody);
  buffer.reset();
  CHECK_EQ(world.live(), std::size_t{0});
}

TEST(a_growth_is_one_access_call) {
  World world;
  auto buffer = growable(world, 32 * mebibyte, 4 * page);
  const auto before = world.calls(Operation::mem_set_access);
  buffer->resize(20 * page, nobody);
  CHECK_EQ(world.calls(Operation::mem_set_access), before + 1);
  CHECK_EQ(buffer->handles(), std::size_t{5});
}

TEST(a_shrink_gives_whole_handles_back_and_keeps_the_rest) {
  World world;
  auto buffer = growable(world, 32 * mebibyte, 4 * page);
  buffer->resize(20 * page, nobody);
  std::memset(bytes(buffer->ptr()), 5, 6 * page);
  buffer->resize(6 * page, {StreamRef{}});
  buffer->settle();
  CHECK_EQ(buffer->committed(), 8 * page);
  CHECK_EQ(int{bytes(buffer->ptr())[6 * page - 1]}, 5);
  buffer->resize(0, {StreamRef{}});
  buffer->settle();
  CHECK_EQ(buffer->committed(), std::size_t{0});
  MemoryInfo info;
  CHECK_OK(world.driver->memory_info(0, &info));
  CHECK_EQ(info.free, info.total);
}

TEST(a_shrink_waits_for_the_work_that_it_was_told_of) {
  HostConfig config = small();
  config.latency_s = 0.05;
  World world(config);
  StreamHandle stream = 0;
  CHECK_OK(world.driver->stream_create(0, StreamFlags{}, &stream));
  auto buffer = growable(world, mebibyte, page);
  buffer->resize(4 * page, nobody);
  CHECK_OK(world.driver->fill_async(0, buffer->ptr(), 1, 1, 4 * page, stream));
  buffer->resize(page, {StreamRef{0, stream}});
  CHECK_EQ(buffer->committed(), 4 * page);  // the fill is still to come
  const auto maps = world.calls(Operation::mem_map);
  buffer->resize(3 * page, nobody);  // taken back in place
  CHECK_EQ(world.calls(Operation::mem_map), maps);
  buffer->settle();
  CHECK_EQ(buffer->committed(), 3 * page);
  CHECK_EQ(int{bytes(buffer->ptr())[3 * page - 1]}, 1);
  CHECK_OK(world.driver->stream_synchronize(0, stream));  // and nothing faulted
  buffer->close(nobody);
  CHECK_OK(world.driver->stream_destroy(0, stream));
}

TEST(memory_mapped_ahead_makes_growth_a_step_of_the_books) {
  World world;
  auto buffer = growable(world, 32 * mebibyte);
  buffer->reserve_ahead(8 * page);
  buffer->settle();
  CHECK_EQ(buffer->committed(), 8 * page);
  CHECK(buffer->resize_in_place(6 * page));
  bytes(buffer->ptr())[6 * page - 1] = 1;
  buffer->settle();
  CHECK(buffer->committed() >= 10 * page);
  buffer->reserve_ahead(0);
  buffer->settle();
  CHECK(!buffer->resize_in_place(20 * page));
}

TEST(no_shrink_below_a_pin_and_no_close) {
  World world;
  auto buffer = growable(world, mebibyte);
  buffer->resize(4 * page, nobody);
  buffer->pin(3 * page);
  CHECK_THROWS(buffer->pin(5 * page), InvalidValue);
  CHECK_THROWS(buffer->resize(2 * page, nobody), InvalidValue);
  CHECK_THROWS(buffer->close(nobody), InvalidValue);
  buffer->resize(3 * page, nobody);
  buffer->unpin(3 * page);
  buffer->resize(page, nobody);
  buffer->close(nobody);
}

TEST(memory_that_runs_out_leaves_the_buffer_as_it_was) {
  World world(small(), 64 * mebibyte);
  auto a = growable(world, 128 * mebibyte);
  auto b = growable(world, 128 * mebibyte);
  a->resize(40 * mebibyte, nobody);
  try {
    b->resize(40 * mebibyte, nobody);
    CHECK(false);
  } catch (const DriverError& error) {
    CHECK_EQ(error.status, Status::out_of_memory);
  }
  CHECK_EQ(b->nbytes(), std::size_t{0});
  CHECK_EQ(b->committed(), std::size_t{0});
  // What another buffer gave up, or the recycler keeps, is used before memory is said to be out.
  a->resize(8 * mebibyte, nobody);
  a->settle();
  b->resize(24 * mebibyte, nobody);
}

TEST(a_recycled_handle_is_zero) {
  World world(small(), mebibyte);
  auto a = growable(world, mebibyte, page);
  auto b = growable(world, mebibyte, page);
  a->resize(4 * page, nobody);
  std::memset(bytes(a->ptr()), 0xab, 4 * page);
  a->resize(0, nobody);
  a->settle();
  auto recycler = Recycler::of(world.driver, device_0);
  CHECK_EQ(recycler->kept(), 4 * page);
  for (int i = 0; i < 2000 && recycler->ready() < 4 * page; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto created = world.calls(Operation::mem_create);
  b->resize(4 * page, nobody);
  CHECK_EQ(world.calls(Operation::mem_create), created);
  for (std::size_t i = 0; i < 4 * page; i += 512) CHECK_EQ(int{bytes(b->ptr())[i]}, 0);
}

TEST(an_abandoned_buffer_is_released_when_its_work_is_over) {
  HostConfig config = small();
  config.latency_s = 0.02;
  World world(config);
  auto buffer = growable(world, mebibyte);
  buffer->resize(2 * page, nobody);
  CHECK_OK(world.driver->fill_async(0, buffer->ptr(), 1, 1, 2 * page, default_stream));
  buffer->abandon({StreamRef{}});
  buffer.reset();
  CHECK(world.live() > 0);
  CHECK_OK(world.driver->stream_synchronize(0, default_stream));
  CHECK_EQ(world.live_at_last(), std::size_t{0});
}

TEST(the_mapping_limit_is_met_before_it_is_hit) {
  World world;
  set_mapping_limit(10);
  auto buffer = growable(world, mebibyte, page);
  buffer->resize(8 * page, nobody);
  try {
    buffer->resize(16 * page, nobody);
    CHECK(false);
  } catch (const DriverError& error) {
    CHECK_EQ(error.status, Status::out_of_memory);
    CHECK(std::string(error.what()).find("mapping") != std::string::npos);
  }
  CHECK_EQ(buffer->committed(), 8 * page);
  set_mapping_limit(0);
  CHECK(mapping_limit(*world.driver) > 1000);
  buffer->resize(16 * page, nobody);
}

TEST(pages_of_captured_work_stay_until_close) {
  World world;
  Captures& captures = world.faulty->captures();
  auto buffer = growable(world, mebibyte, page);
  auto holes = sparse(world, 8);
  buffer->resize(4 * page, nobody);
  holes->map({{0, 4}});
  CHECK_EQ(captures.begin({0, default_stream}), Status::success);
  buffer->resize(page, {StreamRef{}});
  buffer->settle();
  CHECK_EQ(buffer->committed(), 4 * page);
  holes->unmap({{1, 2}}, {StreamRef{}});
  holes->settle();
  CHECK_EQ(holes->committed(), 4 * page);
  CHECK_EQ(captures.end({0, default_stream}), Status::success);  // nothing spoiled it
  buffer->settle();
  holes->settle();
  CHECK_EQ(buffer->committed(), 4 * page);  // the graph may be launched at any time
  CHECK_EQ(holes->committed(), 4 * page);
  buffer->close(nobody);
  holes->close(nobody);
  CHECK(buffer->closed() && holes->closed());
}

TEST(runs_are_joined_and_checked) {
  using Runs = std::vector<PageRun>;
  CHECK(normalized({{4, 2}, {0, 1}, {1, 3}}, 8) == (Runs{{0, 6}}));
  CHECK(normalized({{5, 1}, {0, 2}}, 8) == (Runs{{0, 2}, {5, 1}}));
  CHECK_THROWS(normalized({{0, 3}, {2, 1}}, 8), InvalidValue);
  CHECK_THROWS(normalized({{7, 2}}, 8), InvalidValue);
  CHECK_THROWS(normalized({{~std::size_t{0}, 2}}, 8), InvalidValue);
  CHECK_THROWS(normalized({{1, 0}}, 8), InvalidValue);
}

TEST(sparse_pages_come_and_go_in_runs) {
  World world;
  auto buffer = sparse(world, 64);
  const auto access = world.calls(Operation::mem_set_access);
  buffer->map({{0, 4}, {10, 2}, {4, 2}});
  CHECK_EQ(world.calls(Operation::mem_set_access), access + 2);
  CHECK_EQ(buffer->mapped_pages(), std::size_t{8});
  for (const std::size_t i : {0, 5, 10, 11}) {
    bytes(buffer->ptr())[i * page] = static_cast<unsigned char>(i + 1);
  }
  CHECK_THROWS(buffer->map({{20, 1}, {5, 1}}), InvalidValue);
  CHECK_EQ(buffer->mapped_pages(), std::size_t{8});
  CHECK_THROWS(buffer->unmap({{5, 2}}, nobody), InvalidValue);
  const auto unmaps = world.calls(Operation::mem_unmap);
  buffer->unmap({{1, 4}}, nobody);
  buffer->settle();
  CHECK_EQ(world.calls(Operation::mem_unmap), unmaps + 1);
  CHECK(buffer->runs() == (std::vector<PageRun>{{0, 1}, {5, 1}, {10, 2}}));
  for (const std::size_t i : {0, 5, 10, 11}) {
    CHECK_EQ(std::size_t{bytes(buffer->ptr())[i * page]}, i + 1);
  }
  buffer->pin({10, 2});
  CHECK_THROWS(buffer->unmap({{11, 1}}, nobody), InvalidValue);
  CHECK_THROWS(buffer->close(nobody), InvalidValue);
  CHECK_THROWS(buffer->pin({4, 2}), InvalidValue);
  buffer->unpin({10, 2});
  buffer->close(nobody);
  buffer.reset();
  CHECK_EQ(world.live(), std::size_t{0});
}

TEST(unmapped_sparse_pages_read_zero_when_asked) {
  World world;
  auto buffer = sparse(world, 16, true);
  const auto zero = [&](std::size_t i) { return bytes(buffer->ptr())[i * page + 17] == 0; };
  for (std::size_t i = 0; i < 16; ++i) CHECK(zero(i));
  buffer->map({{3, 2}});
  std::memset(bytes(buffer->ptr()) + 3 * page, 9, 2 * page);
  CHECK(zero(2) && !zero(3) && !zero(4) && zero(5));
  buffer->unmap({{3, 1}}, nobody);
  buffer->settle();
  CHECK(zero(3) && !zero(4));
  std::vector<unsigned char> all(16 * page, 1);
  CHECK_OK(world.driver->copy_async(0, reinterpret_cast<DevicePtr>(all.data()), buffer->ptr(),
                                    all.size(), default_stream));
  CHECK_OK(world.driver->stream_synchronize(0, default_stream));
  for (std::size_t i = 0; i < 16; ++i) CHECK_EQ(int{all[i * page]}, i == 4 ? 9 : 0);
  buffer->close(nobody);
  buffer.reset();
  CHECK_EQ(world.live(), std::size_t{0});
  CHECK_EQ(live_mappings_at_last(), std::size_t{0});
}

TEST(a_page_that_waits_to_leave_comes_back_with_its_bytes) {
  HostConfig config = small();
  config.latency_s = 0.05;
  World world(config);
  auto buffer = sparse(world, 8);
  buffer->map({{0, 4}});
  bytes(buffer->ptr())[page] = 77;
  CHECK_OK(world.driver->fill_async(0, buffer->ptr(), 1, 1, 8, default_stream));
  buffer->unmap({{0, 4}}, {StreamRef{}});
  const auto maps = world.calls(Operation::mem_map);
  buffer->map({{1, 1}});
  CHECK_EQ(world.calls(Operation::mem_map), maps);
  buffer->settle();
  CHECK(buffer->runs() == (std::vector<PageRun>{{1, 1}}));
  CHECK_EQ(int{bytes(buffer->ptr())[page]}, 77);
}

// Every call of a scenario fails once, before or after it was done: whatever happens, the error is
// typed, a repeated close succeeds, and nothing is left.
template <class Scenario>
void sweep(Scenario scenario, std::size_t recycled = 0) {
  for (const FaultWhen when : {FaultWhen::before, FaultWhen::after}) {
    for (std::uint64_t nth = 1;; ++nth) {
      World world(small(), recycled);
      world.faulty->plan().fail(FaultPlan::any_operation, nth, 1, Status::unknown, when);
      int thrown = 0;
      try {
        scenario(world);
      } catch (const DriverError&) {
        ++thrown;
      }
      const std::size_t left = world.live_at_last();
      const bool unused = world.faulty->plan().pending() > 0;
      if (left != 0) {
        testing::fail(__FILE__, __LINE__,
                      "leak when call " + std::to_string(nth) + " fails " +
                          (when == FaultWhen::before ? "before" : "after"));
      }
      CHECK_EQ(live_mappings_at_last(), std::size_t{0});
      if (unused && thrown == 0) break;
    }
  }
}

template <class Buffer>
void close_at_last(Buffer& buffer) {
  for (int i = 0; i < 3 && !buffer->closed(); ++i) {
    try {
      buffer->close(nobody);
    } catch (const DriverError&) {
    }
  }
  CHECK(buffer->closed());
}

TEST(no_failure_of_a_primitive_loses_anything) {
  sweep([](World& world) {
    auto range = AddressRange::reserve(world.driver, 4 * page, 0, device_0);
    auto memory = PhysicalMemory::create(world.driver, page, PhysicalProps{{}, true, false});
    auto mapped = range->map(memory, page, readwrite);
    auto second = range->map(memory, 3 * page, readwrite);
    second->set_access({AccessGrant{{}, Access::read}});
    const int fd = memory->export_fd();
    std::shared_ptr<PhysicalMemory> imported;
    try {
      imported = PhysicalMemory::import_fd(world.driver, fd, page, memory->props());
    } catch (...) {
      close(fd);
      throw;
    }
    close(fd);
    range->map(imported, 0, readwrite)->unmap({StreamRef{}}, {});
    mapped->unmap({StreamRef{}}, {});
    memory->close();
    range->close();
    second->unmap({}, {});
  });
}

TEST(no_failure_of_a_growable_buffer_loses_anything) {
  const auto scenario = [](World& world) {
    auto buffer = growable(world, 32 * page, 2 * page);
    try {
      buffer->resize(5 * page, nobody);
      const std::size_t before = buffer->nbytes();
      buffer->reserve_ahead(4 * page);
      buffer->settle();
      try {
        buffer->resize(12 * page, nobody);
      } catch (const DriverError&) {
        CHECK_EQ(buffer->nbytes(), before);
        throw;
      }
      bytes(buffer->ptr())[12 * page - 1] = 1;
      buffer->reserve_ahead(0);
      buffer->resize(3 * page, {StreamRef{}});
      buffer->settle();
      bytes(buffer->ptr())[3 * page - 1] = 1;
      buffer->resize(8 * page, nobody);
      bytes(buffer->ptr())[8 * page - 1] = 1;
    } catch (const DriverError&) {
      close_at_last(buffer);
      throw;
    }
    close_at_last(buffer);
  };
  sweep(scenario);
  sweep(scenario, mebibyte);
}

TEST(no_failure_of_a_sparse_buffer_loses_anything) {
  sweep([](World& world) {
    auto buffer = sparse(world, 8, true);
    try {
      buffer->map({{0, 2}, {4, 3}});
      bytes(buffer->ptr())[5 * page] = 1;
      buffer->unmap({{1, 1}, {4, 2}}, {StreamRef{}});
      buffer->settle();
      buffer->map({{1, 1}});
      bytes(buffer->ptr())[page] = 1;
    } catch (const DriverError&) {
      close_at_last(buffer);
      throw;
    }
    close_at_last(buffer);
  });
}

TEST(a_forked_child_is_refused_and_harms_nothing) {
  World world;
  auto buffer = growable(world, mebibyte);
  buffer->resize(2 * page, nobody);
  buffer->reserve_ahead(page);
  buffer->settle();
  bytes(buffer->ptr())[0] = 3;
  const pid_t child = fork();
  if (child == 0) {
    bool good = false;
    try {
      buffer->resize(4 * page, nobody);
    } catch (const DriverError&) {
      good = true;
    }
    buffer->close(nobody);
    buffer.reset();
    Worker::stop();
    _exit(good && !Worker::running() ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(int{bytes(buffer->ptr())[0]}, 3);
  buffer->resize(4 * page, nobody);
  buffer->close(nobody);
}

TEST(threads_may_grow_and_shrink_at_once) {
  World world;
  auto buffer = growable(world, 32 * mebibyte, 4 * page);
  buffer->reserve_ahead(8 * page);
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 3; ++seed) {
    threads.emplace_back([&buffer, seed] {
      unsigned state = seed;
      for (int i = 0; i < 200; ++i) {
        state = state * 1664525u + 1013904223u;
        buffer->resize((state >> 16) % 64 * page, nobody);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  buffer->resize(64 * page, nobody);
  std::memset(bytes(buffer->ptr()), 1, 64 * page);
  buffer->close(nobody);
  buffer.reset();
  Worker::flush();
  CHECK_EQ(live_mappings_at_last(), std::size_t{0});
}

TEST_MAIN()
