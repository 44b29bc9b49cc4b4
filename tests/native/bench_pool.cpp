// Times of the pool in C++: the pair, the pair among many live blocks, the random mix, threads.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "driver/host/host_driver.hpp"
#include "pool/pool.hpp"

using namespace ringmem;

namespace {

constexpr std::size_t kib = std::size_t{1} << 10;
constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::size_t gib = std::size_t{1} << 30;

DriverRef device() {
  HostConfig config;
  config.capacity = 128 * gib;
  return make_host_driver(config);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Least time of several runs, in ns an iteration.
template <typename Body>
double least(int iterations, Body body, int runs = 9) {
  double best = 1e9;
  for (int run = 0; run < runs; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < iterations; ++i) body();
    best = std::min(best, seconds_since(start) * 1e9 / iterations);
  }
  return best;
}

void pair(Pool& pool, std::size_t nbytes, StreamHandle stream) {
  Block block;
  if (!pool.try_allocate(nbytes, stream, &block)) block = pool.allocate(nbytes, stream);
  (void)pool.deallocate(block, stream);
}

void bench_pair() {
  Pool pool(device(), 0);
  for (const std::size_t nbytes : {256ul, 4 * kib, 32 * kib, 1 * mib, 64 * mib}) {
    pair(pool, nbytes, 0);
    std::printf("pair %9zu bytes            %7.1f ns\n", nbytes,
                least(100000, [&] { pair(pool, nbytes, 0); }));
  }
}

void bench_scaling() {
  for (const std::size_t live : {1000ul, 10000ul, 100000ul, 1000000ul}) {
    Pool pool(device(), 0);
    std::vector<Block> blocks;
    std::mt19937 random(1);
    for (std::size_t i = 0; i < live; ++i) blocks.push_back(pool.allocate(1 + random() % (32 * kib), 0));
    const double hot = least(20000, [&] { pair(pool, 4 * kib, 0); });
    // Any live block is freed and one of its size is allocated in its place.
    const double any = least(20000, [&] {
      Block& block = blocks[random() % blocks.size()];
      const std::size_t nbytes = block.nbytes;
      (void)pool.deallocate(block, 0);
      block = pool.allocate(nbytes, 0);
    });
    std::printf("pair among %7zu live        %7.1f ns, of any block %7.1f ns\n", live, hot, any);
    for (const Block& block : blocks) (void)pool.deallocate(block, 0);
  }
}

void bench_mix() {
  Pool pool(device(), 0);
  std::mt19937 random(1);
  std::uniform_real_distribution<> bits(8, 26);
  const auto size = [&] { return static_cast<std::size_t>(std::exp2(bits(random))); };
  std::vector<Block> blocks;
  for (std::size_t live = 0; live < 16 * gib; live += blocks.back().nbytes) {
    blocks.push_back(pool.allocate(size(), 0));
  }
  std::vector<std::size_t> sizes(1 << 16);
  std::vector<std::size_t> places(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = size(), places[i] = random() % blocks.size();
  std::size_t next = 0;
  const auto step = [&] {
    Block& block = blocks[places[next]];
    (void)pool.deallocate(block, 0);
    if (!pool.try_allocate(sizes[next], 0, &block)) block = pool.allocate(sizes[next], 0);
    next = (next + 1) % sizes.size();
  };
  for (std::size_t i = 0; i < sizes.size(); ++i) step();
  const std::uint64_t calls = pool.statistics().driver_calls;
  std::printf("mix 256 B to 64 MiB, 16 GiB     %7.1f ns a pair (%zu live, driver calls %llu)\n",
              least(static_cast<int>(sizes.size()), step, 5), blocks.size(),
              static_cast<unsigned long long>(pool.statistics().driver_calls - calls));
  for (const Block& block : blocks) (void)pool.deallocate(block, 0);
}

void bench_threads() {
  const DriverRef driver = device();
  for (const std::size_t nbytes : {4 * kib, 1 * mib, 64 * mib}) {
    double one = 0;
    for (const int count : {1, 2, 4, 8, 16}) {
      Pool pool(driver, 0);
      std::vector<StreamHandle> streams(static_cast<std::size_t>(count));
      for (StreamHandle& stream : streams) {
        check(driver->stream_create(0, {}, &stream), "cuStreamCreate");
        pair(pool, nbytes, stream);
      }
      constexpr int pairs = 200000;
      const auto start = std::chrono::steady_clock::now();
      std::vector<std::thread> threads;
      for (const StreamHandle stream : streams) {
        threads.emplace_back([&pool, nbytes, stream] {
          for (int i = 0; i < pairs; ++i) pair(pool, nbytes, stream);
        });
      }
      for (std::thread& thread : threads) thread.join();
      const double rate = count * pairs / seconds_since(start);
      if (count == 1) one = rate;
      std::printf("%2d threads, %9zu bytes    %7.1f M pairs/s (%.2f x)\n", count, nbytes, rate * 1e-6,
                  rate / one);
      for (const StreamHandle stream : streams) {
        pool.release_stream(stream);
        (void)driver->stream_destroy(0, stream);
      }
    }
  }
}

}  // namespace

int main() {
  bench_pair();
  bench_scaling();
  bench_mix();
  bench_threads();
}
