// The ring's endpoints: order, wrap, overflow of the counters, recovery, and peers that write
// nonsense. Run under ThreadSanitizer too: the two threads share nothing but the ring.
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver/fork.hpp"
#include "driver/status.hpp"
#include "ring/consumer.hpp"
#include "ring/memory.hpp"
#include "ring/producer.hpp"
#include "ring/wait.hpp"

using namespace ringmem;
using namespace ringmem::ring;
using namespace std::chrono_literals;

// The fork test starts a thread in the child, which ThreadSanitizer refuses by default.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace {

struct RingMemory {
  explicit RingMemory(u64 capacity, u64 message_nbytes)
      : geometry(make_geometry(capacity, message_nbytes)),
        bytes(SharedMemory::create(geometry.nbytes())),
        view(format(bytes.data(), bytes.nbytes(), geometry)) {}
  Geometry geometry;
  SharedMemory bytes;
  RingView view;
};

// A message whose every byte follows from its number.
std::vector<std::byte> message(u64 number, std::size_t nbytes) {
  std::vector<std::byte> out(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) {
    out[i] = static_cast<std::byte>((number * 0x9e3779b97f4a7c15u + i) >> (i % 8 * 7));
  }
  return out;
}

std::vector<std::byte> messages(u64 first, u64 count, std::size_t nbytes) {
  std::vector<std::byte> out;
  for (u64 i = 0; i < count; ++i) {
    const auto one = message(first + i, nbytes);
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

// Random batches through one thread, against the plainest model: two counters.
template <class Traits>
void fifo_holds(u64 capacity, std::size_t nbytes, u64 total, bool streaming = false) {
  RingMemory ring(capacity, nbytes);
  BasicProducer<Traits> producer(ring.view);
  producer.allow_streaming(streaming);
  BasicConsumer<Traits> consumer(ring.view);
  std::mt19937_64 random(capacity * 31 + nbytes);
  u64 sent = 0, received = 0;
  while (received < total) {
    const u64 want = random() % (capacity + 2);
    const auto batch = messages(sent, want, nbytes);
    const u64 accepted = producer.send(batch.data(), want, static_cast<i32>(nbytes));
    CHECK_EQ(accepted, std::min(want, capacity - (sent - received)));
    sent += accepted;
    const u64 room = random() % (capacity + 2);
    std::vector<std::byte> out(room * nbytes);
    std::vector<i32> statuses(room);
    const u64 got = consumer.receive(out.data(), room, statuses.data());
    CHECK_EQ(got, std::min(room, sent - received));
    // An empty vector's data() may be null, which memcmp must not be given.
    const auto expected = messages(received, got, nbytes);
    CHECK(got == 0 || std::memcmp(out.data(), expected.data(), got * nbytes) == 0);
    for (u64 i = 0; i < got; ++i) CHECK_EQ(statuses[i], static_cast<i32>(nbytes));
    received += got;
  }
  CHECK(!producer.corrupted());
  CHECK(!consumer.corrupted());
}

}  // namespace

TEST(messages_arrive_once_in_order_and_whole) {
  for (const std::size_t nbytes : {1, 8, 55, 56, 57, 112, 113, 240}) {
    for (const u64 capacity : {1, 2, 8, 64}) fifo_holds<Counters>(capacity, nbytes, 500);
    for (const u64 capacity : {8, 64, 256}) fifo_holds<Counters>(capacity, nbytes, 2000, true);
  }
}

TEST(counters_may_overflow) {
  for (const u64 capacity : {1, 2, 16, 64, 128}) {
    fifo_holds<ShortCounters<std::uint8_t>>(capacity, 56, 5000);  // 128 slots leave 1 bit of lap
    fifo_holds<ShortCounters<std::uint8_t>>(capacity, 112, 5000);
    fifo_holds<ShortCounters<std::uint8_t>>(capacity, 56, 5000, true);
    fifo_holds<ShortCounters<std::uint16_t>>(capacity, 56, 200'000);
  }
}

TEST(reserve_gives_two_runs_at_the_wrap_and_commit_part_of_them) {
  RingMemory ring(8, 56);
  Producer producer(ring.view);
  Consumer consumer(ring.view);
  std::array<std::byte, 6 * 56> skip{};
  CHECK_EQ(producer.send(skip.data(), 6), 6u);
  CHECK_EQ(consumer.receive(skip.data(), 6), 6u);
  const Runs runs = producer.reserve(7);
  CHECK_EQ(runs.first.slots, 2u);
  CHECK_EQ(runs.second.slots, 5u);
  CHECK(runs.second.lines == ring.view.slots);
  for (u64 i = 0; i < 7; ++i) {
    Line* line = i < 2 ? runs.first.lines + i : runs.second.lines + (i - 2);
    line->payload[0] = static_cast<std::uint8_t>(10 + i);
  }
  CHECK_EQ(consumer.poll(8).size(), 0u);  // nothing is visible before commit
  producer.commit(5);
  const Runs ready = consumer.poll(8);
  CHECK_EQ(ready.first.slots, 2u);
  CHECK_EQ(ready.second.slots, 3u);
  CHECK_EQ(ready.second.lines[2].payload[0], 14);
  CHECK_EQ(producer.reserve(8).size(), 3u);  // polled slots are still the reader's
  producer.commit(0);
  consumer.release(4);
  CHECK_EQ(producer.reserve(8).size(), 7u);
  CHECK_EQ(consumer.poll(8).size(), 1u);
  CHECK_EQ(producer.tail(), 11u);
}

TEST(a_commit_beyond_the_reservation_is_cut_to_it) {
  RingMemory ring(4, 56);
  Producer producer(ring.view);
  Consumer consumer(ring.view);
  CHECK_EQ(producer.reserve(2).size(), 2u);
  producer.commit(4);
  CHECK_EQ(consumer.poll(4).size(), 2u);
  consumer.release(100);
  CHECK_EQ(consumer.head(), 2u);
}

TEST(nothing_is_sent_into_slots_that_are_reserved) {
  RingMemory ring(4, 56);
  Producer producer(ring.view);
  Consumer consumer(ring.view);
  std::array<std::byte, 56> one{};
  CHECK_EQ(producer.reserve(2).size(), 2u);
  CHECK_EQ(producer.send(one.data(), 1), 0u);
  CHECK_EQ(producer.tail(), 0u);
  producer.commit(2);
  CHECK_EQ(producer.send(one.data(), 1), 1u);
  CHECK_EQ(consumer.poll(4).size(), 3u);
}

TEST(a_slot_is_ready_when_all_its_lines_are) {
  RingMemory ring(4, 112);
  Producer producer(ring.view);
  Consumer consumer(ring.view);
  store_word(ring.view.slots[0], layout::line_word(1, 0));  // as a torn write would look
  CHECK_EQ(consumer.poll(1).size(), 0u);
  CHECK(!consumer.would_receive());
  store_word(ring.view.slots[1], layout::line_word(1, 0));
  CHECK(consumer.would_receive());
  CHECK_EQ(consumer.poll(1).size(), 1u);
}

TEST(an_attached_endpoint_goes_on_where_the_last_one_stopped) {
  RingMemory ring(8, 56);
  const auto batch = messages(0, 8, 56);
  std::array<std::byte, 8 * 56> out{};
  {
    Producer producer(ring.view);
    CHECK_EQ(producer.send(batch.data(), 5), 5u);
  }
  store(ring.view.producer->tail, u64{2});  // killed before it published its index
  Consumer consumer(ring.view);
  CHECK_EQ(consumer.receive(out.data(), 4), 4u);
  {
    Producer producer(ring.view);  // head is beyond the published tail, slot 4 is ready
    CHECK_EQ(producer.tail(), 5u);
    CHECK(!producer.corrupted());
    CHECK_EQ(producer.send(batch.data() + 5 * 56, 3), 3u);
  }
  Consumer next(ring.view);
  CHECK_EQ(next.head(), 4u);
  CHECK_EQ(next.receive(out.data(), 8), 4u);
  CHECK(std::memcmp(out.data(), batch.data() + 4 * 56, 4 * 56) == 0);
}

TEST(a_half_written_slot_of_a_killed_producer_is_written_again) {
  RingMemory ring(4, 112);
  store_word(ring.view.slots[0], layout::line_word(1, 0));
  Producer producer(ring.view);
  CHECK_EQ(producer.tail(), 0u);
  const auto one = message(7, 112);
  std::vector<std::byte> out(112);
  CHECK_EQ(producer.send(one.data(), 1), 1u);
  Consumer consumer(ring.view);
  CHECK_EQ(consumer.receive(out.data(), 1), 1u);
  CHECK(out == one);
}

// Of a run that is streamed the first slot is written last: until then nobody may see the others,
// and whoever takes over from a producer that was killed on the way must not reveal them.
TEST(a_streamed_run_that_was_cut_short_is_taken_back) {
  for (const std::size_t nbytes : {56, 240}) {
    RingMemory ring(16, nbytes);
    const auto batch = messages(0, 16, nbytes);
    {
      Producer killed(ring.view);
      killed.allow_streaming(true);
      CHECK_EQ(killed.send(batch.data(), 3), 3u);
      CHECK_EQ(killed.send(batch.data() + 3 * nbytes, 12), 12u);
    }
    for (u32 line = 0; line < ring.geometry.slot_lines; ++line) {
      store_word(ring.view.slots[3 * ring.geometry.slot_lines + line], 0);
    }
    store(ring.view.producer->tail, u64{3});
    Consumer consumer(ring.view);
    CHECK_EQ(consumer.poll(16).size(), 3u);
    Producer producer(ring.view);
    CHECK_EQ(producer.tail(), 3u);
    CHECK_EQ(producer.send(batch.data() + 3 * nbytes, 1), 1u);
    CHECK_EQ(consumer.poll(16).size(), 4u);
    CHECK(!consumer.corrupted());
    std::vector<std::byte> out(4 * nbytes);
    CHECK_EQ(consumer.receive(out.data(), 4), 4u);
    CHECK(std::memcmp(out.data(), batch.data(), out.size()) == 0);
  }
}

TEST(an_end_tells_a_peer_that_closed_from_one_that_is_yet_to_come) {
  RingMemory ring(4, 56);
  const auto batch = messages(0, 2, 56);
  std::array<std::byte, 2 * 56> out{};
  {
    Producer producer(ring.view);
    CHECK(!producer.consumer_closed());  // none was there yet
    CHECK_EQ(producer.send(batch.data(), 2), 2u);
    producer.close();
  }
  {
    Consumer consumer(ring.view);
    CHECK(consumer.producer_closed());  // and left two messages
    CHECK_EQ(consumer.receive(out.data(), 2), 2u);
    consumer.close();
  }
  Consumer consumer(ring.view);
  CHECK(!consumer.producer_closed());  // that one is of the past
  Producer producer(ring.view);
  CHECK(!producer.consumer_closed());
  producer.close();
  CHECK(consumer.producer_closed());
  Producer next(ring.view);
  CHECK(!consumer.producer_closed());
  Producer killed(ring.view);
  CHECK_EQ(ring.view.producer->session, 7u);
  consumer.close();
  CHECK(killed.consumer_closed());
  CHECK_EQ(layout::next_session(~u32{0}), 1u);
}

TEST(nonsense_in_the_consumers_index_stops_the_producer) {
  for (const u64 nonsense : {u64{7}, u64{1} << 40, ~u64{0}, u64{1}}) {
    RingMemory ring(4, 56);
    Producer producer(ring.view);
    Consumer consumer(ring.view);
    const auto batch = messages(0, 4, 56);
    std::array<std::byte, 4 * 56> out{};
    CHECK_EQ(producer.send(batch.data(), 4), 4u);
    CHECK_EQ(consumer.receive(out.data(), 2), 2u);
    CHECK_EQ(producer.send(batch.data(), 2), 2u);
    store(ring.view.consumer->head, nonsense);  // 1: back behind what was released
    CHECK(producer.would_reserve(1));
    CHECK_EQ(producer.send(batch.data(), 1), 0u);
    CHECK(producer.corrupted());
    CHECK_EQ(producer.reserve(1).size(), 0u);
    Producer again(ring.view);
    CHECK(again.corrupted() || nonsense == 7);  // 7 could be true: released, tail not published
  }
}

TEST(a_line_with_a_foreign_sequence_stops_the_consumer) {
  for (const u32 nonsense : {2u, 77u, ~0u}) {
    RingMemory ring(4, 112);
    Consumer consumer(ring.view);
    store_word(ring.view.slots[1], layout::line_word(nonsense, 0));
    CHECK(consumer.would_receive());
    CHECK_EQ(consumer.poll(4).size(), 0u);
    CHECK(consumer.corrupted());
    std::array<std::byte, 4 * 112> out{};
    CHECK_EQ(consumer.receive(out.data(), 4), 0u);
  }
}

// Every word of the header and the slots set to random values: nothing may be touched outside,
// which the address sanitizer and the guard pages around the mapping would tell.
TEST(random_damage_never_leads_outside) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    RingMemory ring(8, 100);
    Producer producer(ring.view);
    Consumer consumer(ring.view);
    std::array<std::byte, 8 * 100> records{};
    for (int step = 0; step < 20; ++step) {
      auto* words = static_cast<u64*>(ring.bytes.data());
      const u64 count = ring.geometry.nbytes() / sizeof(u64);
      store(words[random() % count], random() % 3 == 0 ? random() : random() % 10);
      producer.send(records.data(), random() % 9);
      producer.reserve(random() % 9);
      producer.commit(random() % 9);
      consumer.receive(records.data(), random() % 9);
      CHECK(consumer.poll(8).size() <= 8);
      consumer.release(random() % 9);
      CHECK(consumer.depth() <= 8);
    }
    try {
      attach(ring.bytes.data(), ring.geometry.nbytes());
    } catch (const Corrupted&) {
    }
  }
}

