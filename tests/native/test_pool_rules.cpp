// What the pool promises, one rule a test: sizes, limits, thresholds, trimming, callbacks, closing,
// streams that go away, forks, the two older policies, and memory kept on hostile programs.
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "paper_driver.hpp"
#include "pool/pool.hpp"

using namespace ringmem;
using testing::PaperDriver;

namespace {

constexpr std::size_t kib = std::size_t{1} << 10;
constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::size_t gib = std::size_t{1} << 30;

std::shared_ptr<PaperDriver> paper(std::size_t capacity = 4 * gib) {
  return std::make_shared<PaperDriver>(capacity);
}

PoolOptions with(PoolPolicy policy) {
  PoolOptions options;
  options.policy = policy;
  return options;
}

}  // namespace

// --- sizes and bad input -------------------------------------------------------------------------

TEST(small_classes_waste_at_most_an_eighth) {
  for (std::size_t nbytes = 1; nbytes <= pool::small_limit; ++nbytes) {
    const std::size_t given = pool::small_class_bytes(pool::small_class(nbytes));
    CHECK(given >= nbytes && given % 256 == 0);
    if (nbytes > 2048) CHECK(8 * (given - nbytes) <= given);
    if (nbytes <= 2048) CHECK(given - nbytes < 256);
  }
}

TEST(impossible_sizes_are_refused_before_the_driver_sees_them) {
  auto driver = paper();
  Pool pool(driver, 0);
  for (const std::size_t nbytes : {std::size_t{0}, (std::size_t{1} << 40) + 1, unlimited}) {
    CHECK_THROWS(pool.allocate(nbytes, 0), InvalidValue);
    CHECK_THROWS(pool.allocate(nbytes, 0, 4096), InvalidValue);
  }
  CHECK_THROWS(pool.allocate(1, 0, 3), InvalidValue);
  CHECK_THROWS(pool.allocate(1, 0, 0), InvalidValue);
  CHECK_EQ(driver->calls(), 0u);
}

TEST(a_device_that_is_too_small_says_so_with_figures) {
  Pool pool(paper(64 * mib), 0);
  const Block block = pool.allocate(16 * mib, 0);
  try {
    (void)pool.allocate(100 * mib, 0);
    CHECK(false);
  } catch (const OutOfMemory& error) {
    CHECK_EQ(error.shortage.requested.value(), 100 * mib);
    CHECK_EQ(error.shortage.reserved.value(), pool.reserved());
    CHECK(error.shortage.free.has_value() && error.shortage.largest_free_block.has_value());
  }
  CHECK_OK(pool.deallocate(block, 0));
}

TEST(double_and_foreign_frees_change_nothing) {
  auto driver = paper();
  Pool pool(driver, 0);
  Pool other(driver, 0);
  for (const std::size_t nbytes : {100ul, 5 * mib}) {
    const Block block = pool.allocate(nbytes, 0);
    const Block keep = pool.allocate(nbytes, 0);
    CHECK_OK(pool.deallocate(block, 0));
    CHECK_EQ(pool.deallocate(block, 0), Status::illegal_state);
    CHECK_EQ(pool.deallocate(block, 3), Status::illegal_state);
    Block wrong = keep;
    wrong.ptr += 512;
    CHECK_EQ(pool.deallocate(wrong, 0), Status::illegal_state);
    CHECK_EQ(pool.deallocate({keep.ptr, keep.nbytes, nullptr}, 0), Status::illegal_state);
    Block found;
    CHECK(!other.find(keep.ptr, &found) && !pool.find(keep.ptr + 256, &found));
    CHECK(pool.find(keep.ptr, &found) && found.record == keep.record && found.nbytes == nbytes);
    Block gone = block;
    CHECK_EQ(pool.record_stream(gone, 3), Status::illegal_state);
    CHECK_EQ(pool.statistics().live, 1u);
    // The caller's size is not trusted.
    CHECK_OK(pool.deallocate({keep.ptr, 1, keep.record}, 0));
    CHECK_EQ(pool.statistics().requested, 0u);
  }
}

// --- memory held ---------------------------------------------------------------------------------

