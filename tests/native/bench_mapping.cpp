// What our layer adds to the driver's own calls: bench_mapping [cpu|cuda] [GiB to grow to].
// Every line: ours, the driver's raw calls in the same pattern and the same run, and the ratio.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "driver/cuda/cuda_driver.hpp"
#include "driver/host/host_driver.hpp"
#include "mapping/growable.hpp"
#include "mapping/limits.hpp"
#include "mapping/sparse.hpp"

using namespace ringmem;
using namespace ringmem::mapping;

namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void line(const char* what, double ours, double raw) {
  std::printf("%-44s ours %10.2f us   raw %10.2f us   ratio %.3f\n", what, ours, raw, ours / raw);
}

// The driver's own calls: handles of these sizes, mapped one behind the other, one access call.
struct Raw {
  Raw(Driver& driver, std::size_t reserve) : d(driver), reserved(reserve) {
    check(d.address_reserve(reserve, 0, 0, &base), "cuMemAddressReserve");
  }
  void grow(const std::vector<std::size_t>& sizes) {
    const std::size_t start = end;
    for (const std::size_t size : sizes) {
      PhysicalHandle handle = 0;
      check(d.mem_create(size, PhysicalProps{{}, true, false}, &handle), "cuMemCreate");
      check(d.mem_map(base + end, size, handle), "cuMemMap");
      handles.push_back(handle);
      end += size;
    }
    const AccessGrant grant{};
    check(d.mem_set_access(base + start, end - start, &grant, 1), "cuMemSetAccess");
  }
  ~Raw() {
    if (end > 0) d.mem_unmap(base, end);
    for (const PhysicalHandle handle : handles) d.mem_release(handle);
    d.address_free(base, reserved);
  }

  Driver& d;
  std::size_t reserved;
  DevicePtr base = 0;
  std::size_t end = 0;
  std::vector<PhysicalHandle> handles;
};

std::shared_ptr<Growable> growable(const DriverRef& driver, std::size_t nbytes,
                                   std::size_t max_handle = default_max_handle) {
  return Growable::create(driver, GrowableOptions{nbytes, PhysicalProps{{}, true, false},
                                                  {AccessGrant{}}, max_handle});
}

// Ours and the raw calls in turn, so that both see the same machine.
void growth_by_a_page(const DriverRef& driver, std::size_t page) {
  constexpr std::size_t steps = 256;
  auto buffer = growable(driver, steps * page);
  Raw raw(*driver, steps * page);
  std::vector<double> ours, theirs;
  for (std::size_t i = 1; i <= steps; ++i) {
    auto start = Clock::now();
    buffer->resize(i * page, {});
    ours.push_back(since(start));
    start = Clock::now();
    raw.grow({page});
    theirs.push_back(since(start));
  }
  line("growth by one page", median(ours), median(theirs));
}

void growth_mapped_ahead(const DriverRef& driver, std::size_t page) {
  constexpr std::size_t steps = 256;
  auto buffer = growable(driver, 2 * steps * page);
  buffer->reserve_ahead(64 * page);
  std::vector<double> ours;
  for (std::size_t i = 1; i <= steps; ++i) {
    if (i % 16 == 1) buffer->settle();  // the thread has had its time
    const auto start = Clock::now();
    buffer->resize(i * page, {});
    ours.push_back(since(start));
  }
  std::sort(ours.begin(), ours.end());
  std::printf("%-44s p50 %.3f us   p99 %.3f us   max %.3f us\n", "growth by one page, mapped ahead",
              ours[steps / 2], ours[steps * 99 / 100], ours.back());
}

void growth_at_once(const DriverRef& driver, std::size_t page, std::size_t total) {
  std::vector<double> ours, theirs;
  for (int i = 0; i < 3; ++i) {
    {
      auto buffer = growable(driver, total);
      const auto start = Clock::now();
      buffer->resize(total, {});
      ours.push_back(since(start));
    }
    Raw raw(*driver, total);
    const auto start = Clock::now();
    raw.grow(plan_handles(0, total, page, default_max_handle));
    theirs.push_back(since(start));
  }
  std::printf("%zu MiB in %zu handles:\n", total / mebibyte,
              plan_handles(0, total, page, default_max_handle).size());
  line("  growth at once", median(ours), median(theirs));
}

