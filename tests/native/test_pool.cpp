// The pool against a simple model: random programs on several streams, under limits and lateness,
// on every policy. No two live blocks overlap, every live block has memory behind it and its own,
// and nobody is handed memory that another stream may still be using.
#include <map>
#include <random>
#include <set>
#include <thread>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "paper_driver.hpp"
#include "pool/pool.hpp"

using namespace ringmem;
using testing::PaperDriver;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::size_t gib = std::size_t{1} << 30;

std::shared_ptr<PaperDriver> paper(std::size_t capacity = 4 * gib) {
  return std::make_shared<PaperDriver>(capacity);
}

// Who used each piece of physical memory last: by handle and page of 64 KiB within it.
class Shadow {
 public:
  explicit Shadow(PaperDriver& driver) : driver_(driver) {}

  void allocated(const Block& block, StreamHandle stream) {
    const auto [at, inserted] = live_.emplace(block.ptr, block.nbytes);
    CHECK(inserted);
    if (at != live_.begin()) CHECK(std::prev(at)->first + std::prev(at)->second <= block.ptr);
    if (std::next(at) != live_.end()) CHECK(block.ptr + block.nbytes <= std::next(at)->first);
    for (DevicePtr ptr = block.ptr; ptr < block.ptr + block.nbytes; ptr += step(block)) {
      const std::uint64_t place = driver_.place_of(ptr);
      CHECK(place != 0);
      CHECK(owners_.emplace(place, block.ptr).second);
      for (const auto& [user, number] : uses_[place]) {
        if (!driver_.ordered(stream, user, number)) {
          testing::fail(__FILE__, __LINE__, "memory given to a stream that was not ordered after");
        }
      }
      uses_[place].clear();
    }
    use(block, stream);
  }
  void use(const Block& block, StreamHandle stream) {
    const std::uint64_t number = driver_.submit(stream);
    for (DevicePtr ptr = block.ptr; ptr < block.ptr + block.nbytes; ptr += step(block)) {
      uses_[driver_.place_of(ptr)][stream] = number;
    }
  }
  void freed(const Block& block) {
    live_.erase(block.ptr);
    for (DevicePtr ptr = block.ptr; ptr < block.ptr + block.nbytes; ptr += step(block)) {
      owners_.erase(driver_.place_of(ptr));
    }
  }

 private:
  // Small blocks are followed by their first bytes, large ones every 64 KiB of them.
  static std::size_t step(const Block&) { return 64 << 10; }

  PaperDriver& driver_;
  std::map<DevicePtr, std::size_t> live_;
  std::map<std::uint64_t, DevicePtr> owners_;
  std::map<std::uint64_t, std::map<StreamHandle, std::uint64_t>> uses_;
};

struct Program {
  int operations = 20000;
  int streams = 1;
  std::size_t most = 512 * mib;  // live
  std::size_t largest = 32 * mib;
  std::uint64_t late = 0;
  bool other_streams = false;  // frees on, and uses by, other streams
  PoolOptions options{};
  std::size_t capacity = 4 * gib;
  unsigned seed = 1;
  bool vmm = true;
};

// The streams of a program: 0, 3, 4, … — 1 and 2 are names of special streams.
StreamHandle handle_of(std::size_t index) { return index ? index + 2 : 0; }

std::size_t random_size(std::mt19937& random, std::size_t largest) {
  const double bits = std::uniform_real_distribution<>(0, std::log2(static_cast<double>(largest)))(random);
  const auto size = static_cast<std::size_t>(std::exp2(bits));
  switch (random() % 4) {
    case 0:
      return std::max<std::size_t>(1, std::bit_floor(size));
    case 1:
      return size | 1;
    default:
      return size;
  }
}

