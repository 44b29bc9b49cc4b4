// Two threads, one ring each way: the round trip of one message, and messages a second in batches.
// Every word of every message is checked. Usage: bench_ring [messages] [message_nbytes]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "ring/consumer.hpp"
#include "ring/memory.hpp"
#include "ring/wait.hpp"

using namespace ringmem::ring;

namespace {

struct Pair {
  Pair(u64 capacity, u64 nbytes)
      : geometry(make_geometry(capacity, nbytes)),
        memory(SharedMemory::create(geometry.nbytes())),
        view(format(memory.data(), memory.nbytes(), geometry)) {}
  Geometry geometry;
  SharedMemory memory;
  RingView view;
};

const auto never = Clock::time_point::max();

void round_trip(u64 nbytes, int count) {
  Pair there(64, nbytes), back(64, nbytes);
  const u64 words = nbytes / 8;
  std::thread echo([&] {
    Consumer in(there.view);
    Producer out(back.view);
    std::vector<u64> message(words);
    auto* bytes = reinterpret_cast<std::byte*>(message.data());
    for (int i = 0; i < count; ++i) {
      spin_until([&] { return in.receive(bytes, 1) == 1; }, never);
      for (u64& word : message) word += 1;
      out.send(bytes, 1);
    }
  });
  Producer out(there.view);
  Consumer in(back.view);
  std::vector<u64> message(words);
  auto* bytes = reinterpret_cast<std::byte*>(message.data());
  std::vector<double> us;
  u64 wrong = 0;
  for (int i = 0; i < count; ++i) {
    std::fill(message.begin(), message.end(), static_cast<u64>(i));
    const auto start = Clock::now();
    out.send(bytes, 1);
    spin_until([&] { return in.receive(bytes, 1) == 1; }, never);
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    for (u64 word : message) wrong += word != static_cast<u64>(i) + 1;
  }
  echo.join();
  std::sort(us.begin(), us.end());
  const auto at = [&](double q) { return us[static_cast<std::size_t>(q * (us.size() - 1))]; };
  std::printf("{\"rtt_us\": {\"min\": %.3f, \"p50\": %.3f, \"p99\": %.3f, \"p99.9\": %.3f}, "
              "\"nbytes\": %llu, \"wrong_words\": %llu}\n",
              us[0], at(0.5), at(0.99), at(0.999), static_cast<unsigned long long>(nbytes),
              static_cast<unsigned long long>(wrong));
}

void throughput(u64 nbytes, u64 total, u64 batch, u64 capacity) {
  Pair pair(capacity, nbytes);
  const u64 words = nbytes / 8;
  std::thread sender([&] {
    Producer producer(pair.view);
    std::vector<u64> records(batch * words);
    for (u64 sent = 0; sent < total;) {
      for (u64 i = 0; i < batch; ++i) {
        for (u64 w = 0; w < words; ++w) records[i * words + w] = sent + i + w;
      }
      for (u64 done = 0; done < batch;) {
        const u64 accepted = producer.send(
            reinterpret_cast<std::byte*>(records.data() + done * words), batch - done);
        if (accepted == 0) ringmem::ring::pause();
        done += accepted;
      }
      sent += batch;
    }
  });
  Consumer consumer(pair.view);
  std::vector<u64> records(batch * words);
  u64 wrong = 0, received = 0;
  const auto start = Clock::now();
  while (received < total) {
    const u64 got = consumer.receive(reinterpret_cast<std::byte*>(records.data()), batch);
    if (got == 0) ringmem::ring::pause();
    for (u64 i = 0; i < got; ++i) {
      for (u64 w = 0; w < words; ++w) wrong += records[i * words + w] != received + i + w;
    }
    received += got;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  sender.join();
  std::printf("{\"messages_per_second\": %.3e, \"nbytes\": %llu, \"batch\": %llu, "
              "\"capacity\": %llu, \"wrong_words\": %llu}\n",
              static_cast<double>(received) / seconds, static_cast<unsigned long long>(nbytes),
              static_cast<unsigned long long>(batch), static_cast<unsigned long long>(capacity),
              static_cast<unsigned long long>(wrong));
}

}  // namespace

int main(int argc, char** argv) {
  const u64 total = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20'000'000;
  for (const u64 nbytes : {56, 112, 240}) round_trip(nbytes, 200'000);
  for (const u64 nbytes : {56, 112, 240}) {
    for (const u64 batch : {1, 8, 64, 512}) throughput(nbytes, total - total % batch, batch, 4096);
  }
  return 0;
}