TEST(a_limit_holds_and_free_pages_move_before_memory_is_out) {
  PoolOptions options;
  options.limit = 64 * mib;
  auto driver = paper();
  Pool pool(driver, 0, options);
  std::vector<Block> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(pool.allocate(4 * mib, 0));
  CHECK_THROWS(pool.allocate(2 * mib, 0), OutOfMemory);
  for (std::size_t i = 0; i < 16; i += 2) CHECK_OK(pool.deallocate(blocks[i], 0));
  const Block large = pool.allocate(32 * mib, 0);  // eight holes of 4 MiB become one run
  CHECK(driver->place_of(large.ptr) != 0 && driver->place_of(large.ptr + 32 * mib - 1) != 0);
  CHECK(pool.statistics().remaps > 0);
  CHECK(pool.reserved() <= 64 * mib);
  CHECK_OK(pool.deallocate(large, 0));
  for (std::size_t i = 1; i < 16; i += 2) CHECK_OK(pool.deallocate(blocks[i], 0));
}

TEST(a_limit_below_what_lives_is_refused_and_a_lower_one_gives_back) {
  Pool pool(paper(), 0);
  const Block block = pool.allocate(32 * mib, 0);
  CHECK_OK(pool.deallocate(pool.allocate(64 * mib, 0), 0));
  CHECK_THROWS(pool.set_limit(31 * mib), InvalidValue);
  pool.set_limit(40 * mib);
  CHECK(pool.reserved() <= 40 * mib);
  CHECK_OK(pool.deallocate(block, 0));
}

TEST(the_default_keeps_everything_and_a_threshold_trims_at_once_and_after_frees) {
  Pool pool(paper(), 0);
  CHECK_OK(pool.deallocate(pool.allocate(64 * mib, 0), 0));
  CHECK(pool.reserved() >= 64 * mib);
  pool.set_release_threshold(16 * mib);
  CHECK(pool.reserved() <= 16 * mib);
  for (int i = 0; i < 10; ++i) {
    CHECK_OK(pool.deallocate(pool.allocate(48 * mib, 0), 0));
    CHECK(pool.reserved() <= 16 * mib);
  }
  pool.set_release_threshold(0);
  const Block block = pool.allocate(3 * mib, 0);
  CHECK_OK(pool.deallocate(block, 0));
  CHECK_EQ(pool.reserved(), 0u);
}

TEST(trim_keeps_what_it_is_told_to_keep) {
  Pool pool(paper(), 0);
  std::vector<Block> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(pool.allocate(16 * mib, 0));
  for (const Block& block : blocks) CHECK_OK(pool.deallocate(block, 0));
  CHECK_OK(pool.trim(64 * mib));
  CHECK(pool.statistics().cached <= 64 * mib && pool.statistics().cached > 48 * mib);
  CHECK_OK(pool.trim());
  CHECK_EQ(pool.reserved(), 0u);
}

TEST(trim_does_not_wait_and_work_under_way_keeps_its_memory) {
  auto driver = paper();
  driver->set_late(100);
  Pool pool(driver, 0);
  CHECK_OK(pool.deallocate(pool.allocate(32 * mib, 3), 3));
  CHECK_OK(pool.trim());
  CHECK_EQ(pool.reserved(), 0u);            // released
  CHECK(driver->used() >= 32 * mib);        // and still mapped for the work that may use it
  CHECK_EQ(driver->synchronizations, 0u);
  for (int i = 0; i < 200; ++i) driver->tick();
  CHECK_OK(pool.trim());
  CHECK_EQ(driver->used(), 0u);
}

TEST(reserved_memory_needs_no_driver_call_later) {
  auto driver = paper();
  Pool pool(driver, 0);
  pool.reserve(256 * mib, 0);
  const std::uint64_t calls = driver->calls();
  const Block block = pool.allocate(256 * mib, 0);
  CHECK_EQ(driver->calls(), calls);
  CHECK_OK(pool.deallocate(block, 0));
}

