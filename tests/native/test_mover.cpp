// What carries a bridge's messages: order, wrap, the index's upper half, failures, and the thread.
// Run under ThreadSanitizer too: a producer, the thread and a flush share one direction.
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/host/host_driver.hpp"
#include "ring/geometry.hpp"
#include "ring/mover.hpp"

using namespace ringmem;
using namespace ringmem::ring;
using namespace std::chrono_literals;

namespace {

DevicePtr address(const void* ptr) { return reinterpret_cast<DevicePtr>(ptr); }

// The next call of that operation fails, with nothing done.
void fail(FaultyDriver& driver, Operation operation, Status status) {
  driver.plan().fail(static_cast<int>(operation), 1, 1, status, FaultWhen::before);
}

// A host's ring and a device's, 8 slots of one line. The device's header is memory of the driver's,
// which values are written to; the rest may be anywhere.
struct Rings {
  explicit Rings(bool to_device, bool mapped, u64 start = 0) {
    void* pinned = nullptr;
    CHECK_OK(driver->host_alloc(0, sizeof(layout::RingHeader), {}, &pinned));
    header = new (pinned) layout::RingHeader{};
    host.producer.tail = host.consumer.head = start;
    header->producer.tail = header->consumer.head = start;
    copy.producer.tail = copy.consumer.head = start;
    places.ring = &host;
    places.header = mapped ? header : &copy;
    places.device_header = address(header);
    places.host_slots = address(host_slots);
    places.device_slots = address(device_slots);
    places.word = &word;
    places.capacity = 8;
    places.slot_nbytes = 64;
    places.to_device = to_device;
    places.mapped = mapped;
    CHECK_OK(driver->stream_create(0, {}, &stream));
  }
  ~Rings() {
    CHECK_OK(driver->stream_destroy(0, stream));
    CHECK_OK(driver->host_free(0, header));
  }
  void write(layout::Line* slots, u64 index) { std::memset(&slots[index & 7], int(index & 0xff), 64); }
  bool holds(const layout::Line* slots, u64 index) {
    return reinterpret_cast<const unsigned char*>(&slots[index & 7])[63] == (index & 0xff);
  }

  std::shared_ptr<FaultyDriver> driver =
      std::make_shared<FaultyDriver>(std::make_shared<HostDriver>(HostConfig{}));
  layout::RingHeader* header = nullptr;
  layout::RingHeader host{}, copy{};
  layout::Line host_slots[8]{}, device_slots[8]{};
  u64 word = 0;
  MoverPlaces places;
  StreamHandle stream = 0;
};

}  // namespace

TEST(messages_go_up_in_order_across_the_wrap) {
  for (const bool mapped : {true, false}) {
    for (const bool wait : {true, false}) {
      Rings rings(true, mapped);
      Mover mover(rings.driver, 0, rings.stream, rings.places);
      u64 sent = 0;
      for (u64 batch : {5, 8, 1, 7, 8}) {
        for (u64 i = 0; i < batch; ++i) rings.write(rings.host_slots, sent + i);
        sent += batch;
        store(rings.host.producer.tail, sent);
        CHECK_EQ(mover.push(wait), batch);
        rings.driver->stream_synchronize(0, rings.stream);
        CHECK_EQ(load(rings.header->producer.tail), sent);
        for (u64 i = sent - batch; i < sent; ++i) CHECK(rings.holds(rings.device_slots, i));
        store(rings.header->consumer.head, sent);
        mover.take_back();
        CHECK_EQ(load(rings.host.consumer.head), sent);
      }
      CHECK_EQ(mover.push(wait), 0u);
    }
  }
}

TEST(a_pull_in_order_brings_what_the_streams_work_writes) {
  for (const bool mapped : {true, false}) {
    for (const u64 there : {0, 3}) {  // messages written before the flush begins
      Rings rings(false, mapped);
      Mover mover(rings.driver, 0, rings.stream, rings.places);
      for (u64 i = 0; i < 5; ++i) rings.write(rings.device_slots, i);
      store(rings.header->producer.tail, there);
      const auto work = [](void* argument) {
        std::this_thread::sleep_for(20ms);
        store(static_cast<layout::RingHeader*>(argument)->producer.tail, u64{5});
      };
      CHECK_OK(rings.driver->launch_host_function(0, rings.stream, work, rings.header));
      CHECK_EQ(mover.pull(true), 5u);
      for (u64 i = 0; i < 5; ++i) CHECK(rings.holds(rings.host_slots, i));
      CHECK_EQ(mover.pull(true), 0u);
    }
  }
}

