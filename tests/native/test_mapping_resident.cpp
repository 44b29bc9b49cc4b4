// Tagged memory on the CPU device: allocation, sleep and wake, the backup arena.
#include "mapping/resident.hpp"

#include <cstring>
#include <thread>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/host/host_driver.hpp"
#include "memory/reaper.hpp"

using namespace ringmem;
using namespace ringmem::mapping;

namespace {

constexpr std::size_t page = 64 << 10;

struct World {
  World() {
    HostConfig config;
    config.capacity = 16 * mebibyte;
    config.granularity = page;
    faulty = std::make_shared<FaultyDriver>(make_host_driver(config));
    driver = faulty;
  }
  // The reaper keeps the driver of what it did until somebody collects it.
  ~World() {
    Reaper::instance().flush(10);
    Reaper::instance().collect();
  }
  std::size_t live() const {
    Reaper::instance().flush(10);
    std::size_t sum = 0;
    for (const std::size_t count : faulty->live().counts()) sum += count;
    return sum;
  }
  std::shared_ptr<FaultyDriver> faulty;
  DriverRef driver;
};

std::shared_ptr<Resident> resident(const World& world, Backup backup = Backup::host) {
  return Resident::create(world.driver, ResidentOptions{"test", backup, PhysicalProps{}, 0,
                                                        4 * page, ArenaSizes{page, 4 * page}});
}

unsigned char* bytes(const Block& block) { return reinterpret_cast<unsigned char*>(block.ptr); }

}  // namespace

TEST(a_backup_plan_packs_extents_into_slots) {
  const auto copies = plan_backup({{0, 150}, {1000, 60}, {5000, 1}}, 100);
  const std::vector<BackupCopy> expected{
      {0, 100, 0, 0}, {100, 50, 1, 0}, {1000, 50, 1, 50}, {1050, 10, 2, 0}, {5000, 1, 2, 10}};
  CHECK(copies == expected);
  CHECK(plan_backup({}, 100).empty());
}

TEST(a_recorded_stream_may_be_closed_while_the_block_is_freed) {
  World world;
  auto tag = resident(world);
  for (int round = 0; round < 3; ++round) {
    StreamHandle stream = 0;
    check(world.driver->stream_create(0, {}, &stream), "stream_create");
    auto used = UsedStream::announce(world.driver, 0, stream);
    Block block = tag->allocate(page, default_stream);
    check(tag->record_stream(block, stream), "record_stream");
    world.faulty->plan().delay(static_cast<int>(Operation::event_create),
                                std::chrono::milliseconds(50));
    std::thread thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10 + 30 * round));
      used->close(false);
      world.driver->stream_destroy(0, stream);
    });
    CHECK_OK(tag->deallocate(block, default_stream));
    thread.join();
    world.faulty->plan().clear();
  }
  tag->close();
}

TEST(wake_maps_in_steps_of_any_size) {
  for (const std::size_t step : {std::size_t{0}, std::size_t{1}, 9 * page, 64 * mebibyte}) {
    World world;
    ResidentOptions options{"steps", Backup::host, PhysicalProps{}, 0, 4 * page,
                            ArenaSizes{page, 4 * page, 3}, step};
    auto tag = Resident::create(world.driver, options);
    std::vector<Block> blocks;
    for (const std::size_t pages : {9, 4, 1, 20}) {
      blocks.push_back(tag->allocate(pages * page, default_stream));
      std::memset(bytes(blocks.back()), static_cast<int>(pages), blocks.back().nbytes);
    }
    tag->sleep({StreamRef{}}, {});
    const auto access_calls = [&] {
      return world.faulty->plan().calls()[static_cast<std::size_t>(Operation::mem_set_access)];
    };
    const auto before = access_calls();
    tag->wake({});
    // Handles of 9, 4, 4 and 20 pages: one by one; 9 and the rest; 9 and the rest; all.
    CHECK_EQ(access_calls() - before, step == 1 ? 4U : step == 64 * mebibyte ? 1U : 2U);
    for (const Block& block : blocks) {
      CHECK_EQ(std::size_t{bytes(block)[0]}, block.nbytes / page);
      CHECK_EQ(std::size_t{bytes(block)[block.nbytes - 1]}, block.nbytes / page);
      CHECK_OK(tag->deallocate(block, default_stream));
    }
    tag->close();
    tag.reset();
    CHECK_EQ(world.live(), std::size_t{0});
  }
}

