#include "pool/replay.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace ringmem {
namespace {

using Clock = std::chrono::steady_clock;

// The cheapest clock there is: 6 ns a look where the processor has a counter, 20 elsewhere.
std::uint64_t now() noexcept {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

struct Scale {
  double ns_per_tick = 1;
  double overhead = 0;  // ticks between two looks with nothing between
};

Scale calibrate() {
  const auto start = Clock::now();
  const std::uint64_t first = now();
  while (Clock::now() - start < std::chrono::milliseconds(5)) {
  }
  const std::uint64_t ticks = now() - first;
  const double ns = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
  std::uint64_t least = ~std::uint64_t{0};
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t look = now();
    least = std::min(least, now() - look);
  }
  return {ns / static_cast<double>(ticks), static_cast<double>(least)};
}

struct Shared {
  std::atomic<bool> stop{false};
  std::atomic<std::size_t> peak_reserved{0};
  // Of several threads, whose order is none of the trace's.
  std::atomic<std::size_t> live{0};
  std::atomic<std::size_t> peak_live{0};
};

void raise_to(std::atomic<std::size_t>& peak, std::size_t value) noexcept {
  std::size_t known = peak.load(std::memory_order_relaxed);
  while (value > known && !peak.compare_exchange_weak(known, value)) {
  }
}

class Player {
 public:
  Player(Allocator& allocator, std::span<const TraceEvent> trace, const ReplayOptions& options,
         int thread, Shared& shared)
      : allocator_(allocator), trace_(trace), options_(options), thread_(thread), shared_(shared) {
    std::uint32_t ids = 0;
    for (const TraceEvent& event : trace) {
      ids = std::max(ids, event.id + 1);
      streams_in_trace_ |= event.stream != 0;
    }
    blocks_.resize(ids);
    ticks_.reserve(trace.size());
  }