TEST(an_index_whose_upper_half_changes_arrives_whole) {
  for (const bool mapped : {true, false}) {
    for (const bool wait : {true, false}) {
      const u64 start = (u64{1} << 32) - 3;
      Rings rings(true, mapped, start);
      Mover mover(rings.driver, 0, rings.stream, rings.places);
      store(rings.host.producer.tail, start + 5);
      CHECK_EQ(mover.push(wait), 5u);
      rings.driver->stream_synchronize(0, rings.stream);
      CHECK_EQ(load(rings.header->producer.tail), start + 5);
      Rings back(false, mapped, start);
      Mover down(back.driver, 0, back.stream, back.places);
      down.tell_head(start + 5);
      back.driver->stream_synchronize(0, back.stream);
      CHECK_EQ(load(back.header->consumer.head), start + 5);
    }
  }
}

TEST(a_driver_that_cannot_write_values_is_served_by_copies) {
  Rings rings(true, false);
  Mover mover(rings.driver, 0, rings.stream, rings.places);
  fail(*rings.driver, Operation::stream_write_value, Status::not_supported);
  store(rings.host.producer.tail, u64{4});
  CHECK_EQ(mover.push(false), 4u);
  CHECK_EQ(load(rings.header->producer.tail), 4u);
}

TEST(what_a_failed_flush_did_not_move_the_next_one_moves) {
  for (const Operation operation :
       {Operation::copy_async, Operation::stream_synchronize, Operation::stream_write_value}) {
    Rings rings(true, false);
    Mover mover(rings.driver, 0, rings.stream, rings.places);
    for (u64 i = 0; i < 4; ++i) rings.write(rings.host_slots, i);
    store(rings.host.producer.tail, u64{4});
    fail(*rings.driver, operation, Status::launch_failed);
    CHECK_THROWS(mover.push(true), DriverError);
    CHECK_EQ(mover.moved(), 0u);
    CHECK_EQ(mover.push(true), 4u);
    CHECK(rings.holds(rings.device_slots, 3));
  }
}

TEST(nonsense_in_the_devices_indices_is_an_error) {
  Rings up(true, true);
  Mover mover(up.driver, 0, up.stream, up.places);
  store(up.header->consumer.head, u64{1});
  CHECK_THROWS(mover.take_back(), Corrupted);
  Rings down(false, true);
  Mover puller(down.driver, 0, down.stream, down.places);
  store(down.header->producer.tail, u64{9});
  CHECK_THROWS(puller.pull(false), Corrupted);
}

TEST(the_thread_and_flushes_move_everything_once) {
  Rings up(true, true), down(false, true);
  Mover in(up.driver, 0, up.stream, up.places);
  Mover out(down.driver, 0, down.stream, down.places);
  MoverThread thread(in, out, 1us);
  u64 flushed = 0;
  for (u64 sent = 1; sent <= 3000; ++sent) {
    up.write(up.host_slots, sent - 1);
    store(up.host.producer.tail, sent);
    if (sent % 3 == 0) flushed += in.push(true);
    while (in.moved() < sent) std::this_thread::yield();
    CHECK(up.holds(up.device_slots, sent - 1));
    CHECK_EQ(load(up.header->producer.tail), sent);
    store(up.header->consumer.head, sent);
    in.take_back();
    down.write(down.device_slots, sent - 1);
    store(down.header->producer.tail, sent);
    while (out.moved() < sent) std::this_thread::yield();
    CHECK(down.holds(down.host_slots, sent - 1));
  }
  CHECK(flushed <= 1000);
  thread.check();
}

TEST(the_thread_ends_at_an_error_and_says_so) {
  Rings up(true, true), down(false, true);
  Mover in(up.driver, 0, up.stream, up.places);
  Mover out(down.driver, 0, down.stream, down.places);
  MoverThread thread(in, out, 1us);
  store(down.header->producer.tail, u64{1} << 60);
  const auto failed = [&] {
    try {
      thread.check();
      return false;
    } catch (const Corrupted&) {
      return true;
    }
  };
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (!failed() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(1ms);
  CHECK(failed());
  thread.stop();
  thread.stop();
}

TEST_MAIN()
