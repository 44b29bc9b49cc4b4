// A CPU ring kernel with the echo of the figures, seen from native code: the round trip, and
// messages a second by batch. Usage: bench_cpu_kernel [messages] [message_nbytes]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ring/cpu_kernel.hpp"
#include "ring/measure.hpp"
#include "ring/memory.hpp"

using namespace ringmem::ring;
namespace layout = ringmem::layout;

constexpr u64 window = 65'536;

int main(int argc, char** argv) {
  const u64 count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 5'000'000;
  const u64 nbytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 56;
  const Geometry geometry = make_geometry(4096, nbytes);
  SharedMemory input = SharedMemory::create(geometry.nbytes());
  SharedMemory output = SharedMemory::create(geometry.nbytes());
  SharedMemory blocks = SharedMemory::create(4096);
  const RingView in = format(input.data(), input.nbytes(), geometry);
  const RingView out = format(output.data(), output.nbytes(), geometry);
  KernelPair pair;
  pair.control = static_cast<layout::ControlBlock*>(blocks.data());
  pair.telemetry = reinterpret_cast<layout::TelemetryBuffer*>(pair.control + 8);
  pair.input = static_cast<layout::RingHeader*>(input.data());
  pair.output = static_cast<layout::RingHeader*>(output.data());
  reset(pair, 0);
  CpuHandler handler;
  handler.plain = echo_handler(nbytes / 8);
  CpuKernel kernel(handler, 1, 0);
  kernel.start({pair}, 0);
  Producer producer(in);
  Consumer consumer(out);
  std::vector<u32> times;
  measure_round_trips(producer, consumer, 100'000, times);
  std::sort(times.begin(), times.end());
  std::printf("rtt ns p50 %u p99 %u\n", times[times.size() / 2], times[times.size() * 99 / 100]);
  for (const u64 batch : {1, 8, 64, 512}) {
    // In windows of a millisecond or so, since another process may take a core in between.
    std::vector<double> rates;
    u64 wrong = 0;
    for (u64 done = 0; done < count; done += window) {
      const EchoResult result = measure_stream(producer, consumer, window, batch);
      rates.push_back(static_cast<double>(result.messages) * 1e3 /
                      static_cast<double>(result.seconds_ns));
      wrong += result.wrong_words;
    }
    std::sort(rates.begin(), rates.end());
    std::printf("batch %llu: median %.2f best %.2f M/s, wrong words %llu\n",
                static_cast<unsigned long long>(batch), rates[rates.size() / 2], rates.back(),
                static_cast<unsigned long long>(wrong));
  }
  store(pair.control->should_terminate, u32{1});
  return kernel.join(std::chrono::seconds(1)) ? 0 : 1;
}