TEST(a_damaged_descriptor_is_refused) {
  RingMemory ring(8, 56);
  auto& descriptor = static_cast<layout::RingHeader*>(ring.bytes.data())->descriptor;
  const auto whole = descriptor;
  CHECK_EQ(attach(ring.bytes.data(), ring.bytes.nbytes()).geometry.capacity, 8u);
  CHECK_THROWS(attach(ring.bytes.data(), ring.geometry.nbytes() - 1), Corrupted);
  CHECK_THROWS(attach(ring.bytes.data(), 100), InvalidValue);
  CHECK_THROWS(attach(static_cast<char*>(ring.bytes.data()) + 64, 1000), InvalidValue);
  descriptor.capacity = 16;
  CHECK_THROWS(attach(ring.bytes.data(), ring.geometry.nbytes()), Corrupted);
  descriptor.capacity = 7;
  CHECK_THROWS(attach(ring.bytes.data(), ring.bytes.nbytes()), Corrupted);
  descriptor = whole;
  descriptor.slot_lines = 0;
  CHECK_THROWS(attach(ring.bytes.data(), ring.bytes.nbytes()), Corrupted);
  descriptor = whole;
  descriptor.magic = 0;
  CHECK_THROWS(attach(ring.bytes.data(), ring.bytes.nbytes()), Corrupted);
}

