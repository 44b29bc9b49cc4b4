// What the simulated devices must answer: memory, mappings, sharing, pools, and what is refused.
// Streams and what happens under way are in test_host_streams.cpp.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "driver/host/host_driver.hpp"

using namespace ringmem;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;
constexpr std::size_t granule = 2 * MiB;

HostConfig small(int devices = 1) {
  HostConfig config;
  config.devices = devices;
  config.capacity = 64 * MiB;
  return config;
}

std::size_t free_bytes(Driver& driver, int device = 0) {
  MemoryInfo info;
  CHECK_OK(driver.memory_info(device, &info));
  return info.free;
}

unsigned char* bytes(DevicePtr ptr) { return reinterpret_cast<unsigned char*>(ptr); }

PhysicalProps on_device(int device = 0, bool shareable = false) {
  PhysicalProps props;
  props.location = {LocationKind::device, device};
  props.shareable = shareable;
  return props;
}

AccessGrant grant(int device, Access access = Access::readwrite) {
  return {{LocationKind::device, device}, access};
}

// Resident bytes of this process: all, or only those of shared files such as ours (a sanitizer's
// shadow is not among them).
std::size_t resident(const char* what = "VmRSS:") {
  std::ifstream file("/proc/self/status");
  std::string word;
  std::size_t kib = 0;
  while (file >> word) {
    if (word == what && file >> kib) break;
  }
  return kib * 1024;
}

// A range of one handle, mapped for device 0.
struct Mapped {
  explicit Mapped(Driver& d, std::size_t nbytes = granule, int device = 0)
      : driver(d), size(nbytes) {
    CHECK_OK(driver.address_reserve(size, 0, 0, &ptr));
    CHECK_OK(driver.mem_create(size, on_device(device), &handle));
    CHECK_OK(driver.mem_map(ptr, size, handle));
    const AccessGrant access = grant(device);
    CHECK_OK(driver.mem_set_access(ptr, size, &access, 1));
  }
  ~Mapped() {
    CHECK_OK(driver.mem_unmap(ptr, size));
    CHECK_OK(driver.mem_release(handle));
    CHECK_OK(driver.address_free(ptr, size));
  }
  Driver& driver;
  std::size_t size;
  DevicePtr ptr = 0;
  PhysicalHandle handle = 0;
};

}  // namespace

TEST(configuration_is_read_from_text) {
  const HostConfig config = parse_host_config(
      "devices=3, capacity=8GiB,latency_s=0.05,peers=0-1+1-2,virtual_memory=0,export=off,strict=1");
  CHECK_EQ(config.devices, 3);
  CHECK_EQ(config.capacity, std::size_t{8} << 30);
  CHECK_EQ(config.latency_s, 0.05);
  CHECK(!config.all_peers);
  CHECK_EQ(config.peers.size(), 2U);
  CHECK(!config.virtual_memory && !config.export_fd && config.strict && config.pools);
  CHECK(parse_host_config("peers=none").peers.empty());
  CHECK(!parse_host_config("peers=none").all_peers);
  CHECK_EQ(parse_host_config("").devices, 1);
}

TEST(bad_configuration_is_refused_by_name) {
  for (const char* text :
       {"devices=0", "devices=x", "devices=33", "capacity=-1", "capacity=lots", "capacity=1",
        "peers=0-5", "peers=0", "pools=maybe", "latency_s=-1", "latency_s=soon", "granularity=3000",
        "colour=red", "devices"}) {
    CHECK_THROWS((void)parse_host_config(text), InvalidValue);
  }
  try {
    (void)parse_host_config("capacity=lots");
  } catch (const InvalidValue& error) {
    CHECK(std::strstr(error.what(), "capacity") && std::strstr(error.what(), "lots") &&
          std::strstr(error.what(), "8GiB"));
  }
}

TEST(every_attribute_has_a_value) {
  HostDriver driver(small());
  for (const int number :
       {16, 18, 19, 33, 34, 38, 39,  40,  41,  50,  75,  76,  83,  86,  88, 89,
        91, 95, 99, 100, 101, 102, 103, 110, 113, 115, 119, 122, 124, 134, 141}) {
    int value = -99;
    CHECK_OK(driver.attribute(0, static_cast<Attribute>(number), &value));
    CHECK(value >= 0);
  }
  int value = 0;
  CHECK_EQ(driver.attribute(0, static_cast<Attribute>(9999), &value), Status::invalid_value);
  CHECK_EQ(driver.attribute(1, Attribute::integrated, &value), Status::invalid_device);
}

