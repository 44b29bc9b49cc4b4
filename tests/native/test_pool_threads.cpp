// Threads and streams at once on the simulated device, whose streams really are late: every block
// is filled with a pattern on its own stream and checked there right before it is freed, so memory
// handed over too early, or a page moved under somebody, shows as a broken pattern.
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver/host/host_driver.hpp"
#include "pool/pool.hpp"

using namespace ringmem;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

std::atomic<std::uint64_t> broken{0};
std::atomic<std::uint64_t> checked{0};

struct Canary {
  DevicePtr ptr;
  std::size_t nbytes;
  std::uint32_t pattern;
};

void check_canary(void* argument) {
  const auto* canary = static_cast<Canary*>(argument);
  const auto* words = reinterpret_cast<const volatile std::uint32_t*>(canary->ptr);
  const std::size_t count = canary->nbytes / 4;
  bool good = true;
  for (std::size_t i = 0; i < count; i += 1 + count / 64) good &= words[i] == canary->pattern;
  if (count) good &= words[count - 1] == canary->pattern;
  broken += !good;
  ++checked;
  delete canary;
}

struct Setup {
  int threads = 4;
  int streams_each = 2;
  int operations = 3000;
  std::size_t most_each = 24 * mib;
  std::size_t largest = 6 * mib;
  PoolOptions options{};
  std::size_t capacity = std::size_t{1} << 30;
  double latency_s = 20e-6;
  bool shared_streams = false;  // all threads use all streams
};

void work(Pool& pool, const Setup& setup, std::vector<StreamHandle> streams, unsigned seed) {
  Driver& driver = *pool.driver();
  std::mt19937 random(seed);
  struct Owned {
    Block block;
    StreamHandle stream;
    std::uint32_t pattern;
  };
  std::vector<Owned> owned;
  std::size_t live = 0;
  const auto release = [&](Owned one) {
    const StreamHandle user = streams[random() % streams.size()];
    if (user != one.stream && random() % 2) {
      // Another stream looks at it too, after the one that wrote it.
      EventHandle event = 0;
      CHECK_OK(driver.event_create(0, {}, &event));
      CHECK_OK(driver.event_record(0, event, one.stream));
      CHECK_OK(driver.stream_wait_event(0, user, event));
      CHECK_OK(driver.event_destroy(0, event));
      CHECK_OK(driver.launch_host_function(
          0, user, check_canary, new Canary{one.block.ptr, one.block.nbytes, one.pattern}));
      CHECK_OK(pool.record_stream(one.block, user));
    }
    CHECK_OK(driver.launch_host_function(
        0, one.stream, check_canary, new Canary{one.block.ptr, one.block.nbytes, one.pattern}));
    CHECK_OK(pool.deallocate(one.block, one.stream));
    live -= one.block.nbytes;
  };
  for (int i = 0; i < setup.operations; ++i) {
    const StreamHandle stream = streams[random() % streams.size()];
    const std::size_t limit = random() % 2 ? setup.largest : 40000;
    const std::size_t nbytes = 4 + random() % limit / 4 * 4;
    if (live + nbytes <= setup.most_each && random() % 2) {
      Owned one{pool.allocate(nbytes, stream), stream, static_cast<std::uint32_t>(random())};
      CHECK_OK(driver.fill_async(0, one.block.ptr, one.pattern, 4, nbytes / 4, stream));
      owned.push_back(one);
      live += nbytes;
    } else if (!owned.empty()) {
      std::swap(owned[random() % owned.size()], owned.back());
      release(owned.back());
      owned.pop_back();
    }
    if (random() % 512 == 0) (void)pool.statistics();
    if (random() % 1024 == 0) CHECK_OK(pool.trim(4 * mib));
  }
  for (const Owned& one : owned) release(one);
}

void run(const Setup& setup) {
  HostConfig config;
  config.capacity = setup.capacity;
  config.latency_s = setup.latency_s;
  const DriverRef driver = make_host_driver(config);
  broken = 0;
  {
    Pool pool(driver, 0, setup.options);
    std::vector<StreamHandle> all(static_cast<std::size_t>(setup.threads * setup.streams_each));
    for (StreamHandle& stream : all) CHECK_OK(driver->stream_create(0, {}, &stream));
    std::vector<std::thread> threads;
    for (int i = 0; i < setup.threads; ++i) {
      std::vector<StreamHandle> mine = all;
      if (!setup.shared_streams) {
        mine.assign(all.begin() + i * setup.streams_each,
                    all.begin() + (i + 1) * setup.streams_each);
      }
      threads.emplace_back(work, std::ref(pool), std::cref(setup), mine,
                           static_cast<unsigned>(i + 1));
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(pool.inconsistency(), std::string());
    CHECK_EQ(pool.statistics().live, 0u);
    CHECK_EQ(pool.statistics().requested, 0u);
    CHECK(pool.close());
    for (const StreamHandle stream : all) CHECK_OK(driver->stream_synchronize(0, stream));
    for (const StreamHandle stream : all) CHECK_OK(driver->stream_destroy(0, stream));
  }
  CHECK_EQ(broken.load(), 0u);
  CHECK(checked.load() > 0);
}

}  // namespace

TEST(own_streams) { run({}); }
TEST(shared_streams) { run({.operations = 1500, .shared_streams = true}); }
TEST(under_a_limit) {
  Setup setup{.operations = 2000, .shared_streams = true};
  setup.options.limit = 160 * mib;
  run(setup);
}
TEST(on_a_full_device) { run({.operations = 2000, .capacity = 160 * mib, .shared_streams = true}); }
TEST(tight) {
  Setup setup{.operations = 2000};
  setup.options.tight = true;
  run(setup);
}

TEST_MAIN()
