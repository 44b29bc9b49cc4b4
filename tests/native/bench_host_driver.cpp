// What the simulation itself costs: pool pairs, a mapping cycle, a copy, an event.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "driver/host/host_driver.hpp"

using namespace ringmem;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

template <class Body>
void measure(const char* what, int rounds, Body&& body) {
  body();
  std::vector<double> ns;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < rounds; ++i) body();
    const auto took = std::chrono::steady_clock::now() - start;
    ns.push_back(std::chrono::duration<double, std::nano>(took).count() / rounds);
  }
  std::sort(ns.begin(), ns.end());
  std::printf("%-44s %10.0f ns (median of 7)\n", what, ns[3]);
}

}  // namespace

int main() {
  HostDriver driver(HostConfig{});
  StreamHandle stream = 0;
  DevicePtr ptr = 0, range = 0;
  PoolHandle pool = 0;
  check(driver.stream_create(0, {}, &stream), "cuStreamCreate");
  check(driver.pool_default(0, &pool), "cuDeviceGetDefaultMemPool");
  check(driver.pool_set(0, pool, PoolAttribute::release_threshold, ~0ULL), "cuMemPoolSetAttribute");
  for (const std::size_t nbytes : {std::size_t{256}, MiB, 64 * MiB}) {
    std::printf("%zu bytes: ", nbytes);
    measure("cuMemAllocAsync + cuMemFreeAsync", 20000, [&] {
      (void)driver.mem_alloc_async(0, nbytes, stream, &ptr);
      (void)driver.mem_free_async(0, ptr, stream);
    });
  }
  std::mt19937 random(1);
  std::vector<DevicePtr> live(2000);
  for (DevicePtr& one : live)
    (void)driver.mem_alloc_async(0, 256 + random() % (8 * MiB), stream, &one);
  measure("the same, 2000 live blocks of mixed size", 20000, [&] {
    DevicePtr& one = live[random() % live.size()];
    (void)driver.mem_free_async(0, one, stream);
    (void)driver.mem_alloc_async(0, 256 + random() % (8 * MiB), stream, &one);
  });
  for (const DevicePtr one : live) (void)driver.mem_free_async(0, one, stream);

  constexpr std::size_t granule = 2 * MiB;
  PhysicalHandle handle = 0;
  const AccessGrant grant{{LocationKind::device, 0}, Access::readwrite};
  check(driver.address_reserve(granule, 0, 0, &range), "cuMemAddressReserve");
  measure("create, map, set access, unmap, release", 2000, [&] {
    (void)driver.mem_create(granule, {}, &handle);
    (void)driver.mem_map(range, granule, handle);
    (void)driver.mem_set_access(range, granule, &grant, 1);
    (void)driver.mem_unmap(range, granule);
    (void)driver.mem_release(handle);
  });

  void *from = nullptr, *to = nullptr;
  check(driver.host_alloc(0, 64 * MiB, {}, &from), "cuMemHostAlloc");
  check(driver.host_alloc(0, 64 * MiB, {}, &to), "cuMemHostAlloc");
  for (const std::size_t nbytes : {std::size_t{64}, 64 * MiB}) {
    std::printf("%zu bytes: ", nbytes);
    measure("copy + synchronize", nbytes > MiB ? 5 : 2000, [&] {
      (void)driver.copy_async(0, reinterpret_cast<DevicePtr>(to), reinterpret_cast<DevicePtr>(from),
                              nbytes, stream);
      (void)driver.stream_synchronize(0, stream);
    });
  }
  EventHandle event = 0;
  check(driver.event_create(0, {}, &event), "cuEventCreate");
  measure("record + query an event on an idle stream", 20000, [&] {
    (void)driver.event_record(0, event, stream);
    (void)driver.event_query(0, event);
  });
  return 0;
}