TEST(identity_is_stable) {
  DeviceInfo a, b;
  CHECK_OK(HostDriver(small(2)).device_info(1, &a));
  CHECK_OK(HostDriver(small(2)).device_info(1, &b));
  CHECK_EQ(a.uuid, b.uuid);
  CHECK_EQ(a.uuid.substr(0, 4), "CPU-");
}

TEST(plain_memory_is_counted_and_runs_out) {
  HostDriver driver(small());
  DevicePtr a = 0, b = 0;
  CHECK_OK(driver.mem_alloc(0, 1000, &a));
  CHECK_EQ(a % 512, 0U);
  CHECK_EQ(free_bytes(driver), 64 * MiB - 1024);
  CHECK_EQ(driver.mem_alloc(0, 64 * MiB, &b), Status::out_of_memory);
  CHECK_EQ(driver.mem_alloc(0, SIZE_MAX, &b), Status::out_of_memory);
  CHECK_EQ(driver.mem_alloc(0, 0, &b), Status::invalid_value);
  CHECK_OK(driver.mem_alloc(0, 63 * MiB, &b));
  std::memset(bytes(b), 7, 63 * MiB);
  CHECK_EQ(driver.mem_free(0, a + 512), Status::invalid_value);
  CHECK_OK(driver.mem_free(0, a));
  CHECK_EQ(driver.mem_free(0, a), Status::invalid_value);
  CHECK_OK(driver.mem_free(0, b));
  int local = 0;
  CHECK_EQ(driver.mem_free(0, reinterpret_cast<DevicePtr>(&local)), Status::invalid_value);
  CHECK_EQ(free_bytes(driver), 64 * MiB);
}

TEST(freed_pages_leave_the_process) {
  HostDriver driver(small());
  const std::size_t before = resident("RssShmem:");
  for (int round = 0; round < 3; ++round) {
    DevicePtr ptr = 0;
    CHECK_OK(driver.mem_alloc(0, 48 * MiB, &ptr));
    std::memset(bytes(ptr), 1, 48 * MiB);
    CHECK(resident("RssShmem:") >= before + 48 * MiB);
    CHECK_OK(driver.mem_free(0, ptr));
  }
  CHECK_EQ(resident("RssShmem:"), before);
}

TEST(a_large_device_costs_nothing_until_touched) {
  HostConfig config;  // 64 GiB
  HostDriver driver(config);
  const std::size_t before = resident();
  std::vector<DevicePtr> blocks(40);
  for (DevicePtr& block : blocks) CHECK_OK(driver.mem_alloc(0, std::size_t{1} << 30, &block));
  CHECK(resident() < before + 100 * MiB);
  for (const DevicePtr block : blocks) CHECK_OK(driver.mem_free(0, block));
  for (DevicePtr& block : blocks)
    CHECK_OK(driver.mem_alloc_async(0, std::size_t{1} << 30, default_stream, &block));
  CHECK(resident() < before + 100 * MiB);
  for (const DevicePtr block : blocks) CHECK_OK(driver.mem_free_async(0, block, default_stream));
}

