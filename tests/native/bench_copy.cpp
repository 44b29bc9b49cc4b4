// What C++ reaches through our own driver interface, on a GPU or a simulated device: the peer of
// benchmarks/bench_waist.py, with the names that benchmarks/peer_driver.c gives its samples.
//
//   bench_copy cpu|cuda [ORDINAL]
//
// Prints one JSON object; each entry is a list of samples.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "driver/cuda/cuda_driver.hpp"
#include "driver/host/host_driver.hpp"

using namespace ringmem;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;
constexpr int batch = 100;

using Samples = std::vector<double>;

double now_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

void print(const char* name, const Samples& samples, bool last = false) {
  std::printf("\"%s\": [", name);
  for (std::size_t i = 0; i < samples.size(); ++i) std::printf("%s%.9g", i ? ", " : "", samples[i]);
  std::printf("]%s\n", last ? "" : ",");
}

class Bench {
 public:
  Bench(DriverRef driver, int device, std::size_t nbytes)
      : driver_(std::move(driver)), device_(device), nbytes_(nbytes) {
    for (StreamHandle* stream : {&up_, &down_}) {
      check(driver_->stream_create(device_, {}, stream), "cuStreamCreate");
    }
    PoolProps props;
    props.location = {LocationKind::device, device_};
    check(driver_->pool_create(device_, props, &pool_), "cuMemPoolCreate");
    check(driver_->pool_set(device_, pool_, PoolAttribute::release_threshold, UINT64_MAX),
          "cuMemPoolSetAttribute");
    for (void** host : {&source_, &target_}) {
      check(driver_->host_alloc(device_, nbytes_, {}, host), "cuMemHostAlloc");
      std::memset(*host, 1, nbytes_);
    }
    for (DevicePtr* ptr : {&first_, &second_}) {
      check(driver_->mem_alloc(device_, nbytes_, ptr), "cuMemAlloc");
      check(driver_->fill_async(device_, *ptr, 1, 1, nbytes_, up_), "cuMemsetD8Async");
    }
    synchronize();
  }

  // Nanoseconds of one allocation and its free.
  Samples pairs(std::size_t nbytes, int samples) {
    return timed(samples, [&] {
      DevicePtr ptr = 0;
      check(driver_->pool_alloc_async(device_, pool_, nbytes, up_, &ptr), "cuMemAllocFromPoolAsync");
      check(driver_->mem_free_async(device_, ptr, up_), "cuMemFreeAsync");
    });
  }

  // Nanoseconds of a call that submits 4 KiB; the queue is never full.
  Samples submits(int samples) {
    return timed(samples, [&] { copy(first_, address(source_), 4096, up_); });
  }

  // GB/s of one direction, or of each of both at once.
  Samples rates(bool up, bool down, int samples) {
    Samples result;
    for (int i = -3; i < samples; ++i) {
      const double start = now_s();
      if (up) copy(first_, address(source_), nbytes_, up_);
      if (down) copy(address(target_), second_, nbytes_, down_);
      synchronize();
      if (i >= 0) result.push_back(static_cast<double>(nbytes_) / (now_s() - start) / 1e9);
    }
    return result;
  }

 private:
  static DevicePtr address(void* host) { return reinterpret_cast<DevicePtr>(host); }

  void copy(DevicePtr dst, DevicePtr src, std::size_t nbytes, StreamHandle stream) {
    check(driver_->copy_async(device_, dst, src, nbytes, stream), "cuMemcpyAsync");
  }

  void synchronize() {
    for (StreamHandle stream : {up_, down_}) {
      check(driver_->stream_synchronize(device_, stream), "cuStreamSynchronize");
    }
  }

  template <class Call>
  Samples timed(int samples, Call call) {
    Samples result;
    for (int i = 0; i < samples; ++i) {
      const double start = now_s();
      for (int j = 0; j < batch; ++j) call();
      result.push_back((now_s() - start) * 1e9 / batch);
      synchronize();
    }
    return result;
  }

  DriverRef driver_;
  int device_;
  std::size_t nbytes_;
  StreamHandle up_ = 0, down_ = 0;
  PoolHandle pool_ = 0;
  void *source_ = nullptr, *target_ = nullptr;
  DevicePtr first_ = 0, second_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string platform = argc > 1 ? argv[1] : "cpu";
  if (platform != "cpu" && platform != "cuda") {
    std::fprintf(stderr, "usage: bench_copy cpu|cuda [ordinal]\n");
    return 2;
  }
  const bool gpu = platform == "cuda";
  try {
    Bench bench(gpu ? DriverRef(cuda_driver()) : make_host_driver(HostConfig{}),
                argc > 2 ? std::atoi(argv[2]) : 0, (gpu ? 256 : 16) * MiB);
    std::printf("{\n");
    print("pair 256 B", bench.pairs(256, 200));
    print("pair 1 MiB", bench.pairs(MiB, 200));
    print("pair 64 MiB", bench.pairs(64 * MiB, 200));
    print("submit", bench.submits(200));
    print("up", bench.rates(true, false, 30));
    print("down", bench.rates(false, true, 30));
    print("both", bench.rates(true, true, 30), true);
    std::printf("}\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  // Nothing is given back: the process ends, and mem_free would wait for other work on the device.
  std::fflush(stdout);
  std::_Exit(0);
}