TEST(bad_geometries_are_refused) {
  CHECK_THROWS(make_geometry(0, 8), InvalidValue);
  CHECK_THROWS(make_geometry(12, 8), InvalidValue);
  CHECK_THROWS(make_geometry(u64{1} << 31, 8), InvalidValue);
  CHECK_THROWS(make_geometry(8, 0), InvalidValue);
  CHECK_THROWS(make_geometry(8, u64{1} << 32), InvalidValue);
  CHECK_EQ(make_geometry(8, 57).slot_lines, 2u);
  const Geometry geometry = make_geometry(8, 8);
  alignas(128) std::array<std::byte, 64> small{};
  CHECK_THROWS(format(small.data(), small.size(), geometry), InvalidValue);
  CHECK_THROWS(format(nullptr, 1 << 20, geometry), InvalidValue);
}

TEST(memory_that_may_shrink_is_refused) {
  const SharedMemory memory = SharedMemory::create(4096);
  const SharedMemory same = SharedMemory::map(memory.fd());
  static_cast<char*>(memory.data())[17] = 5;
  CHECK_EQ(static_cast<char*>(same.data())[17], 5);
  CHECK(::ftruncate(memory.fd(), 0) != 0);
  int ends[2];
  CHECK(::pipe(ends) == 0);
  CHECK_THROWS(SharedMemory::map(ends[0]), InvalidValue);
  ::close(ends[0]);
  ::close(ends[1]);
  CHECK_THROWS(SharedMemory::map(ends[0]), InvalidValue);
}