TEST(pointers_are_known_by_what_they_point_into) {
  HostDriver driver(small(2));
  PointerInfo info;
  DevicePtr ptr = 0;
  CHECK_OK(driver.mem_alloc(1, 4096, &ptr));
  CHECK_OK(driver.pointer_info(1, ptr + 100, &info));
  CHECK_EQ(info.kind, PointerKind::device);
  CHECK_EQ(info.device, 1);
  CHECK_EQ(info.base, ptr);
  CHECK_EQ(info.nbytes, 4096U);
  CHECK_EQ(info.device_ptr, ptr + 100);
  CHECK_EQ(info.host_ptr, ptr + 100);
  CHECK_OK(driver.pointer_info(0, ptr, &info));
  CHECK_EQ(info.device_ptr, 0U);  // no peer access yet
  CHECK_OK(driver.peer_enable(0, 1));
  CHECK_OK(driver.pointer_info(0, ptr, &info));
  CHECK_EQ(info.device_ptr, ptr);
  int local = 0;
  CHECK_OK(driver.pointer_info(0, reinterpret_cast<DevicePtr>(&local), &info));
  CHECK_EQ(info.kind, PointerKind::unregistered);
  CHECK_EQ(info.device, -1);
  CHECK_EQ(info.base, 0U);
  void* pinned = nullptr;
  CHECK_OK(driver.host_alloc(0, 100, {}, &pinned));
  CHECK_OK(driver.pointer_info(0, reinterpret_cast<DevicePtr>(pinned), &info));
  CHECK_EQ(info.kind, PointerKind::pinned);
  CHECK_EQ(info.nbytes, 100U);
  DevicePtr managed = 0;
  CHECK_OK(driver.managed_alloc(0, 100, ManagedAttach::global, &managed));
  CHECK_OK(driver.pointer_info(0, managed + 99, &info));
  CHECK_EQ(info.kind, PointerKind::managed);
  CHECK_EQ(info.host_ptr, managed + 99);
  CHECK_OK(driver.mem_alloc_async(0, 700, default_stream, &ptr));
  CHECK_OK(driver.pointer_info(0, ptr + 1, &info));
  CHECK_EQ(info.base, ptr);
  CHECK_EQ(info.nbytes, 1024U);
}

TEST(strict_devices_hide_their_memory_from_the_host) {
  HostConfig config = small();
  config.strict = true;
  HostDriver driver(config);
  DevicePtr ptr = 0;
  PointerInfo info;
  CHECK_OK(driver.mem_alloc(0, 4096, &ptr));
  CHECK_OK(driver.pointer_info(0, ptr, &info));
  CHECK_EQ(info.host_ptr, 0U);
  CHECK_EQ(info.device_ptr, ptr);
}

TEST(registered_memory_is_tracked) {
  HostDriver driver(small());
  std::vector<unsigned char> memory(3 * 4096);
  void* ptr = memory.data();
  DevicePtr device_ptr = 0;
  CHECK_EQ(driver.host_unregister(0, ptr), Status::host_memory_not_registered);
  CHECK_EQ(driver.host_device_pointer(0, ptr, &device_ptr), Status::invalid_value);
  CHECK_OK(driver.host_register(0, ptr, memory.size(), {}));
  CHECK_EQ(driver.host_register(0, ptr, memory.size(), {}),
           Status::host_memory_already_registered);
  CHECK_EQ(driver.host_register(0, memory.data() + 4096, 10, {}),
           Status::host_memory_already_registered);
  CHECK_OK(driver.host_device_pointer(0, memory.data() + 5, &device_ptr));
  CHECK_EQ(device_ptr, reinterpret_cast<DevicePtr>(memory.data() + 5));
  CHECK_OK(driver.host_unregister(0, ptr));
  CHECK_EQ(driver.host_unregister(0, ptr), Status::host_memory_not_registered);
  CHECK_EQ(driver.host_register(0, reinterpret_cast<void*>(4096), 4096, {}), Status::invalid_value);
  CHECK_EQ(driver.host_register(0, ptr, 0, {}), Status::invalid_value);
  void* pinned = nullptr;
  CHECK_OK(driver.host_alloc(0, 4096, {}, &pinned));
  CHECK_EQ(driver.host_register(0, pinned, 4096, {}), Status::host_memory_already_registered);
  CHECK_EQ(driver.host_free(0, ptr), Status::invalid_value);
  CHECK_OK(driver.host_free(0, pinned));
  CHECK_EQ(driver.host_free(0, pinned), Status::invalid_value);
}