  // False if memory ran out; then event() says where.
  void run() {
    ticks_.clear();
    for (std::size_t i = 0; i < trace_.size() && !shared_.stop.load(std::memory_order_relaxed);
         ++i) {
      event_ = i;
      if (options_.tick && thread_ == 0) options_.tick(i);
      const TraceEvent& event = trace_[i];
      if (event.id % static_cast<std::uint32_t>(options_.threads) !=
          static_cast<std::uint32_t>(thread_)) {
        continue;
      }
      if (event.kind == TraceKind::allocate) allocate(event);
      else if (event.kind == TraceKind::free_requested) free(event.id, event.stream);
      else continue;
      if (options_.reserved) raise_to(shared_.peak_reserved, options_.reserved());
    }
  }
  // Frees what lives, all of it whatever fails; returns the first failure.
  std::exception_ptr free_all() {
    std::exception_ptr first;
    for (std::uint32_t id = 0; id < blocks_.size(); ++id) {
      if (!blocks_[id].record && !blocks_[id].ptr) continue;
      try {
        free(id, 0);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    return first;
  }
  std::size_t event() const { return event_; }
  const std::vector<std::uint32_t>& ticks() const { return ticks_; }
  std::exception_ptr failure;

 private:
  StreamHandle stream_of(std::uint32_t id, std::uint8_t in_trace) const {
    const std::size_t count = options_.streams.size();
    return options_.streams[(streams_in_trace_ ? in_trace : id) % count];
  }
  void allocate(const TraceEvent& event) {
    const StreamHandle stream = stream_of(event.id, event.stream);
    const std::uint64_t start = now();
    if (!allocator_.try_allocate(event.size, stream, &blocks_[event.id])) {
      blocks_[event.id] = allocator_.allocate(event.size, stream);
    }
    sample(start);
    if (options_.threads > 1) raise_to(shared_.peak_live, shared_.live += event.size);
  }
  void free(std::uint32_t id, std::uint8_t in_trace) {
    const StreamHandle stream = stream_of(id, in_trace);
    // First, so that memory which another thread gets meanwhile does not count twice.
    if (options_.threads > 1) shared_.live -= blocks_[id].nbytes;
    const std::uint64_t start = now();
    const Status status = allocator_.deallocate(blocks_[id], stream);
    sample(start);
    check(status, "deallocate");
    blocks_[id] = {};
  }
  void sample(std::uint64_t start) {
    const std::uint64_t spent = now() - start;
    ticks_.push_back(static_cast<std::uint32_t>(std::min<std::uint64_t>(spent, 0xffffffffu)));
  }

  Allocator& allocator_;
  std::span<const TraceEvent> trace_;
  const ReplayOptions& options_;
  const int thread_;
  Shared& shared_;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> ticks_;
  std::size_t event_ = 0;
  bool streams_in_trace_ = false;  // else blocks are spread over the streams by their id
};

ReplayRepetition summarize(std::vector<std::uint32_t> ticks, const Scale& scale) {
  ReplayRepetition r;
  r.operations = ticks.size();
  if (ticks.empty()) return r;
  std::sort(ticks.begin(), ticks.end());
  const auto net = [&](double value) {
    return std::max(0.0, value - scale.overhead) * scale.ns_per_tick;
  };
  double sum = 0;
  for (const std::uint32_t one : ticks) sum += net(one);
  r.mean_ns = sum / static_cast<double>(ticks.size());
  r.seconds = sum * 1e-9;
  r.p50_ns = net(ticks[ticks.size() / 2]);
  r.p99_ns = net(ticks[ticks.size() - 1 - ticks.size() / 100]);
  r.max_ns = net(ticks.back());
  return r;
}

template <typename Work>
void on_all(std::vector<Player>& players, Shared& shared, Work work) {
  const auto guarded = [&](Player& player) {
    try {
      work(player);
    } catch (...) {
      player.failure = std::current_exception();
      shared.stop = true;
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 1; i < players.size(); ++i) {
      threads.emplace_back(guarded, std::ref(players[i]));
    }
    guarded(players[0]);
  } catch (const std::system_error&) {
    shared.stop = true;
    players[0].failure = std::make_exception_ptr(DriverError(
        Status::operating_system, "starting a thread",
        std::to_string(threads.size() + 1) + " of " + std::to_string(players.size()) + " run"));
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

std::size_t peak_live_of(std::span<const TraceEvent> trace) {
  std::vector<std::uint64_t> sizes;
  std::size_t live = 0;
  std::size_t peak = 0;
  for (const TraceEvent& event : trace) {
    if (event.id >= sizes.size()) sizes.resize(event.id + 1);
    if (event.kind == TraceKind::allocate) {
      sizes[event.id] = event.size;
      live += event.size;
      peak = std::max(peak, live);
    } else if (event.kind == TraceKind::free_requested) {
      live -= sizes[event.id];
    }
  }
  return peak;
}

ReplayResult replay(Allocator& allocator, std::span<const TraceEvent> trace,
                    const ReplayOptions& options) {
  ReplayResult result;
  result.events = trace.size();
  result.peak_live = peak_live_of(trace);
  const Scale scale = calibrate();
  Shared shared;
  std::vector<Player> players;
  for (int i = 0; i < options.threads; ++i) {
    players.emplace_back(allocator, trace, options, i, shared);
  }
  for (int repetition = 0; repetition < options.repetitions && result.completed; ++repetition) {
    const std::uint64_t calls = options.driver_calls ? options.driver_calls() : 0;
    on_all(players, shared, [](Player& player) { player.run(); });
    std::vector<std::uint32_t> ticks;
    for (Player& player : players) {
      ticks.insert(ticks.end(), player.ticks().begin(), player.ticks().end());
    }
    result.repetitions.push_back(summarize(std::move(ticks), scale));
    if (options.driver_calls) result.repetitions.back().driver_calls = options.driver_calls() - calls;
    std::exception_ptr fatal;
    for (Player& player : players) {
      if (!player.failure) continue;
      try {
        std::rethrow_exception(player.failure);
      } catch (const DriverError& error) {
        if (error.status != Status::out_of_memory) fatal = player.failure;
        result.completed = false;
        result.failed_event = player.event();
        result.error = error.what();
      } catch (...) {  // cancelled
        fatal = player.failure;
      }
    }
    for (Player& player : players) {
      const std::exception_ptr failure = player.free_all();
      if (!fatal) fatal = failure;
    }
    if (fatal) std::rethrow_exception(fatal);
  }
  result.peak_reserved = shared.peak_reserved;
  if (options.threads > 1) result.peak_live = shared.peak_live;
  return result;
}

}  // namespace ringmem