TEST(statistics_count_what_happened) {
  Pool pool(paper(), 0);
  const Block small = pool.allocate(300, 0);
  const Block large = pool.allocate(5 * mib + 1, 0);
  PoolStatistics s = pool.statistics();
  CHECK_EQ(s.requested, 300 + 5 * mib + 1);
  CHECK_EQ(s.allocated, 512 + 5 * mib + 512);
  CHECK_EQ(s.live, 2u);
  CHECK_EQ(s.misses, 2u);
  CHECK_OK(pool.deallocate(large, 0));
  CHECK_OK(pool.deallocate(pool.allocate(5 * mib + 1, 0), 0));
  s = pool.statistics();
  CHECK_EQ(s.hits, 1u);
  CHECK_EQ(s.allocations, 3u);
  CHECK_EQ(s.frees, 2u);
  CHECK_EQ(s.peak_requested, 300 + 5 * mib + 1);
  pool.reset_peaks();
  CHECK_EQ(pool.statistics().peak_requested, 300u);
  CHECK_EQ(pool.statistics().cached, s.reserved - s.allocated);
  CHECK_OK(pool.deallocate(small, 0));
}

// --- callbacks -----------------------------------------------------------------------------------

TEST(callbacks_free_memory_and_may_use_the_pool) {
  Pool pool(paper(64 * mib), 0);
  Block hoard = pool.allocate(40 * mib, 0);
  std::size_t asked = 0;
  int called = 0;
  const int id = pool.add_callback([&](std::size_t nbytes, const PoolStatistics& s) {
    ++called;
    asked = nbytes;
    CHECK(s.reserved > 0);
    CHECK_THROWS(pool.allocate(60 * mib, 0), OutOfMemory);  // does not ask again
    if (!hoard.record) return false;
    CHECK_OK(pool.deallocate(hoard, 0));
    hoard = {};
    return true;
  });
  const Block block = pool.allocate(48 * mib, 0);
  CHECK_EQ(called, 1);
  CHECK_EQ(asked, 48 * mib);
  CHECK_THROWS(pool.allocate(48 * mib, 0), OutOfMemory);
  CHECK_EQ(called, 2);
  pool.remove_callback(id);
  CHECK_THROWS(pool.allocate(48 * mib, 0), OutOfMemory);
  CHECK_EQ(called, 2);
  CHECK_OK(pool.deallocate(block, 0));
}

TEST(a_callback_that_throws_reaches_the_caller) {
  Pool pool(paper(16 * mib), 0);
  pool.add_callback([](std::size_t, const PoolStatistics&) -> bool { throw Closed("enough"); });
  CHECK_THROWS(pool.allocate(32 * mib, 0), Closed);
  CHECK_OK(pool.deallocate(pool.allocate(8 * mib, 0), 0));
  CHECK_EQ(pool.inconsistency(), std::string());
}

// --- streams -------------------------------------------------------------------------------------

TEST(the_freeing_stream_reuses_at_once_and_another_one_waits_on_the_device) {
  auto driver = paper(64 * mib);
  driver->set_late(1000);
  Pool pool(driver, 0);
  const Block a = pool.allocate(40 * mib, 3);
  const std::uint64_t work = driver->submit(3);
  CHECK_OK(pool.deallocate(a, 3));
  const Block b = pool.allocate(40 * mib, 3);
  CHECK_EQ(b.ptr, a.ptr);
  CHECK_EQ(pool.statistics().device_waits, 0u);
  CHECK_OK(pool.deallocate(b, 3));
  CHECK(!driver->ordered(4, 3, work));
  const Block c = pool.allocate(40 * mib, 4);
  CHECK(driver->ordered(4, 3, work));
  CHECK_EQ(driver->synchronizations, 0u);  // the host never waited
  CHECK_OK(pool.deallocate(c, 4));
}

TEST(a_stream_that_is_gone_loses_no_memory_and_crashes_nothing) {
  auto driver = paper(64 * mib);
  Pool pool(driver, 0);
  const Block small = pool.allocate(1000, 3);
  CHECK_OK(pool.deallocate(pool.allocate(40 * mib, 3), 3));
  CHECK_OK(pool.deallocate(small, 3));
  driver->break_stream(3);  // destroyed, and nobody told the pool
  const Block block = pool.allocate(40 * mib, 4);  // only by waiting for the device
  CHECK_OK(pool.deallocate(block, 4));
  CHECK_EQ(pool.inconsistency(), std::string());
}

TEST(a_released_stream_costs_no_wait) {
  auto driver = paper(64 * mib);
  driver->set_late(10);
  Pool pool(driver, 0);
  CHECK_OK(pool.deallocate(pool.allocate(40 * mib, 3), 3));
  pool.release_stream(3);
  driver->break_stream(3);
  const Block block = pool.allocate(40 * mib, 4);
  CHECK_EQ(driver->synchronizations, 0u);
  CHECK_OK(pool.deallocate(block, 4));
}