void growth_with_many_handles(const DriverRef& driver, std::size_t page, std::size_t handles) {
  // Not shareable: on the CPU every shareable handle is a descriptor.
  auto buffer = Growable::create(
      driver, GrowableOptions{(handles + 600) * page, PhysicalProps{}, {AccessGrant{}}, page});
  const auto cost = [&](std::size_t from) {
    buffer->resize(from * page, {});
    std::vector<double> times;
    for (std::size_t i = 1; i <= 300; ++i) {
      const auto start = Clock::now();
      buffer->resize((from + i) * page, {});
      times.push_back(since(start));
    }
    return median(times);
  };
  const double few = cost(10);
  const double many = cost(handles);
  std::printf("growth by one page with 10 handles %.2f us, with %zu %.2f us, ratio %.2f\n", few,
              handles, many, many / few);
}

void sparse_pages(const DriverRef& driver, std::size_t page) {
  constexpr std::size_t pages = 256;
  for (const bool read_zero : {false, true}) {
    auto start = Clock::now();
    auto buffer = Sparse::create(driver, SparseOptions{pages * page, page, PhysicalProps{},
                                                       {AccessGrant{}}, read_zero, 0});
    const double created = since(start);
    start = Clock::now();
    buffer->map({{0, 64}});
    const double mapped = since(start) / 64;
    start = Clock::now();
    buffer->unmap({{0, 64}}, {});
    const double unmapped = since(start);
    buffer->settle();
    const double settled = since(start) / 64;
    std::printf("sparse%s: made %.0f us (%zu pages), map %.2f us a page in a run of 64, "
                "unmap seen %.2f us, done %.2f us a page\n",
                read_zero ? ", reads zero" : "", created, pages, mapped, unmapped, settled);
  }
}

// One small handle mapped again and again, up to a bound: where does the driver stop?
void mappings_until_it_stops(const DriverRef& driver, std::size_t page, std::size_t most) {
  PhysicalHandle handle = 0;
  check(driver->mem_create(page, PhysicalProps{}, &handle), "cuMemCreate");
  DevicePtr base = 0;
  check(driver->address_reserve(most * page, 0, 0, &base), "cuMemAddressReserve");
  std::size_t count = 0;
  Status status = Status::success;
  const auto start = Clock::now();
  while (count < most && ok(status)) {
    status = driver->mem_map(base + count * page, page, handle);
    if (ok(status)) ++count;
  }
  std::printf("mappings of one handle: %zu, then %s (%.2f us each)\n", count,
              ok(status) ? "stopped asking" : status_name(status).c_str(),
              since(start) / static_cast<double>(count));
  if (count > 0) driver->mem_unmap(base, count * page);
  driver->mem_release(handle);
  driver->address_free(base, most * page);
}

}  // namespace

int main(int argc, char** argv) {
  const bool cuda = argc > 1 && std::strcmp(argv[1], "cuda") == 0;
  HostConfig config;
  const DriverRef driver = cuda ? DriverRef(cuda_driver()) : make_host_driver(config);
  const std::size_t total =
      argc > 2 ? std::strtoull(argv[2], nullptr, 10) * gibibyte : (cuda ? 64 : 2) * gibibyte;
  Recycler::set_limit(0);
  std::size_t page = 0;
  check(driver->granularity(PhysicalProps{}, false, &page), "cuMemGetAllocationGranularity");
  std::printf("%s, pages of %zu KiB\n", driver->platform(), page / 1024);
  growth_by_a_page(driver, page);
  growth_mapped_ahead(driver, page);
  growth_at_once(driver, page, total);
  growth_with_many_handles(driver, page, 10000);
  sparse_pages(driver, page);
  mappings_until_it_stops(driver, page, cuda ? 400000 : 40000);
}