TEST(mapping_wants_whole_handles_and_exact_ranges) {
  HostDriver driver(small());
  DevicePtr ptr = 0;
  PhysicalHandle handle = 0;
  CHECK_EQ(driver.address_reserve(4096, 0, 0, &ptr), Status::invalid_value);
  CHECK_EQ(driver.address_reserve(granule, 3, 0, &ptr), Status::invalid_value);
  CHECK_OK(driver.address_reserve(4 * granule, 0, 0, &ptr));
  CHECK_EQ(driver.mem_create(4096, on_device(), &handle), Status::invalid_value);
  CHECK_EQ(driver.mem_create(granule, on_device(7), &handle), Status::invalid_device);
  CHECK_EQ(driver.mem_create(65 * MiB + MiB, on_device(), &handle), Status::out_of_memory);
  CHECK_OK(driver.mem_create(2 * granule, on_device(), &handle));
  CHECK_EQ(driver.mem_map(ptr, granule, handle), Status::invalid_value);
  CHECK_EQ(driver.mem_map(ptr + 4096, 2 * granule, handle), Status::invalid_value);
  CHECK_EQ(driver.mem_map(ptr + 3 * granule, 2 * granule, handle), Status::invalid_value);
  CHECK_OK(driver.mem_map(ptr, 2 * granule, handle));
  CHECK_EQ(driver.mem_map(ptr + granule, 2 * granule, handle), Status::invalid_value);
  CHECK_OK(driver.mem_map(ptr + 2 * granule, 2 * granule, handle));
  CHECK_EQ(free_bytes(driver), 64 * MiB - 2 * granule);
  const AccessGrant access = grant(0);
  CHECK_EQ(driver.mem_set_access(ptr, granule, &access, 1), Status::invalid_value);
  CHECK_OK(driver.mem_set_access(ptr, 4 * granule, &access, 1));
  bytes(ptr)[5] = 42;  // one handle at two addresses
  CHECK_EQ(int{bytes(ptr + 2 * granule)[5]}, 42);
  CHECK_EQ(driver.mem_unmap(ptr, granule), Status::invalid_value);
  CHECK_EQ(driver.mem_unmap(ptr, 3 * granule), Status::invalid_value);
  CHECK_EQ(driver.address_free(ptr, 4 * granule), Status::invalid_value);
  CHECK_OK(driver.mem_release(handle));
  CHECK_EQ(driver.mem_release(handle), Status::invalid_value);
  CHECK_EQ(int{bytes(ptr)[5]}, 42);  // lives as long as it is mapped
  CHECK_EQ(free_bytes(driver), 64 * MiB - 2 * granule);
  PhysicalHandle same = 0;
  CHECK_OK(driver.mem_retain(ptr + 10, &same));
  CHECK_EQ(same, handle);
  CHECK_OK(driver.mem_release(same));
  CHECK_OK(driver.mem_unmap(ptr, 4 * granule));
  CHECK_EQ(free_bytes(driver), 64 * MiB);
  CHECK_EQ(driver.mem_unmap(ptr, 4 * granule), Status::invalid_value);
  CHECK_EQ(driver.mem_retain(ptr, &same), Status::invalid_value);
  CHECK_EQ(driver.address_free(ptr, granule), Status::invalid_value);
  CHECK_OK(driver.address_free(ptr, 4 * granule));
  CHECK_EQ(driver.address_free(ptr, 4 * granule), Status::invalid_value);
}

TEST(access_belongs_to_a_mapping_and_a_device) {
  HostDriver driver(small(2));
  Mapped mapped(driver);
  Access access = Access::none;
  CHECK_OK(driver.mem_get_access(mapped.ptr, {LocationKind::device, 0}, &access));
  CHECK_EQ(access, Access::readwrite);
  CHECK_OK(driver.mem_get_access(mapped.ptr, {LocationKind::device, 1}, &access));
  CHECK_EQ(access, Access::none);
  const AccessGrant grants[] = {grant(1, Access::read), grant(0, Access::none)};
  CHECK_OK(driver.mem_set_access(mapped.ptr, granule, grants, 2));
  CHECK_OK(driver.check_access(1, mapped.ptr, granule, false));
  CHECK_EQ(driver.check_access(1, mapped.ptr, granule, true), Status::illegal_address);
  CHECK_EQ(driver.check_access(0, mapped.ptr, granule, false), Status::illegal_address);
  CHECK_EQ(driver.mem_get_access(0x1000, {LocationKind::device, 1}, &access),
           Status::invalid_value);
}

