// The echo that figures are made with: every 8-byte word of a message has a value of its own, the
// handler changes every word, and every word of every reply is checked, all outside Python.
#pragma once

#include <vector>

#include "ring/consumer.hpp"

namespace ringmem::ring {

// Word w of message i, and what the handler must make of it.
inline u64 message_word(u64 message, u64 word) noexcept {
  return message * 0x9e3779b97f4a7c15u + word;
}
inline u64 reply_word(u64 value, u64 word) noexcept { return value * 3 + word + 1; }

// The handler as a function on the CPU; null unless there is one for so many words (7, 14, 30).
using EchoHandler = i32 (*)(const void* message, void* reply, void* state);
EchoHandler echo_handler(u64 words) noexcept;

struct EchoResult {
  u64 messages = 0;
  u64 wrong_words = 0;
  u64 seconds_ns = 0;
  bool complete = false;  // false: no answer came for `patience`
};

// One message at a time; the time of each in ns.
EchoResult measure_round_trips(Producer& producer, Consumer& consumer, u64 count,
                               std::vector<u32>& times_ns);
// Keeps the rings full in batches of `batch`, sending and checking on this thread: in the slots
// (reserve, commit, poll, release), or by copy (send, receive).
EchoResult measure_stream(Producer& producer, Consumer& consumer, u64 count, u64 batch);
EchoResult measure_copies(Producer& producer, Consumer& consumer, u64 count, u64 batch);

}  // namespace ringmem::ring