TEST(bytes_come_back_at_their_addresses) {
  World world;
  auto tag = resident(world);
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < 20; ++i) {
    blocks.push_back(tag->allocate(1 + i * 7919, default_stream));
    std::memset(bytes(blocks.back()), static_cast<int>(i), blocks.back().nbytes);
  }
  for (std::size_t i = 0; i < 20; i += 3) CHECK_OK(tag->deallocate(blocks[i], default_stream));
  for (int round = 0; round < 3; ++round) {
    tag->sleep({StreamRef{}}, {});
    CHECK(tag->state() == Residence::asleep);
    CHECK_EQ(tag->committed(), std::size_t{0});
    CHECK_THROWS(tag->allocate(1, default_stream), InvalidValue);
    tag->wake({});
    for (std::size_t i = 0; i < 20; ++i) {
      if (i % 3 == 0) continue;
      CHECK_EQ(int{bytes(blocks[i])[0]}, static_cast<int>(i));
      CHECK_EQ(int{bytes(blocks[i])[blocks[i].nbytes - 1]}, static_cast<int>(i));
    }
  }
  CHECK_THROWS(tag->close(), InvalidValue);
  for (std::size_t i = 0; i < 20; ++i) {
    if (i % 3 != 0) CHECK_OK(tag->deallocate(blocks[i], default_stream));
  }
  CHECK_EQ(tag->deallocate(blocks[1], default_stream), Status::invalid_value);
  CHECK_EQ(tag->live_nbytes(), std::size_t{0});
  tag->close();
  tag.reset();
  CHECK_EQ(world.live(), std::size_t{0});
}

TEST(free_neighbours_become_one_block) {
  World world;
  auto tag = resident(world);
  const Block a = tag->allocate(page, default_stream);
  const Block b = tag->allocate(page, default_stream);
  const Block c = tag->allocate(page, default_stream);
  const Block last = tag->allocate(page, default_stream);
  for (const Block& block : {a, c, b}) CHECK_OK(tag->deallocate(block, default_stream));
  const Block whole = tag->allocate(3 * page, default_stream);
  CHECK_EQ(whole.ptr, a.ptr);
  CHECK_EQ(tag->committed(), 4 * page);
  CHECK_OK(tag->deallocate(whole, default_stream));
  CHECK_OK(tag->deallocate(last, default_stream));
  CHECK_OK(world.driver->stream_synchronize(0, default_stream));
  CHECK_EQ(tag->trim(), 4 * page);
  tag->close();
}

TEST(a_tag_that_nobody_closed_does_not_unmap_what_work_uses) {
  HostConfig config;
  config.capacity = 16 * mebibyte;
  config.granularity = page;
  config.latency_s = 0.05;
  const DriverRef driver = make_host_driver(config);
  {
    auto tag = Resident::create(driver, ResidentOptions{"left", Backup::discard, PhysicalProps{}, 0,
                                                        4 * page, ArenaSizes{page, 4 * page}});
    const Block block = tag->allocate(page, default_stream);
    CHECK_OK(driver->fill_async(0, block.ptr, 1, 1, page, default_stream));
    CHECK_OK(tag->deallocate(block, default_stream));
  }
  CHECK_OK(driver->stream_synchronize(0, default_stream));  // the fill found its page
}

TEST(threads_may_allocate_while_another_sleeps_and_wakes) {
  World world;
  auto tag = resident(world);
  const Block kept = tag->allocate(10 * page, default_stream);
  std::memset(bytes(kept), 5, kept.nbytes);
  std::atomic<bool> stop{false};
  std::thread user([&] {
    while (!stop) {
      try {
        const Block block = tag->allocate(page, default_stream);
        tag->deallocate(block, default_stream);
      } catch (const InvalidValue&) {
        std::this_thread::yield();
      }
    }
  });
  for (int i = 0; i < 20; ++i) {
    tag->sleep({}, {});
    tag->wake({});
  }
  stop = true;
  user.join();
  CHECK_EQ(int{bytes(kept)[kept.nbytes - 1]}, 5);
  CHECK_OK(tag->deallocate(kept, default_stream));
  tag->close();
  tag.reset();
  CHECK_EQ(world.live(), std::size_t{0});
}

TEST_MAIN()