TEST(access_needs_a_connection) {
  HostConfig config = small(2);
  config.all_peers = false;
  HostDriver driver(config);
  Mapped mapped(driver);
  const AccessGrant other = grant(1);
  CHECK_EQ(driver.mem_set_access(mapped.ptr, granule, &other, 1), Status::invalid_device);
  bool can = true;
  CHECK_OK(driver.peer_can_access(0, 1, &can));
  CHECK(!can);
  CHECK_EQ(driver.peer_enable(0, 1), Status::peer_access_unsupported);
}

TEST(new_physical_memory_is_zero_also_when_recycled) {
  HostDriver driver(small());
  for (int round = 0; round < 2; ++round) {
    Mapped mapped(driver, 4 * granule);
    CHECK_EQ(int{bytes(mapped.ptr)[0]}, 0);
    CHECK_EQ(int{bytes(mapped.ptr)[4 * granule - 1]}, 0);
    std::memset(bytes(mapped.ptr), 9, 4 * granule);
  }
}

TEST(mappings_run_out_before_the_kernel_says_so) {
  HostConfig config = small();
  config.capacity = std::size_t{1} << 40;
  config.max_mappings = 40;
  HostDriver driver(config);
  DevicePtr ptr = 0;
  constexpr std::size_t count = 64;
  CHECK_OK(driver.address_reserve(2 * count * granule, 0, 0, &ptr));
  const AccessGrant access = grant(0);
  std::vector<PhysicalHandle> handles;
  Status status = Status::success;
  while (ok(status) && handles.size() < count) {  // every other granule: gaps count too
    PhysicalHandle handle = 0;
    CHECK_OK(driver.mem_create(granule, on_device(), &handle));
    const DevicePtr at = ptr + 2 * handles.size() * granule;
    status = driver.mem_map(at, granule, handle);
    if (ok(status)) {
      CHECK_OK(driver.mem_set_access(at, granule, &access, 1));
      handles.push_back(handle);
    } else {
      CHECK_OK(driver.mem_release(handle));
    }
  }
  CHECK_EQ(status, Status::out_of_memory);
  CHECK(handles.size() >= 15 && handles.size() <= 20);
  for (std::size_t i = 0; i < handles.size(); ++i) {
    CHECK_OK(driver.mem_unmap(ptr + 2 * i * granule, granule));
    CHECK_OK(driver.mem_release(handles[i]));
  }
  CHECK_OK(driver.address_free(ptr, 2 * count * granule));
  CHECK_EQ(free_bytes(driver), config.capacity);
  CHECK_OK(driver.address_reserve(granule, 0, 0, &ptr));  // the count came back
}

TEST(the_kernels_own_limit_of_mappings_is_never_hit) {
  HostConfig config = small();
  config.capacity = std::size_t{1} << 40;
  HostDriver driver(config);
  constexpr std::size_t count = 70000;  // more than a kernel allows by default
  const AccessGrant access = grant(0);
  DevicePtr ptr = 0;
  PhysicalHandle handle = 0;
  CHECK_OK(driver.address_reserve(2 * count * granule, 0, 0, &ptr));
  CHECK_OK(driver.mem_create(granule, on_device(), &handle));
  std::size_t mapped = 0;
  Status status = Status::success;
  for (; mapped < count; ++mapped) {
    const DevicePtr at = ptr + 2 * mapped * granule;
    if (status = driver.mem_map(at, granule, handle); !ok(status)) break;
    if (status = driver.mem_set_access(at, granule, &access, 1); !ok(status)) break;
  }
  std::size_t limit = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> limit;
  if (limit < 2 * count) CHECK_EQ(status, Status::out_of_memory);
  CHECK(mapped > 1000);
  std::vector<std::unique_ptr<unsigned char[]>> others(1000);  // the rest of the process lives on
  for (auto& other : others) other = std::make_unique<unsigned char[]>(1 << 18);
  for (std::size_t i = 0; i < mapped; ++i)
    CHECK_OK(driver.mem_unmap(ptr + 2 * i * granule, granule));
  CHECK_OK(driver.mem_release(handle));
  CHECK_OK(driver.address_free(ptr, 2 * count * granule));
  CHECK_EQ(free_bytes(driver), config.capacity);
}