namespace {

// One thread sends, another receives, both with random batches and both ways of doing it.
void two_threads(u64 capacity, std::size_t nbytes, u64 total, bool streaming = false) {
  RingMemory ring(capacity, nbytes);
  std::thread sender([&] {
    Producer producer(ring.view);
    producer.allow_streaming(streaming);
    std::mt19937_64 random(1);
    for (u64 sent = 0; sent < total;) {
      const u64 want = std::min(1 + random() % capacity, total - sent);
      const WaitPolicy policy{random() % 2 ? 2000ns : 0ns};
      wait_until([&] { return producer.would_reserve(1); }, policy, Clock::now() + 10s);
      const auto batch = messages(sent, want, nbytes);
      if (random() % 2) {
        sent += producer.send(batch.data(), want);
        continue;
      }
      const Runs runs = producer.reserve(want);
      for (u64 i = 0; i < runs.size(); ++i) {
        const auto one = message(sent + i, nbytes);
        const bool first = i < runs.first.slots;
        Line* slot = first ? runs.first.lines + i * ring.geometry.slot_lines
                           : runs.second.lines + (i - runs.first.slots) * ring.geometry.slot_lines;
        for (std::size_t at = 0; at < nbytes; at += 56, ++slot) {
          std::memcpy(slot->payload, one.data() + at, std::min<std::size_t>(56, nbytes - at));
        }
      }
      sent += runs.size();
      producer.commit(runs.size());
    }
    producer.close();
  });
  Consumer consumer(ring.view);
  std::mt19937_64 random(2);
  std::vector<std::byte> out(capacity * nbytes);
  u64 received = 0;
  for (;;) {
    const WaitPolicy policy{random() % 2 ? 2000ns : 0ns};
    if (!wait_until([&] { return consumer.would_receive(); }, policy, Clock::now() + 10s)) break;
    const bool ended = consumer.producer_closed();
    const u64 got = consumer.receive(out.data(), 1 + random() % capacity);
    if (got == 0) {
      if (ended) break;
      continue;
    }
    CHECK(std::memcmp(out.data(), messages(received, got, nbytes).data(), got * nbytes) == 0);
    received += got;
  }
  sender.join();
  CHECK_EQ(received, total);
}

}  // namespace

