// Loops of allocate and free in C++, for `ringmem bench pool`: what the pool costs without Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <exception>
#include <thread>

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

// ns of a pair of free and allocate of a random block while `live` blocks of `nbytes` live.
double time_live(Allocator& allocator, std::size_t nbytes, StreamHandle stream, std::size_t live,
                 std::size_t count) {
  std::vector<Block> blocks;
  blocks.reserve(live);
  const auto free_all = [&] {
    for (const Block& block : blocks) static_cast<void>(allocator.deallocate(block, stream));
  };
  try {
    for (std::size_t i = 0; i < live; ++i) blocks.push_back(take(allocator, nbytes, stream));
    Random random;
    const auto once = [&] {
      Block& block = blocks[random() % live];
      check(allocator.deallocate(block, stream), "deallocate");
      block = take(allocator, nbytes, stream);
    };
    for (std::size_t i = 0; i < std::min<std::size_t>(count, live); ++i) once();
    const auto start = Clock::now();
    for (std::size_t i = 0; i < count; ++i) once();
    const double ns = ns_since(start, count);
    free_all();
    return ns;
  } catch (...) {
    free_all();
    throw;
  }
}

// Pairs a second of all threads together, each on the stream of its number.
double time_threads(Allocator& allocator, std::size_t nbytes,
                    const std::vector<StreamHandle>& streams, std::size_t count) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(streams.size());
  std::barrier<> line(static_cast<std::ptrdiff_t>(streams.size()) + 1);
  for (std::size_t i = 0; i < streams.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        pair(allocator, nbytes, streams[i], 1000);
      } catch (...) {
        failures[i] = std::current_exception();
      }
      line.arrive_and_wait();
      try {
        if (!failures[i]) pair(allocator, nbytes, streams[i], count);
      } catch (...) {
        failures[i] = std::current_exception();
      }
      line.arrive_and_wait();
    });
  }
  line.arrive_and_wait();
  const auto start = Clock::now();
  line.arrive_and_wait();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return static_cast<double>(count * streams.size()) / seconds;
}

template <class Call>
auto without_gil(Call&& call) {
  nb::gil_scoped_release release;
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
        nb::arg("count"), "Nanoseconds of one free and allocate of a random one of `live` blocks.");
  m.def("bench_threads", [](std::shared_ptr<Allocator> allocator, std::size_t nbytes,
                            std::vector<StreamHandle> streams, std::size_t count) {
    return without_gil([&] { return time_threads(*allocator, nbytes, streams, count); });
  }, nb::arg("allocator"), nb::arg("nbytes"), nb::arg("streams"), nb::arg("count"),
        "Pairs a second of one thread for each stream.");
}

}  // namespace ringmem::bind