void run(const Program& program) {
  auto driver = paper(program.capacity);
  driver->set_late(program.late);
  driver->vmm = program.vmm;
  {
    Pool pool(driver, 0, program.options);
    Shadow shadow(*driver);
    std::mt19937 random(program.seed);
    struct Owned {
      Block block;
      StreamHandle stream;
    };
    std::vector<Owned> owned;
    std::size_t live = 0;
    for (int i = 0; i < program.operations; ++i) {
      driver->tick();
      const auto stream = handle_of(random() % program.streams);
      const std::size_t nbytes = random_size(random, program.largest);
      const bool room = live + nbytes <= program.most;
      if (room && random() % 100 < 52) {
        const std::size_t alignment = random() % 8 || !program.vmm ? 1 : std::size_t{1} << (random() % 22);
        const Block block = pool.allocate(nbytes, stream, alignment);
        CHECK_EQ(block.ptr % alignment, 0u);
        CHECK_EQ(block.ptr % 256, 0u);
        shadow.allocated(block, stream);
        live += nbytes;
        owned.push_back({block, stream});
      } else if (!owned.empty()) {
        std::swap(owned[random() % owned.size()], owned.back());
        Owned one = owned.back();
        owned.pop_back();
        if (program.other_streams && random() % 4 == 0) {
          const auto user = handle_of(random() % program.streams);
          CHECK_OK(pool.record_stream(one.block, user));
          driver->join(user, one.stream);
          shadow.use(one.block, user);
        }
        if (program.other_streams && random() % 4 == 0) {
          const auto last = handle_of(random() % program.streams);
          driver->join(last, one.stream);  // the caller orders the free after the uses
          one.stream = last;
        }
        shadow.use(one.block, one.stream);
        shadow.freed(one.block);
        live -= one.block.nbytes;
        CHECK_OK(pool.deallocate(one.block, one.stream));
        if (random() % 64 == 0) CHECK_EQ(pool.deallocate(one.block, one.stream), Status::illegal_state);
      }
      if (i % 512 == 0) {
        CHECK_EQ(pool.inconsistency(), std::string());
        const PoolStatistics s = pool.statistics();
        CHECK_EQ(s.requested, live);
        CHECK_EQ(s.live, owned.size());
        CHECK_EQ(s.reserved, driver->unreleased());
        CHECK(s.allocated >= s.requested && s.reserved >= s.allocated);
        CHECK(s.reserved <= program.options.limit);
        CHECK_EQ(pool.live_blocks().size(), owned.size());
      }
      if (random() % 4096 == 0) CHECK_OK(pool.trim(random() % (64 * mib)));
    }
    for (const Owned& one : owned) CHECK_OK(pool.deallocate(one.block, one.stream));
    CHECK(pool.close());
    CHECK_EQ(pool.reserved(), 0u);
  }
  CHECK_EQ(driver->live_handles(), 0u);
  CHECK_EQ(driver->live_mappings(), 0u);
  CHECK_EQ(driver->live_ranges(), 0u);
  CHECK_EQ(driver->live_events(), 0u);
}

}  // namespace

// --- the model -----------------------------------------------------------------------------------

TEST(one_stream) { run({.operations = 100000}); }

TEST(several_streams_late) {
  run({.operations = 50000, .streams = 4, .late = 100, .other_streams = true, .seed = 2});
}

TEST(many_streams) { run({.streams = 30, .late = 10, .other_streams = true, .seed = 3}); }

TEST(under_a_limit) {
  Program program{.streams = 3, .late = 50, .other_streams = true, .seed = 4};
  program.options.limit = 640 * mib;
  run(program);
}

TEST(on_a_full_device) { run({.streams = 3, .late = 50, .capacity = 640 * mib, .seed = 5}); }

TEST(tight) {
  Program program{.streams = 2, .late = 20, .other_streams = true, .seed = 6};
  program.options.tight = true;
  run(program);
}

TEST(with_a_release_threshold) {
  Program program{.operations = 5000, .streams = 2, .late = 20, .other_streams = true, .seed = 7};
  program.options.release_threshold = 16 * mib;
  run(program);
}

TEST(every_policy) {
  for (const PoolPolicy policy : {PoolPolicy::power_of_two, PoolPolicy::exact}) {
    Program program{.streams = 2, .late = 20, .other_streams = true, .seed = 8};
    program.options.policy = policy;
    run(program);
  }
}

TEST(without_virtual_memory) {
  run({.operations = 10000, .streams = 3, .late = 30, .other_streams = true, .seed = 10,
       .vmm = false});
}

TEST(without_virtual_memory_on_a_full_device) {
  run({.operations = 10000, .streams = 2, .most = 256 * mib, .late = 30, .capacity = 640 * mib,
       .seed = 11, .vmm = false});
}

TEST(small_blocks_only) {
  run({.operations = 100000, .streams = 4, .most = 8 * mib, .largest = 32 << 10, .late = 30,
       .other_streams = true, .seed = 9});
}

TEST_MAIN()
