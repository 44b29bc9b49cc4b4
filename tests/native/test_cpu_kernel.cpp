// The CPU ring kernel: answers, pause, drain, and every way to end. Run under ThreadSanitizer too:
// host and kernel share rings and control block, and the handler's state only while it is paused.
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ring/consumer.hpp"
#include "ring/cpu_kernel.hpp"
#include "ring/measure.hpp"
#include "ring/memory.hpp"
#include "ring/wait.hpp"
#include "ring/watchdog.hpp"

using namespace ringmem;
using namespace ringmem::ring;
using namespace std::chrono_literals;

namespace {

struct Pair {
  explicit Pair(u64 capacity, u64 nbytes = 56)
      : geometry(make_geometry(capacity, nbytes)),
        ring_nbytes((geometry.nbytes() + 4095) / 4096 * 4096),
        memory(SharedMemory::create(4096 + 3 * ring_nbytes)) {
    auto* at = static_cast<std::byte*>(memory.data());
    pair.control = reinterpret_cast<layout::ControlBlock*>(at);
    pair.telemetry = reinterpret_cast<layout::TelemetryBuffer*>(at + 1024);
    at += 4096;
    for (layout::RingHeader** ring : {&pair.input, &pair.output, &pair.dead_letter}) {
      *ring = reinterpret_cast<layout::RingHeader*>(at);
      format(at, geometry.nbytes(), geometry);
      at += ring_nbytes;
    }
    reset(pair, 0);
  }
  RingView view(layout::RingHeader* ring) const { return attach(ring, geometry.nbytes()); }

  Geometry geometry;
  std::size_t ring_nbytes;  // of one ring, in pages
  SharedMemory memory;
  KernelPair pair;
};

CpuHandler echo() {
  CpuHandler handler;
  handler.plain = echo_handler(7);
  return handler;
}

// Counts in its state, and answers the count; message 0xbad has status 9.
i32 count(const void* message, void* reply, void* state) {
  u64 number = 0;
  std::memcpy(&number, message, 8);
  u64 total = 0;
  std::memcpy(&total, state, 8);
  ++total;
  std::memcpy(state, &total, 8);
  std::memcpy(reply, &total, 8);
  return number == 0xbad ? 9 : 0;
}

CpuHandler counting() {
  CpuHandler handler;
  handler.plain = count;
  return handler;
}

template <class Condition>
bool soon(const Condition& condition) {
  return spin_until(condition, Clock::now() + 10s);
}

void send_number(Producer& producer, u64 number) {
  std::array<u64, 7> message{number};
  CHECK(soon([&] { return producer.send(reinterpret_cast<std::byte*>(message.data()), 1) == 1; }));
}

bool terminated(const Pair& pair) {
  return soon([&] { return load(pair.pair.control->has_terminated) != 0; });
}

}  // namespace

TEST(every_word_of_every_reply_is_right) {
  for (const u64 capacity : {1, 2, 64}) {
    Pair pair(capacity);
    CpuKernel kernel(echo(), 1, 0);
    kernel.start({pair.pair}, 0);
    Producer producer(pair.view(pair.pair.input));
    Consumer consumer(pair.view(pair.pair.output));
    std::vector<u32> times;
    const EchoResult single = measure_round_trips(producer, consumer, 500, times);
    CHECK(single.complete);
    CHECK_EQ(single.wrong_words, 0u);
    const EchoResult stream = measure_stream(producer, consumer, 5000, std::min<u64>(capacity, 16));
    CHECK(stream.complete);
    CHECK_EQ(stream.wrong_words, 0u);
    store(pair.pair.control->should_terminate, u32{1});
    CHECK(kernel.join(10s));
    CHECK_EQ(load(pair.pair.control->end_reason), 1u);
    CHECK_EQ(load(pair.pair.control->messages_processed), 5500u);
    CHECK_EQ(load(pair.pair.telemetry->processed), 5500u);
    CHECK_EQ(load(pair.pair.input->consumer.head), 5500u);
  }
}

