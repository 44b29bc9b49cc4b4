#include "driver/cuda/cuda_library.hpp"

#include <dlfcn.h>

#include <cstdlib>

#include "driver/fork.hpp"

namespace ringmem {
namespace {

// cuGetProcAddress of a loaded library, in the form that it has.
class Resolver {
 public:
  explicit Resolver(void* library)
      : with_result_(reinterpret_cast<PFN_cuGetProcAddress_v12000>(
            dlsym(library, "cuGetProcAddress_v2"))),
        plain_(reinterpret_cast<PFN_cuGetProcAddress_v11030>(dlsym(library, "cuGetProcAddress"))) {}

  bool usable() const noexcept { return with_result_ || plain_; }

  template <class Function>
  void find(Function& function, const char* symbol, int version) const {
    // The variants for the legacy default stream, whatever the process was compiled for.
    constexpr cuuint64_t flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    void* address = nullptr;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
    const CUresult result = with_result_
                                ? with_result_(symbol, &address, version, flags, &found)
                                : plain_(symbol, &address, version, flags);
    if (result == CUDA_SUCCESS && found == CU_GET_PROC_ADDRESS_SUCCESS) {
      function = reinterpret_cast<Function>(address);
    }
  }

 private:
  PFN_cuGetProcAddress_v12000 with_result_;
  PFN_cuGetProcAddress_v11030 plain_;
};

CudaFunctions resolve(const Resolver& resolver) {
  CudaFunctions functions;
#define RINGMEM_FIND(name, version) resolver.find(functions.name, "cu" #name, version);
#define RINGMEM_FIND_PAIR(name, version, older)           \
  resolver.find(functions.name, "cu" #name, version);     \
  resolver.find(functions.name##Old, "cu" #name, older);
  RINGMEM_CUDA_FUNCTIONS(RINGMEM_FIND)
  RINGMEM_CUDA_FUNCTION_PAIRS(RINGMEM_FIND_PAIR)
#undef RINGMEM_FIND
#undef RINGMEM_FIND_PAIR
  return functions;
}

std::string failed(const char* call, CUresult result) {
  const auto status = static_cast<Status>(result);
  // Of a driver that another library had used before the fork.
  const bool forked = status == Status::not_initialized && fork_generation() != 0;
  return std::string(call) + " failed: " + status_name(status) + " (" +
         std::to_string(static_cast<int>(result)) + "): " +
         (forked ? fork_explanation : status_description(status));
}

std::string too_old(int version) {
  return "the driver supports CUDA " + std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10) +
         ", and ringmem needs one for CUDA 12.0 or newer (NVIDIA driver 525 or newer)";
}

// Fills in everything but path and error; the error is the result.
std::string initialize(CudaLibrary& library, void* handle) {
  const Resolver resolver(handle);
  CudaFunctions& cu = library.functions;
  if (resolver.usable()) {
    cu = resolve(resolver);
  } else {  // before 11.3
    cu.DriverGetVersion =
        reinterpret_cast<PFN_cuDriverGetVersion_v2020>(dlsym(handle, "cuDriverGetVersion"));
  }
  if (!cu.DriverGetVersion) return library.path + " is no CUDA driver library";
  if (CUresult r = cu.DriverGetVersion(&library.version)) return failed("cuDriverGetVersion", r);
  if (library.version < oldest_cuda_driver) return too_old(library.version);

  if (!cu.Init || !cu.DeviceGetCount || !cu.DeviceGet || !cu.CtxGetCurrent || !cu.CtxPushCurrent ||
      !cu.CtxPopCurrent || !cu.DevicePrimaryCtxRetain || !cu.DevicePrimaryCtxRelease) {
    return library.path + " lacks functions that every CUDA driver has";
  }
  if (CUresult r = cu.Init(0)) return failed("cuInit", r);
  int count = 0;
  if (CUresult r = cu.DeviceGetCount(&count)) return failed("cuDeviceGetCount", r);
  if (count == 0) return "there is no CUDA device";
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    if (CUresult r = cu.DeviceGet(&device, ordinal)) return failed("cuDeviceGet", r);
    library.devices.push_back(device);
  }
  return {};
}

}  // namespace

CudaLibrary load_cuda_library() {
  CudaLibrary library;
  const char* wanted = std::getenv("RINGMEM_CUDA_LIBRARY");
  library.path = wanted && *wanted ? wanted : "libcuda.so.1";
  // Never closed: the driver's threads and handlers outlive any user.
  void* handle = dlopen(library.path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle) {
    library.error = initialize(library, handle);
  } else {
    const char* reason = dlerror();
    library.error = "the CUDA driver library could not be loaded: " +
                    std::string(reason ? reason : library.path.c_str());
  }
  return library;
}

}  // namespace ringmem