TEST(two_threads_lose_nothing) {
  two_threads(1, 56, 2'000);
  two_threads(4, 56, 20'000);
  two_threads(64, 240, 20'000);
  two_threads(64, 56, 50'000, true);
  two_threads(256, 240, 20'000, true);
}

TEST(a_wait_ends_at_its_deadline) {
  const auto start = Clock::now();
  CHECK(!wait_until([] { return false; }, WaitPolicy{0ns}, start + 20ms));
  CHECK(!wait_until([] { return false; }, WaitPolicy{std::chrono::nanoseconds::max()},
                    start + 40ms));
  const auto took = Clock::now() - start;
  CHECK(took >= 40ms);
  CHECK(took < 2s);
}

TEST(the_poller_wakes_parked_waiters_and_armed_watches_once) {
  Poller poller_of_nobody;
  CHECK(!poller_of_nobody.running());
  std::atomic<bool> flag{false};
  std::thread setter([&] {
    std::this_thread::sleep_for(5ms);
    flag = true;
  });
  CHECK(Poller::instance().wait([&] { return flag.load(); }, Clock::now() + 10s));
  setter.join();

  const int fd = ::eventfd(0, EFD_CLOEXEC);
  const auto id = Poller::instance().watch(fd);
  Poller::instance().arm(id, [&] { return flag.load(); });
  std::uint64_t count = 0;
  CHECK_EQ(::read(fd, &count, sizeof count), 8);
  CHECK_EQ(count, 1u);
  Poller::instance().arm(id, [] { return false; });
  std::this_thread::sleep_for(2ms);
  Poller::instance().unwatch(id);
  CHECK_EQ(Poller::instance().registered(), 0u);
  ::close(fd);
}

TEST(a_forked_child_gets_a_poller_of_its_own) {
  const auto before = fork_generation();
  CHECK(!Poller::instance().wait([] { return false; }, Clock::now() + 1ms));
  const pid_t child = ::fork();
  if (child == 0) {
    const bool own = !Poller::instance().running();
    const bool timed_out = !Poller::instance().wait([] { return false; }, Clock::now() + 5ms);
    ::_exit(own && timed_out && fork_generation() == before + 1 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK_EQ(fork_generation(), before);
}

TEST_MAIN()