TEST(batches_by_copy_come_back_right) {
  for (const u64 capacity : {8, 64, 1024}) {
    Pair pair(capacity);
    CpuKernel kernel(echo(), 1, 0);
    kernel.start({pair.pair}, 0);
    Producer producer(pair.view(pair.pair.input));
    producer.allow_streaming(true);
    Consumer consumer(pair.view(pair.pair.output));
    for (const u64 batch : {u64{1}, u64{7}, capacity / 2, capacity}) {
      const EchoResult copies = measure_copies(producer, consumer, 20'000, batch);
      CHECK(copies.complete);
      CHECK_EQ(copies.wrong_words, 0u);
    }
    store(pair.pair.control->should_terminate, u32{1});
    CHECK(kernel.join(10s));
    CHECK_EQ(load(pair.pair.control->messages_processed), 80'000u);
  }
}

// As a loop that was killed leaves them: answers without indices, and a run cut short.
TEST(a_loop_that_takes_over_answers_nothing_twice) {
  Pair pair(32);
  Producer producer(pair.view(pair.pair.input));
  for (u64 number = 0; number < 20; ++number) send_number(producer, number);
  Consumer consumer(pair.view(pair.pair.output));
  for (const u64 answered : {0, 1, 2, 5, 6, 7}) {
    auto* slots = reinterpret_cast<Line*>(pair.pair.output + 1);
    const u64 mark = 1000 + answered;
    std::memcpy(slots[answered].payload, &mark, 8);
    store_word(slots[answered], layout::line_word(1, 0));
  }
  CpuKernel kernel(counting(), 1, 8);
  kernel.start({pair.pair}, 0);
  std::array<u64, 7> reply{};
  for (u64 i = 0; i < 20; ++i) {
    CHECK(soon([&] { return consumer.receive(reinterpret_cast<std::byte*>(reply.data()), 1) == 1; }));
    CHECK_EQ(reply[0], i < 3 ? 1000 + i : i - 2);
  }
  CHECK(soon([&] { return load(pair.pair.input->consumer.head) == 20; }));
  store(pair.pair.control->should_terminate, u32{1});
  CHECK(kernel.join(10s));
}

TEST(a_handler_that_writes_beside_its_state_is_ended) {
  for (const std::ptrdiff_t at : {-1, 8, 40}) {
    Pair pair(16);
    static std::ptrdiff_t place;
    place = at;
    CpuHandler wild;
    wild.plain = [](const void*, void*, void* state) -> i32 {
      static_cast<std::byte*>(state)[place] = std::byte{1};
      return 0;
    };
    CpuKernel kernel(wild, 1, 8);
    for (int round = 0; round < 2; ++round) {
      reset(pair.pair, 0);
      kernel.start({pair.pair}, 0);
      Producer producer(pair.view(pair.pair.input));
      send_number(producer, 1);
      CHECK(terminated(pair));
      CHECK_EQ(load(pair.pair.control->end_reason), 5u);
      CHECK(kernel.join(10s));
    }
  }
}

TEST(state_belongs_to_the_host_while_paused) {
  Pair pair(16);
  CpuKernel kernel(counting(), 1, 8);
  kernel.start({pair.pair}, 0);
  Producer producer(pair.view(pair.pair.input));
  Consumer consumer(pair.view(pair.pair.output));
  std::array<u64, 7> reply{};
  u64 expected = 0;
  for (u64 round = 0; round < 50; ++round) {
    send_number(producer, round);
    CHECK(soon([&] { return consumer.receive(reinterpret_cast<std::byte*>(reply.data()), 1) == 1; }));
    CHECK_EQ(reply[0], ++expected);
    store(pair.pair.control->should_pause, u32{1});
    CHECK(soon([&] { return load(pair.pair.control->is_paused) != 0; }));
    send_number(producer, round);
    u64 total = 0;
    std::memcpy(&total, kernel.state(0), 8);
    CHECK_EQ(total, expected);
    total = expected = round * 100;
    std::memcpy(kernel.state(0), &total, 8);
    CHECK_EQ(consumer.receive(reinterpret_cast<std::byte*>(reply.data()), 1), 0u);
    store(pair.pair.control->should_pause, u32{0});
    CHECK(soon([&] { return consumer.receive(reinterpret_cast<std::byte*>(reply.data()), 1) == 1; }));
    CHECK_EQ(reply[0], ++expected);
  }
  store(pair.pair.control->should_terminate, u32{1});
  CHECK(kernel.join(10s));
}

TEST(drain_answers_what_was_sent_before_and_a_restart_goes_on) {
  Pair pair(64);
  CpuKernel kernel(counting(), 1, 8);
  Producer producer(pair.view(pair.pair.input));
  Consumer consumer(pair.view(pair.pair.output));
  for (u64 round = 1; round <= 20; ++round) {
    reset(pair.pair, 0);
    kernel.start({pair.pair}, 0);
    for (u64 i = 0; i < round; ++i) send_number(producer, i);
    store(pair.pair.control->should_drain, u32{1});
    CHECK(kernel.join(10s));
    CHECK_EQ(load(pair.pair.control->end_reason), 2u);
    CHECK_EQ(consumer.poll(64).size(), round);
    consumer.release(round);
  }
  u64 total = 0;
  std::memcpy(&total, kernel.state(0), 8);
  CHECK_EQ(total, 210u);
}

TEST(statuses_become_dead_letters_and_those_without_room_are_counted) {
  Pair pair(4);
  CpuKernel kernel(counting(), 1, 8);
  kernel.start({pair.pair}, 0);
  Producer producer(pair.view(pair.pair.input));
  Consumer consumer(pair.view(pair.pair.output));
  Consumer letters(pair.view(pair.pair.dead_letter));
  for (int i = 0; i < 6; ++i) {
    send_number(producer, 0xbad);
    CHECK(soon([&] { return consumer.poll(1).size() == 1; }));
    CHECK_EQ(layout::word_status(load_word(*consumer.poll(1).first.lines)), 9);
    consumer.release(1);
  }
  store(pair.pair.control->should_terminate, u32{1});
  CHECK(kernel.join(10s));
  CHECK_EQ(letters.poll(8).size(), 4u);
  CHECK_EQ(load(pair.pair.telemetry->dropped), 2u);
  CHECK_EQ(load(pair.pair.control->error_count), 6u);
  CHECK_EQ(load(pair.pair.control->last_error), 9);
}

TEST(it_ends_itself_without_a_heartbeat_by_its_deadline_and_when_damaged) {
  Pair orphan(4);
  reset(orphan.pair, 250);
  CpuKernel first(echo(), 1, 0);
  first.start({orphan.pair}, 0);
  for (int i = 0; i < 10; ++i) {
    store(orphan.pair.control->heartbeat, u64(100 + i));
    std::this_thread::sleep_for(20ms);
  }
  CHECK_EQ(load(orphan.pair.control->has_terminated), 0u);
  CHECK(terminated(orphan));
  CHECK_EQ(load(orphan.pair.control->end_reason), 3u);

  Pair late(4);
  CpuKernel second(echo(), 1, 0);
  second.start({late.pair}, 30'000'000);
  CHECK(terminated(late));
  CHECK_EQ(load(late.pair.control->end_reason), 3u);

  Pair damaged(4);
  CpuKernel third(echo(), 1, 0);
  third.start({damaged.pair}, 0);
  auto* line = reinterpret_cast<Line*>(damaged.pair.input + 1);
  store_word(*line, layout::line_word(55, 0));
  CHECK(terminated(damaged));
  CHECK_EQ(load(damaged.pair.control->end_reason), 4u);
  CHECK(first.join(10s) && second.join(10s) && third.join(10s));
}

TEST(a_full_output_ring_stops_nothing_but_answers) {
  Pair pair(4);
  CpuKernel kernel(echo(), 1, 0);
  kernel.start({pair.pair}, 0);
  Producer producer(pair.view(pair.pair.input));
  for (u64 i = 0; i < 8; ++i) send_number(producer, i);
  CHECK(soon([&] { return load(pair.pair.input->consumer.head) == 4; }));
  store(pair.pair.control->should_pause, u32{1});
  CHECK(soon([&] { return load(pair.pair.control->is_paused) != 0; }));
  store(pair.pair.control->should_terminate, u32{1});
  CHECK(kernel.join(10s));
  CHECK_EQ(load(pair.pair.input->consumer.head), 4u);
}

TEST(the_watchdog_beats_and_sees_who_makes_no_progress) {
  static std::atomic<bool> go_on{false};
  CpuHandler stuck;
  stuck.plain = [](const void*, void*, void*) -> i32 {
    while (!go_on.load()) std::this_thread::sleep_for(1ms);
    return 0;
  };
  Pair pair(4);
  reset(pair.pair, 200);
  CpuKernel kernel(stuck, 1, 0);
  const auto id = Watchdog::instance().watch({pair.pair}, 60ms);
  kernel.start({pair.pair}, 0);
  std::this_thread::sleep_for(300ms);
  CHECK_EQ(load(pair.pair.control->has_terminated), 0u);
  CHECK(Watchdog::instance().stalled(id).empty());
  Producer producer(pair.view(pair.pair.input));
  Consumer consumer(pair.view(pair.pair.output));
  send_number(producer, 1);
  CHECK(Watchdog::instance().wait_for_change(id, {}, 10s) == Watchdog::Rings{0});
  go_on.store(true);
  CHECK(Watchdog::instance().wait_for_change(id, {0}, 10s) == Watchdog::Rings{});
  CHECK(!consumer.producer_closed());
  store(pair.pair.control->should_terminate, u32{1});
  CHECK(kernel.join(10s));
  CHECK(soon([&] { return consumer.producer_closed(); }));
  Watchdog::instance().forget(id);
  CHECK(!Watchdog::instance().wait_for_change(id, {}, 10s));
}

TEST_MAIN()