TEST(descriptors_run_out_as_memory_does) {
  HostDriver driver(small());
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{32, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<PhysicalHandle> handles;
  PhysicalHandle handle = 0;
  Status status = Status::success;
  while (ok(status) && handles.size() < 40) {
    status = driver.mem_create(MiB * 2, on_device(0, true), &handle);
    if (ok(status)) handles.push_back(handle);
  }
  CHECK_EQ(status, Status::out_of_memory);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK_EQ(free_bytes(driver), 64 * MiB - handles.size() * granule);  // what failed is undone
  for (const PhysicalHandle one : handles) CHECK_OK(driver.mem_release(one));
}

TEST(handles_travel_as_descriptors) {
  HostDriver driver(small());
  PhysicalHandle handle = 0, again = 0;
  int fd = -1;
  CHECK_OK(driver.mem_create(granule, on_device(), &handle));
  CHECK_EQ(driver.mem_export(handle, &fd), Status::invalid_value);  // not made shareable
  CHECK_OK(driver.mem_release(handle));
  CHECK_OK(driver.mem_create(granule, on_device(0, true), &handle));
  CHECK_OK(driver.mem_export(handle, &fd));
  CHECK_OK(driver.mem_import(fd, &again));
  CHECK_EQ(free_bytes(driver), 64 * MiB - granule);  // counted once
  HostDriver other(small());
  PhysicalHandle abroad = 0;
  CHECK_OK(other.mem_import(fd, &abroad));
  CHECK_EQ(free_bytes(other), 64 * MiB - granule);
  DevicePtr here = 0, there = 0;
  const AccessGrant access = grant(0);
  CHECK_OK(driver.address_reserve(granule, 0, 0, &here));
  CHECK_OK(driver.mem_map(here, granule, handle));
  CHECK_OK(driver.mem_set_access(here, granule, &access, 1));
  CHECK_OK(other.address_reserve(granule, 0, 0, &there));
  CHECK_OK(other.mem_map(there, granule, abroad));
  CHECK_OK(other.mem_set_access(there, granule, &access, 1));
  bytes(here)[77] = 5;
  CHECK_EQ(int{bytes(there)[77]}, 5);
  CHECK_OK(driver.mem_release(handle));
  CHECK_OK(driver.mem_release(again));
  CHECK_OK(driver.mem_unmap(here, granule));
  CHECK_EQ(free_bytes(driver), 64 * MiB);
  close(fd);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK_EQ(driver.mem_import(ends[0], &handle), Status::invalid_value);
  CHECK_EQ(driver.mem_import(-1, &handle), Status::invalid_value);
  const int stranger = memfd_create("stranger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK_EQ(ftruncate(stranger, granule), 0);
  CHECK_EQ(driver.mem_import(stranger, &handle), Status::invalid_value);
  for (const int one : {ends[0], ends[1], stranger}) close(one);
}

TEST(capabilities_can_be_switched_off) {
  HostDriver driver(parse_host_config(
      "virtual_memory=0,export=0,pools=0,managed=0,stream_mem_ops=0,host_register=0,host_numa=0"));
  PhysicalHandle handle = 0;
  DevicePtr ptr = 0;
  std::size_t size = 0;
  PoolHandle pool = 0;
  int value = 0;
  CHECK_EQ(driver.mem_create(granule, on_device(), &handle), Status::not_supported);
  CHECK_EQ(driver.address_reserve(granule, 0, 0, &ptr), Status::not_supported);
  CHECK_EQ(driver.granularity(on_device(), false, &size), Status::not_supported);
  CHECK_EQ(driver.mem_alloc_async(0, 10, default_stream, &ptr), Status::not_supported);
  CHECK_EQ(driver.pool_default(0, &pool), Status::not_supported);
  CHECK_EQ(driver.managed_alloc(0, 10, ManagedAttach::global, &ptr), Status::not_supported);
  CHECK_EQ(driver.host_register(0, &value, 4, {}), Status::not_supported);
  CHECK_EQ(driver.stream_write_value(0, default_stream, 0, 1), Status::not_supported);
  CHECK_OK(driver.attribute(0, Attribute::virtual_memory_management, &value));
  CHECK_EQ(value, 0);
  CHECK_OK(driver.mem_alloc(0, 10, &ptr));
}

TEST(host_memory_can_be_mapped_too) {
  HostDriver driver(small());
  PhysicalProps props;
  props.location = {LocationKind::host_numa, 0};
  PhysicalHandle handle = 0;
  CHECK_OK(driver.mem_create(granule, props, &handle));
  CHECK_EQ(free_bytes(driver), 64 * MiB);  // not the device's
  DevicePtr ptr = 0;
  CHECK_OK(driver.address_reserve(granule, 0, 0, &ptr));
  CHECK_OK(driver.mem_map(ptr, granule, handle));
  const AccessGrant grants[] = {grant(0), {{LocationKind::host_numa, 0}, Access::readwrite}};
  CHECK_OK(driver.mem_set_access(ptr, granule, grants, 2));
  bytes(ptr)[0] = 1;
  props.location.kind = LocationKind::host;
  CHECK_EQ(driver.mem_create(granule, props, &handle), Status::invalid_value);
}

TEST(advice_and_prefetch_check_range_and_place) {
  HostDriver driver(small());
  DevicePtr ptr = 0, plain = 0;
  CHECK_OK(driver.managed_alloc(0, 8192, ManagedAttach::global, &ptr));
  CHECK_OK(driver.mem_alloc(0, 8192, &plain));
  const Location here{LocationKind::device, 0}, nowhere{LocationKind::device, 9};
  const Location host{LocationKind::host, 0};
  CHECK_OK(driver.prefetch(0, ptr, 8192, here, default_stream));
  CHECK_OK(driver.prefetch(0, ptr + 4096, 4096, host, default_stream));
  CHECK_EQ(driver.prefetch(0, ptr, 8193, here, default_stream), Status::invalid_value);
  CHECK_EQ(driver.prefetch(0, ptr, 0, here, default_stream), Status::invalid_value);
  CHECK_EQ(driver.prefetch(0, plain, 8192, here, default_stream), Status::invalid_value);
  CHECK_EQ(driver.prefetch(0, ptr, 8192, nowhere, default_stream), Status::invalid_device);
  CHECK_OK(driver.advise(0, ptr, 8192, Advice::set_read_mostly, nowhere));
  CHECK_OK(driver.advise(0, ptr, 8192, Advice::set_preferred_location, host));
  CHECK_EQ(driver.advise(0, ptr, 8192, Advice::set_accessed_by, nowhere), Status::invalid_device);
  CHECK_EQ(driver.advise(0, plain, 10, Advice::set_read_mostly, here), Status::invalid_value);
  std::memset(bytes(ptr), 1, 8192);
  CHECK_OK(driver.discard(0, ptr, 8192, default_stream));
  CHECK_OK(driver.stream_synchronize(0, default_stream));
  CHECK(bytes(ptr)[0] != 1 && bytes(ptr)[8191] != 1);
  CHECK_EQ(driver.stream_attach(0, default_stream, ptr, 0, ManagedAttach::single),
           Status::invalid_value);
  CHECK_EQ(driver.stream_attach(0, default_stream, ptr, 10, ManagedAttach::global),
           Status::invalid_value);
  CHECK_OK(driver.stream_attach(0, default_stream, ptr, 0, ManagedAttach::global));
  CHECK_OK(driver.mem_free(0, ptr));
}

TEST(a_child_of_the_process_can_do_nothing_and_harms_nothing) {
  auto driver = std::make_unique<HostDriver>(small());
  DevicePtr ptr = 0;
  CHECK_OK(driver->mem_alloc(0, MiB, &ptr));
  std::memset(bytes(ptr), 3, MiB);
  const pid_t child = fork();
  if (child == 0) {
    DevicePtr other = 0;
    bool good = driver->mem_alloc(0, 10, &other) == Status::not_initialized;
    good &= driver->mem_free(0, ptr) == Status::not_initialized;
    driver.reset();
    _exit(good ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(int{bytes(ptr)[0]}, 3);
  CHECK_EQ(int{bytes(ptr)[MiB - 1]}, 3);
  CHECK_OK(driver->mem_free(0, ptr));
}

TEST_MAIN()
