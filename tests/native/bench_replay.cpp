// Replays exported traces on paper: bench_replay TRACE.bin… [name=value…]
// Values: streams, late, reps, capacity (× peak live), limit (× peak live), tight, find (1: the
// smallest device that survives, 2: told to the pool as its limit).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

#include "paper_driver.hpp"
#include "pool/pool.hpp"
#include "pool/replay.hpp"

using namespace ringmem;
using testing::PaperDriver;

namespace {

using Settings = std::map<std::string, double>;

std::vector<TraceEvent> load(const char* path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<TraceEvent> trace(static_cast<std::size_t>(file.tellg()) / sizeof(TraceEvent));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(trace.data()),
            static_cast<std::streamsize>(trace.size() * sizeof(TraceEvent)));
  return trace;
}

struct Outcome {
  ReplayResult result;
  PoolStatistics statistics;
  std::size_t unreleased_peak = 0;
  double modelled_ms = 0;
  std::uint64_t host_waits = 0;
};

Outcome play(const std::vector<TraceEvent>& trace, Settings set, double capacity, double limit) {
  const auto live = static_cast<double>(peak_live_of(trace));
  const auto bytes = [&](double ratio) {
    return static_cast<std::size_t>(live * ratio) / PaperDriver::page * PaperDriver::page;
  };
  auto driver = std::make_shared<PaperDriver>(capacity > 0 ? bytes(capacity) : std::size_t{141} << 30);
  driver->set_late(static_cast<std::uint64_t>(set["late"]));
  PoolOptions options;
  if (limit > 0) options.limit = bytes(limit);
  options.tight = set["tight"] > 0;
  Pool pool(driver, 0, options);
  ReplayOptions play;
  play.streams.clear();
  for (int i = 0; i < std::max(1.0, set["streams"]); ++i) play.streams.push_back(StreamHandle(i ? i + 2 : 0));
  play.repetitions = set["reps"] > 0 ? static_cast<int>(set["reps"]) : 1;
  play.tick = [&](std::uint64_t) { driver->tick(); };
  play.reserved = [&] { return driver->unreleased(); };
  play.driver_calls = [&] { return driver->calls(); };
  Outcome outcome;
  outcome.result = replay(pool, trace, play);
  outcome.statistics = pool.statistics();
  outcome.modelled_ms = driver->modelled_ns() * 1e-6;
  outcome.host_waits = driver->synchronizations;
  return outcome;
}

void print(const char* name, const Outcome& o) {
  const ReplayResult& r = o.result;
  std::printf("%-16s %s reserved/live %.4f  driver %.1f ms  created %llu moved %llu (%.0f MiB) "
              "waits %llu host %llu retries %llu\n",
              name, r.completed ? "ok  " : "OOM ",
              static_cast<double>(r.peak_reserved) / static_cast<double>(r.peak_live),
              o.modelled_ms, static_cast<unsigned long long>(o.statistics.handles_created),
              static_cast<unsigned long long>(o.statistics.remaps),
              static_cast<double>(o.statistics.remapped) / (1 << 20),
              static_cast<unsigned long long>(o.statistics.device_waits),
              static_cast<unsigned long long>(o.host_waits),
              static_cast<unsigned long long>(o.statistics.retries));
  for (const ReplayRepetition& p : r.repetitions) {
    std::printf("    calls %6llu  mean %6.1f p50 %5.1f p99 %7.1f ns  total %.1f ms\n",
                static_cast<unsigned long long>(p.driver_calls), p.mean_ns, p.p50_ns, p.p99_ns,
                p.seconds * 1e3);
  }
  if (!r.completed) std::printf("    event %llu: %s\n", (unsigned long long)r.failed_event, r.error.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Settings set;
  std::vector<const char*> paths;
  for (int i = 1; i < argc; ++i) {
    if (const char* equals = std::strchr(argv[i], '=')) {
      set[std::string(static_cast<const char*>(argv[i]), equals)] = std::atof(equals + 1);
    } else {
      paths.push_back(argv[i]);
    }
  }
  for (const char* path : paths) {
    const std::vector<TraceEvent> trace = load(path);
    const char* slash = std::strrchr(path, '/');
    const char* name = slash ? slash + 1 : path;
    if (set["find"] > 0) {
      double low = 0.99;
      double high = 1.3;
      while (high - low > 0.0005) {
        const double middle = (low + high) / 2;
        const double limit = set["find"] > 1 ? middle : 0;
        (play(trace, set, middle, limit).result.completed ? high : low) = middle;
      }
      std::printf("%-16s smallest capacity / live %.4f\n", name, high);
    } else {
      print(name, play(trace, set, set["capacity"], set["limit"]));
    }
  }
}