TEST(more_streams_than_slots_work) {
  auto driver = paper();
  Pool pool(driver, 0);
  std::mt19937 random(1);
  std::vector<std::pair<Block, StreamHandle>> blocks;
  for (int i = 0; i < 20000; ++i) {
    const StreamHandle stream = 3 + random() % 200;
    if (random() % 2 && blocks.size() < 300) {
      blocks.emplace_back(pool.allocate(1 + random() % mib, stream), stream);
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      if (random() % 3 == 0) CHECK_OK(pool.record_stream(blocks.back().first, 3 + random() % 200));
      CHECK_OK(pool.deallocate(blocks.back().first, blocks.back().second));
      blocks.pop_back();
    }
  }
  for (const auto& [block, stream] : blocks) CHECK_OK(pool.deallocate(block, stream));
  CHECK_EQ(pool.inconsistency(), std::string());
  CHECK(pool.close());
  CHECK_EQ(driver->live_handles(), 0u);
}

TEST(released_streams_make_room_for_others) {
  auto driver = paper();
  Pool pool(driver, 0);
  for (StreamHandle stream = 3; stream < 1000; ++stream) {
    const StreamHandle handle = 3 + stream % 200;
    for (const std::size_t nbytes : {100ul, 3 * mib}) {
      CHECK_OK(pool.deallocate(pool.allocate(nbytes, handle), handle));
    }
    pool.release_stream(handle);
  }
  CHECK(pool.statistics().reserved < 512 * mib);
}

// --- the end -------------------------------------------------------------------------------------

TEST(closing_names_what_lives_and_refuses) {
  Pool pool(paper(), 0);
  const Block small = pool.allocate(77, 0);
  const Block large = pool.allocate(7 * mib, 0);
  CHECK(!pool.close());
  CHECK_EQ(pool.live_blocks().size(), 2u);
  CHECK_EQ(pool.live_blocks(1).size(), 1u);
  CHECK_OK(pool.deallocate(pool.allocate(77, 0), 0));  // it is still open
  CHECK_OK(pool.deallocate(small, 0));
  CHECK_OK(pool.deallocate(large, 0));
  CHECK(pool.close());
  CHECK(pool.close());
  CHECK_THROWS(pool.allocate(1, 0), Closed);
  CHECK_THROWS(pool.set_limit(1), Closed);
}

TEST(closing_when_unused_gives_back_with_the_last_block) {
  auto driver = paper();
  Pool pool(driver, 0);
  const Block block = pool.allocate(7 * mib, 0);
  CHECK(pool.close(true));
  CHECK_THROWS(pool.allocate(1, 0), Closed);
  CHECK(pool.reserved() > 0);
  CHECK_OK(pool.deallocate(block, 0));
  CHECK_EQ(pool.reserved(), 0u);
}

TEST(a_pool_that_goes_with_live_blocks_leaves_their_memory_alone) {
  auto driver = paper();
  Block block;
  {
    Pool pool(driver, 0);
    block = pool.allocate(7 * mib, 0);
  }
  CHECK(driver->place_of(block.ptr) != 0);
}

