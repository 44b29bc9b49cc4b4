// Loops of allocate and free in C++, for `ringmem bench pool`: what the pool costs without Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <exception>
#include <thread>
#include <tuple>
#include <utility>

#include "bind/pool.hpp"

namespace ringmem::bind {
namespace {

using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point start, std::size_t count) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() /
         static_cast<double>(count);
}

Block take(Allocator& allocator, std::size_t nbytes, StreamHandle stream) {
  Block block;
  if (allocator.try_allocate(nbytes, stream, &block)) return block;
  return allocator.allocate(nbytes, stream);
}

void pair(Allocator& allocator, std::size_t nbytes, StreamHandle stream, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const Block block = take(allocator, nbytes, stream);
    check(allocator.deallocate(block, stream), "deallocate");
  }
}

double time_pairs(Allocator& allocator, std::size_t nbytes, StreamHandle stream,
                  std::size_t count) {
  pair(allocator, nbytes, stream, std::min<std::size_t>(count, 1000));
  const auto start = Clock::now();
  pair(allocator, nbytes, stream, count);
  return ns_since(start, count);
}

struct Random {
  std::uint64_t state = 0x9e3779b97f4a7c15ull;
  std::uint64_t operator()() noexcept {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
};

// `place()` says which block is freed next, for one of its size to be allocated in its place.
template <class Place>
double replace(Allocator& allocator, std::vector<Block>& blocks, StreamHandle stream,
               std::size_t count, Place&& place) {
  const auto start = Clock::now();
  for (std::size_t i = 0; i < count; ++i) {
    Block& block = blocks[place()];
    const std::size_t nbytes = block.nbytes;
    check(allocator.deallocate(block, stream), "deallocate");
    block = take(allocator, nbytes, stream);
  }
  return ns_since(start, count);
}

// The same list with no allocator: a handle is read and written, and the next one drawn with what
// was read, as an allocator's lock makes it wait.
double touch(std::vector<Block>& blocks, std::size_t nbytes, std::size_t count, Random& random) {
  const auto start = Clock::now();
  std::size_t zero = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Block& block = blocks[(random() + zero) % blocks.size()];
    zero = block.nbytes - nbytes;  // which the compiler cannot know
    block.nbytes = nbytes;
  }
  return ns_since(start, count);
}

// While `live` blocks of `nbytes` live, ns of: a pair of allocate and free; a free of any of them
// with an allocate in its place; the same with handles drawn at random. The list of handles is in
// random order: walked, it comes from the cache and what is timed is the allocator; drawn from, it
// costs a miss of its own, as it is ten times as large as the allocator's records: the fourth
// figure is that miss alone.
std::tuple<double, double, double, double> time_live(Allocator& allocator, std::size_t nbytes,
                                                     StreamHandle stream, std::size_t live,
                                                     std::size_t count) {
  std::vector<Block> blocks;
  blocks.reserve(live);
  const auto free_all = [&] {
    for (const Block& block : blocks) static_cast<void>(allocator.deallocate(block, stream));
  };
  try {
    for (std::size_t i = 0; i < live; ++i) blocks.push_back(take(allocator, nbytes, stream));
    Random random;
    for (std::size_t i = live; i > 1; --i) std::swap(blocks[i - 1], blocks[random() % i]);
    pair(allocator, nbytes, stream, 1000);
    const auto pairs = Clock::now();
    pair(allocator, nbytes, stream, count);
    const double hot = ns_since(pairs, count);
    std::size_t at = 0;
    const auto walked = [&] { return at = at + 1 < live ? at + 1 : 0; };
    static_cast<void>(replace(allocator, blocks, stream, std::min(count, live), walked));
    const double any = replace(allocator, blocks, stream, count, walked);
    const double drawn =
        replace(allocator, blocks, stream, count, [&] { return random() % live; });
    const double handle = touch(blocks, nbytes, count, random);
    free_all();
    return {hot, any, drawn, handle};
  } catch (...) {
    free_all();
    throw;
  }
}

// Pairs a second of all threads together, each on the stream of its number, from the first that
// starts to the last that ends.
double time_threads(Allocator& allocator, std::size_t nbytes,
                    const std::vector<StreamHandle>& streams, std::size_t count) {
  struct Part {
    Clock::time_point start, end;
    std::exception_ptr failure;
  };
  std::vector<Part> parts(streams.size());
  std::vector<std::thread> threads;
  std::barrier<> line(static_cast<std::ptrdiff_t>(streams.size()));
  for (std::size_t i = 0; i < streams.size(); ++i) {
    threads.emplace_back([&, i] {
      Part& part = parts[i];
      try {
        pair(allocator, nbytes, streams[i], 1000);
      } catch (...) {
        part.failure = std::current_exception();
      }
      line.arrive_and_wait();
      part.start = Clock::now();
      try {
        if (!part.failure) pair(allocator, nbytes, streams[i], count);
      } catch (...) {
        part.failure = std::current_exception();
      }
      part.end = Clock::now();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Clock::time_point start = parts[0].start;
  Clock::time_point end = parts[0].end;
  for (const Part& part : parts) {
    if (part.failure) std::rethrow_exception(part.failure);
    start = std::min(start, part.start);
    end = std::max(end, part.end);
  }
  return static_cast<double>(count * streams.size()) /
         std::chrono::duration<double>(end - start).count();
}

template <class Call>
auto without_gil(Call&& call) {
  ReleaseGil release;
  return call();
}

}  // namespace

void bind_pool_bench(nb::module_& m) {
  m.def("bench_pairs", [](std::shared_ptr<Allocator> allocator, std::size_t nbytes,
                          StreamHandle stream, std::size_t count) {
    return without_gil([&] { return time_pairs(*allocator, nbytes, stream, count); });
  }, nb::arg("allocator"), nb::arg("nbytes"), nb::arg("stream"), nb::arg("count"),
        "Nanoseconds of one allocate and free in C++.");
  m.def("bench_live", [](std::shared_ptr<Allocator> allocator, std::size_t nbytes,
                         StreamHandle stream, std::size_t live, std::size_t count) {
    return without_gil([&] { return time_live(*allocator, nbytes, stream, live, count); });
  }, nb::arg("allocator"), nb::arg("nbytes"), nb::arg("stream"), nb::arg("live"),
        nb::arg("count"), "With `live` blocks: nanoseconds of a pair, of replacing any block, of replacing one "
        "whose handle is drawn at random, and of drawing a handle alone.");
  m.def("bench_threads", [](std::shared_ptr<Allocator> allocator, std::size_t nbytes,
                            std::vector<StreamHandle> streams, std::size_t count) {
    return without_gil([&] { return time_threads(*allocator, nbytes, streams, count); });
  }, nb::arg("allocator"), nb::arg("nbytes"), nb::arg("streams"), nb::arg("count"),
        "Pairs a second of one thread for each stream.");
}

}  // namespace ringmem::bind
