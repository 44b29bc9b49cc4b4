#include "ring/measure.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "ring/wait.hpp"

namespace ringmem::ring {
namespace {

constexpr std::chrono::seconds patience{5};
constexpr u64 line_words = line_payload_nbytes / 8;

template <u64 words>
i32 echo(const void* message, void* reply, void*) {
  const auto* from = static_cast<const u64*>(message);
  auto* to = static_cast<u64*>(reply);
  for (u64 w = 0; w < words; ++w) to[w] = reply_word(from[w], w);
  return 0;
}

// Calls f(word number, its place in the slot) for each word of a message.
template <class Function>
void for_each_word(Line* slot, u64 words, const Function& f) {
  for (u64 w = 0; w < words; ++slot) {
    auto* payload = reinterpret_cast<u64*>(slot->payload);
    for (u64 i = 0; i < line_words && w < words; ++i, ++w) f(w, payload[i]);
  }
}

void write(Runs runs, u64 first, u64 words, u32 slot_lines) {
  for (const Run& run : {runs.first, runs.second}) {
    for (u64 i = 0; i < run.slots; ++i, ++first) {
      for_each_word(run.lines + i * slot_lines, words,
                    [&](u64 w, u64& place) { place = message_word(first, w); });
    }
  }
}

u64 count_wrong(Runs runs, u64 first, u64 words, u32 slot_lines) {
  u64 wrong = 0;
  for (const Run& run : {runs.first, runs.second}) {
    for (u64 i = 0; i < run.slots; ++i, ++first) {
      for_each_word(run.lines + i * slot_lines, words, [&](u64 w, u64& place) {
        wrong += place != reply_word(message_word(first, w), w);
      });
    }
  }
  return wrong;
}

// Whether the last of the next `count` replies is there. Looking at one line a batch leaves the others
// to the kernel until it has written them.
bool all_ready(const Consumer& consumer, u64 count) {
  return count != 0 && consumer.is_ready(consumer.head() + count - 1);
}

template <u64 words>
void make(std::vector<u64>& messages, u64 first, u64 count) {
  u64* to = messages.data();
  for (u64 i = 0; i < count; ++i, to += words) {
    for (u64 w = 0; w < words; ++w) to[w] = message_word(first + i, w);
  }
}

template <u64 words>
u64 count_wrong(const std::vector<u64>& replies, u64 first, u64 count) {
  const u64* from = replies.data();
  u64 wrong = 0;
  for (u64 i = 0; i < count; ++i, from += words) {
    for (u64 w = 0; w < words; ++w) {
      wrong += from[w] != reply_word(message_word(first + i, w), w);
    }
  }
  return wrong;
}

template <u64 words>
EchoResult copies(Producer& producer, Consumer& consumer, u64 count, u64 batch) {
  std::vector<u64> messages(batch * words), replies(batch * words);
  EchoResult result;
  u64 made = 0, sent = 0;
  const auto begin = Clock::now();
  auto last_answer = begin;
  for (u64 turn = 0; result.messages < count; ++turn) {
    if (sent == made && made < count) {
      make<words>(messages, made, std::min(batch, count - made));
      made += std::min(batch, count - made);
    }
    const u64* rest = &messages[sent % batch * words];  // batches start at multiples of `batch`
    sent += producer.send(reinterpret_cast<const std::byte*>(rest), made - sent);
    const u64 got = consumer.receive(reinterpret_cast<std::byte*>(replies.data()), batch);
    result.wrong_words += count_wrong<words>(replies, result.messages, got);
    result.messages += got;
    if (got != 0) {
      turn = 0;
    } else if (turn % 4096 == 4095) {
      if (consumer.producer_closed()) return result;
      if (turn == 4095) last_answer = Clock::now();
      else if (Clock::now() - last_answer > patience) return result;
    }
  }
  result.seconds_ns = static_cast<u64>(std::chrono::nanoseconds(Clock::now() - begin).count());
  result.complete = true;
  return result;
}

}  // namespace

EchoHandler echo_handler(u64 words) noexcept {
  switch (words) {
    case 7: return echo<7>;
    case 14: return echo<14>;
    case 30: return echo<30>;
    default: return nullptr;
  }
}

EchoResult measure_round_trips(Producer& producer, Consumer& consumer, u64 count,
                               std::vector<u32>& times_ns) {
  const u64 words = producer.geometry().message_nbytes / 8;
  const u32 in_lines = producer.geometry().slot_lines;
  const u32 out_lines = consumer.geometry().slot_lines;
  EchoResult result;
  times_ns.reserve(count);
  const auto begin = Clock::now();
  for (u64 i = 0; i < count; ++i) {
    // A kernel publishes what it took after its answer: a ring of one slot may look full for a moment.
    if (!spin_until([&] { return producer.free_slots(1) != 0; }, Clock::now() + patience)) break;
    const auto start = Clock::now();
    write(producer.reserve(1), i, words, in_lines);
    producer.commit(1);
    if (!spin_until([&] { return consumer.poll(1).size() != 0; }, start + patience)) return result;
    result.wrong_words += count_wrong(consumer.poll(1), i, words, out_lines);
    consumer.release(1);
    const auto ns = std::chrono::nanoseconds(Clock::now() - start).count();
    times_ns.push_back(static_cast<u32>(std::min<std::int64_t>(ns, ~u32{0})));
    ++result.messages;
  }
  result.seconds_ns = static_cast<u64>(std::chrono::nanoseconds(Clock::now() - begin).count());
  result.complete = true;
  return result;
}

EchoResult measure_stream(Producer& producer, Consumer& consumer, u64 count, u64 batch) {
  const u64 words = producer.geometry().message_nbytes / 8;
  const u32 in_lines = producer.geometry().slot_lines;
  const u32 out_lines = consumer.geometry().slot_lines;
  EchoResult result;
  u64 sent = 0;
  const auto begin = Clock::now();
  auto last_answer = begin;
  for (u64 turn = 0; result.messages < count; ++turn) {
    if (const u64 wanted = std::min(batch, count - sent); wanted != 0) {
      // A whole batch or nothing: what the figure is named after.
      if (producer.free_slots(wanted) >= wanted) {
        write(producer.reserve(wanted), sent, words, in_lines);
        producer.commit(wanted);
        sent += wanted;
      }
    }
    const Runs ready = all_ready(consumer, std::min(batch, sent - result.messages)) ? consumer.poll(batch) : Runs{};
    if (const u64 got = ready.size(); got != 0) {
      result.wrong_words += count_wrong(ready, result.messages, words, out_lines);
      consumer.release(got);
      result.messages += got;
      turn = 0;
    } else if (turn % 4096 == 4095) {
      if (consumer.producer_closed()) return result;
      if (turn == 4095) last_answer = Clock::now();
      else if (Clock::now() - last_answer > patience) return result;
    }
  }
  result.seconds_ns = static_cast<u64>(std::chrono::nanoseconds(Clock::now() - begin).count());
  result.complete = true;
  return result;
}

EchoResult measure_copies(Producer& producer, Consumer& consumer, u64 count, u64 batch) {
  switch (producer.geometry().message_nbytes / 8) {
    case 7: return copies<7>(producer, consumer, count, batch);
    case 14: return copies<14>(producer, consumer, count, batch);
    case 30: return copies<30>(producer, consumer, count, batch);
    default: return {};
  }
}

}  // namespace ringmem::ring