TEST(a_fork_child_refuses_and_touches_nothing) {
  auto driver = paper();
  Pool pool(driver, 0);
  const Block block = pool.allocate(7 * mib, 0);
  const std::uint64_t calls = driver->calls();
  const pid_t child = fork();
  if (child == 0) {
    int wrong = 0;
    try {
      (void)pool.allocate(100, 0);
      wrong |= 1;
    } catch (const DriverError& error) {
      if (error.status != Status::not_initialized) wrong |= 2;
    }
    if (ok(pool.deallocate(block, 0))) wrong |= 4;
    if (ok(pool.trim())) wrong |= 8;
    if (driver->calls() != calls) wrong |= 16;
    _exit(wrong);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_OK(pool.deallocate(block, 0));
}

// --- the older policies --------------------------------------------------------------------------

TEST(power_of_two_buckets_serve_their_bucket_only) {
  Pool pool(paper(), 0, with(PoolPolicy::power_of_two));
  const Block a = pool.allocate(5000, 0);
  CHECK_EQ(pool.statistics().allocated, 8192u);
  CHECK_OK(pool.deallocate(a, 0));
  const Block b = pool.allocate(8000, 0);  // the same bucket: a hit
  CHECK_EQ(b.ptr, a.ptr);
  const Block c = pool.allocate(4000, 0);  // another one: a miss
  PoolStatistics s = pool.statistics();
  CHECK_EQ(s.hits, 1u);
  CHECK_EQ(s.misses, 2u);
  CHECK_EQ(s.returns, 1u);
  CHECK_OK(pool.deallocate(b, 0));
  CHECK_OK(pool.deallocate(c, 0));
  CHECK_OK(pool.trim());
  CHECK_EQ(pool.reserved(), 0u);
}

TEST(exact_bins_serve_their_size_only) {
  Pool pool(paper(), 0, with(PoolPolicy::exact));
  const Block a = pool.allocate(5000, 0);
  CHECK_EQ(pool.statistics().allocated, 5120u);
  CHECK_OK(pool.deallocate(a, 0));
  const Block b = pool.allocate(4000, 0);
  CHECK(b.ptr != a.ptr);
  const Block c = pool.allocate(5000, 0);
  CHECK_EQ(c.ptr, a.ptr);
  CHECK_EQ(pool.statistics().hits, 1u);
  CHECK_EQ(pool.statistics().misses, 2u);
  CHECK_OK(pool.deallocate(b, 0));
  CHECK_OK(pool.deallocate(c, 0));
}

TEST(a_policy_that_hoards_gives_up_its_bins_before_memory_is_out) {
  Pool pool(paper(64 * mib), 0, with(PoolPolicy::exact));
  CHECK_OK(pool.deallocate(pool.allocate(20 * mib, 0), 0));
  CHECK_OK(pool.deallocate(pool.allocate(30 * mib, 0), 0));
  CHECK_OK(pool.deallocate(pool.allocate(60 * mib, 0), 0));
}

// --- hostile programs: on a device little larger than what lives -----------------------------------------

namespace {

// Allocates in a row while 4 GiB live, on `capacity` times that; `victim` says which block goes.
template <typename Size, typename Victim>
void hostile(double capacity, int operations, Size size, Victim victim) {
  constexpr std::size_t most = 4 * gib;
  Pool pool(paper(static_cast<std::size_t>(capacity * most)), 0);
  std::vector<Block> blocks;
  std::size_t live = 0;
  for (int i = 0; i < operations; ++i) {
    const std::size_t nbytes = size(i);
    while (live + nbytes > most) {
      std::swap(blocks[victim(blocks.size())], blocks.back());
      live -= pool::round_up(blocks.back().nbytes, 512);
      CHECK_OK(pool.deallocate(blocks.back(), 0));
      blocks.pop_back();
    }
    blocks.push_back(pool.allocate(nbytes, 0));
    live += pool::round_up(nbytes, 512);
  }
  for (const Block& block : blocks) CHECK_OK(pool.deallocate(block, 0));
}

}  // namespace

TEST(saw_tooth_sizes_fit) {
  std::mt19937 random(1);
  hostile(1.05, 4000, [](int i) { return (1 + static_cast<std::size_t>(i) % 97) * mib; },
          [&](std::size_t n) { return random() % n; });
}

TEST(growing_lists_fit) {
  std::mt19937 random(2);
  hostile(1.05, 4000,
          [](int i) { return mib + static_cast<std::size_t>(i) * 40961 % (256 * mib); },
          [](std::size_t) { return std::size_t{0}; });
}

TEST(power_of_two_and_prime_sizes_fit) {
  std::mt19937 random(3);
  constexpr std::size_t primes[] = {2097169, 16777259, 67108879, 3145739, 100663319};
  hostile(1.05, 4000,
          [&](int i) {
            return i % 2 ? primes[random() % 5] : std::size_t{1} << (21 + random() % 6);
          },
          [&](std::size_t n) { return random() % n; });
}

TEST(long_lived_small_blocks_among_large_ones_fit) {
  std::mt19937 random(4);
  hostile(1.08, 20000,
          [&](int i) { return i % 4 ? 1 + random() % (64 * kib) : (8 + random() % 64) * mib; },
          [&](std::size_t n) {
            // Large ones go; small ones stay nearly for ever.
            return n - 1 - random() % std::min<std::size_t>(n, 40);
          });
}

TEST_MAIN()
