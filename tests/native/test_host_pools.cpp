// The driver's own pools on simulated devices: reuse in stream order, what is held and given back,
// access and sharing.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "driver/host/host_driver.hpp"

using namespace ringmem;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

HostConfig small(int devices = 1) {
  HostConfig config;
  config.devices = devices;
  config.capacity = 64 * MiB;
  return config;
}

unsigned char* bytes(DevicePtr ptr) { return reinterpret_cast<unsigned char*>(ptr); }

struct Fixture {
  explicit Fixture(const HostConfig& config = small()) : driver(config) {
    CHECK_OK(driver.stream_create(0, {}, &a));
    CHECK_OK(driver.stream_create(0, {}, &b));
    void* ptr = nullptr;
    CHECK_OK(driver.host_alloc(0, 4096, {}, &ptr));
    word = reinterpret_cast<DevicePtr>(ptr);
  }
  void hold(StreamHandle stream) { CHECK_OK(driver.stream_wait_value(0, stream, word, 1)); }
  void let_go() {
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(word)).store(1);
  }
  DevicePtr allocate(std::size_t nbytes, StreamHandle stream) {
    DevicePtr ptr = 0;
    CHECK_OK(driver.mem_alloc_async(0, nbytes, stream, &ptr));
    return ptr;
  }
  std::uint64_t get(PoolAttribute attribute, PoolHandle pool = 0) {
    std::uint64_t value = 0;
    if (pool == 0) CHECK_OK(driver.pool_default(0, &pool));
    CHECK_OK(driver.pool_get(0, pool, attribute, &value));
    return value;
  }
  std::size_t free_bytes() {
    MemoryInfo info;
    CHECK_OK(driver.memory_info(0, &info));
    return info.free;
  }
  HostDriver driver;
  StreamHandle a = 0, b = 0;
  DevicePtr word = 0;
};

}  // namespace

TEST(a_block_is_reusable_at_once_on_its_own_stream_only) {
  Fixture f;
  const DevicePtr first = f.allocate(MiB, f.a);
  f.hold(f.a);
  CHECK_OK(f.driver.mem_free_async(0, first, f.a));
  CHECK(f.allocate(MiB, f.b) != first);  // a has not passed the free yet
  CHECK_EQ(f.allocate(MiB, f.a), first);
  CHECK_OK(f.driver.mem_free_async(0, first, f.a));
  f.let_go();
  CHECK_OK(f.driver.stream_synchronize(0, f.a));
  CHECK_EQ(f.allocate(MiB, f.b), first);
}

TEST(a_double_or_foreign_free_is_refused) {
  Fixture f;
  const DevicePtr ptr = f.allocate(1000, f.a);
  CHECK_EQ(f.driver.mem_free_async(0, ptr + 512, f.a), Status::invalid_value);
  CHECK_OK(f.driver.mem_free_async(0, ptr, f.a));
  CHECK_EQ(f.driver.mem_free_async(0, ptr, f.a), Status::invalid_value);
  CHECK_EQ(f.driver.mem_free_async(0, 0x1000, f.a), Status::invalid_value);
  DevicePtr none = 0;
  CHECK_EQ(f.driver.mem_alloc_async(0, 0, f.a, &none), Status::invalid_value);
  CHECK_EQ(f.driver.mem_alloc_async(0, SIZE_MAX, f.a, &none), Status::out_of_memory);
  CHECK_EQ(f.driver.mem_alloc_async(0, 8, 12345, &none), Status::invalid_handle);
}

TEST(plain_and_pool_memory_can_be_freed_either_way) {
  Fixture f;
  DevicePtr plain = 0;
  CHECK_OK(f.driver.mem_alloc(0, MiB, &plain));
  CHECK_OK(f.driver.mem_free_async(0, plain, f.a));
  CHECK_EQ(f.driver.mem_free_async(0, plain, f.a), Status::invalid_value);
  CHECK_OK(f.driver.mem_free(0, f.allocate(MiB, f.a)));
  CHECK_OK(f.driver.synchronize(0));
  CHECK_EQ(f.free_bytes(), 64 * MiB);
}

TEST(memory_goes_back_at_the_next_synchronization_unless_the_threshold_says_otherwise) {
  Fixture f;
  const DevicePtr ptr = f.allocate(10 * MiB, f.a);
  CHECK_EQ(f.get(PoolAttribute::reserved_current), 32 * MiB);
  CHECK_OK(f.driver.mem_free_async(0, ptr, f.a));
  CHECK_EQ(f.get(PoolAttribute::reserved_current), 32 * MiB);
  CHECK_OK(f.driver.stream_synchronize(0, f.a));
  CHECK_EQ(f.get(PoolAttribute::reserved_current), 0U);
  PoolHandle pool = 0;
  CHECK_OK(f.driver.pool_default(0, &pool));
  CHECK_OK(f.driver.pool_set(0, pool, PoolAttribute::release_threshold, 16 * MiB));
  CHECK_OK(f.driver.mem_free_async(0, f.allocate(10 * MiB, f.a), f.a));
  CHECK_OK(f.driver.stream_synchronize(0, f.a));
  CHECK_EQ(f.get(PoolAttribute::reserved_current), 16 * MiB);
  CHECK_OK(f.driver.pool_trim(0, pool, 4 * MiB));
  CHECK_EQ(f.get(PoolAttribute::reserved_current), 4 * MiB);
  CHECK_OK(f.driver.pool_trim(0, pool, 0));
  CHECK_EQ(f.free_bytes(), 64 * MiB);
}

TEST(what_is_in_use_is_never_given_back) {
  Fixture f;
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(f.allocate(MiB, f.a));
  for (std::size_t i = 0; i < blocks.size(); ++i) std::memset(bytes(blocks[i]), int(i + 1), MiB);
  for (std::size_t i = 0; i < blocks.size(); i += 2)
    CHECK_OK(f.driver.mem_free_async(0, blocks[i], f.a));
  CHECK_OK(f.driver.synchronize(0));
  for (std::size_t i = 1; i < blocks.size(); i += 2) {
    CHECK_EQ(int{bytes(blocks[i])[0]}, int(i + 1));
    CHECK_EQ(int{bytes(blocks[i])[MiB - 1]}, int(i + 1));
    CHECK_OK(f.driver.check_access(0, blocks[i], MiB, true));
    CHECK_OK(f.driver.mem_free_async(0, blocks[i], f.a));
  }
  CHECK_OK(f.driver.synchronize(0));
  CHECK_EQ(f.free_bytes(), 64 * MiB);
}

TEST(high_water_marks_are_reset_by_zero_only) {
  Fixture f;
  PoolHandle pool = 0;
  CHECK_OK(f.driver.pool_default(0, &pool));
  const DevicePtr ptr = f.allocate(3 * MiB, f.a), small_one = f.allocate(512, f.a);
  CHECK_OK(f.driver.mem_free_async(0, ptr, f.a));
  CHECK_EQ(f.get(PoolAttribute::used_current), 512U);
  CHECK_EQ(f.get(PoolAttribute::used_high), 3 * MiB + 512);
  CHECK_EQ(f.driver.pool_set(0, pool, PoolAttribute::used_high, 1), Status::invalid_value);
  CHECK_EQ(f.driver.pool_set(0, pool, PoolAttribute::used_current, 0), Status::invalid_value);
  CHECK_OK(f.driver.pool_set(0, pool, PoolAttribute::used_high, 0));
  CHECK_EQ(f.get(PoolAttribute::used_high), 512U);
  CHECK_OK(f.driver.mem_free_async(0, small_one, f.a));
  CHECK_OK(f.driver.synchronize(0));
  CHECK_EQ(f.get(PoolAttribute::reserved_high), 32 * MiB);
  CHECK_OK(f.driver.pool_set(0, pool, PoolAttribute::reserved_high, 0));
  CHECK_EQ(f.get(PoolAttribute::reserved_high), 0U);
}

TEST(fragments_do_not_cost_capacity) {
  Fixture f;  // 64 MiB
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(f.allocate(4 * MiB, f.a));
  DevicePtr none = 0;
  CHECK_EQ(f.driver.mem_alloc_async(0, 512, f.a, &none), Status::out_of_memory);
  for (std::size_t i = 0; i < blocks.size(); i += 2)
    CHECK_OK(f.driver.mem_free_async(0, blocks[i], f.a));
  const DevicePtr large = f.allocate(32 * MiB, f.a);  // eight holes of 4 MiB
  CHECK_OK(f.driver.check_access(0, large, 32 * MiB, true));
}

TEST(the_last_resort_is_to_wait_for_another_stream) {
  Fixture f;
  const DevicePtr all = f.allocate(64 * MiB, f.a);
  f.hold(f.a);
  CHECK_OK(f.driver.mem_free_async(0, all, f.a));
  const DevicePtr ptr = f.allocate(64 * MiB, f.b);
  CHECK_EQ(f.driver.stream_query(0, f.b), Status::not_ready);  // b waits for a's free now
  f.let_go();
  CHECK_OK(f.driver.stream_synchronize(0, f.b));
  CHECK_EQ(ptr, all);
}

TEST(pools_have_limits_defaults_and_a_life_after_their_handle) {
  Fixture f;
  PoolHandle pool = 0, standard = 0, current = 0;
  PoolProps props;
  props.max_size = 8 * MiB;
  CHECK_OK(f.driver.pool_create(0, props, &pool));
  CHECK_OK(f.driver.pool_default(0, &standard));
  CHECK_EQ(f.driver.pool_destroy(0, standard), Status::invalid_value);
  DevicePtr ptr = 0, none = 0;
  CHECK_OK(f.driver.pool_alloc_async(0, pool, 6 * MiB, f.a, &ptr));
  CHECK_EQ(f.driver.pool_alloc_async(0, pool, 6 * MiB, f.a, &none), Status::out_of_memory);
  CHECK_OK(f.driver.pool_set_current(0, pool));
  CHECK_OK(f.driver.pool_current(0, &current));
  CHECK_EQ(current, pool);
  CHECK_EQ(f.driver.mem_alloc_async(0, 6 * MiB, f.a, &none), Status::out_of_memory);
  CHECK_OK(f.driver.pool_destroy(0, pool));
  CHECK_EQ(f.driver.pool_destroy(0, pool), Status::invalid_value);
  CHECK_OK(f.driver.pool_current(0, &current));
  CHECK_EQ(current, standard);
  std::memset(bytes(ptr), 1, 6 * MiB);  // blocks outlive the handle
  CHECK_OK(f.driver.fill_async(0, ptr, 2, 1, 6 * MiB, f.a));
  CHECK_OK(f.driver.stream_synchronize(0, f.a));
  CHECK_EQ(f.free_bytes(), 58 * MiB);
  CHECK_OK(f.driver.mem_free_async(0, ptr, f.a));
  CHECK_EQ(f.free_bytes(), 64 * MiB);
}

TEST(peers_reach_a_pool_when_it_lets_them) {
  Fixture f(small(2));
  PoolHandle pool = 0;
  CHECK_OK(f.driver.pool_default(0, &pool));
  const DevicePtr ptr = f.allocate(MiB, f.a);
  Access access = Access::none;
  CHECK_OK(f.driver.pool_get_access(0, pool, {LocationKind::device, 1}, &access));
  CHECK_EQ(access, Access::none);
  CHECK_OK(f.driver.peer_enable(1, 0));  // does not concern pools
  CHECK_EQ(f.driver.check_access(1, ptr, MiB, true), Status::illegal_address);
  const AccessGrant grant{{LocationKind::device, 1}, Access::readwrite};
  CHECK_OK(f.driver.pool_set_access(0, pool, &grant, 1));
  CHECK_OK(f.driver.check_access(1, ptr, MiB, true));
  CHECK_OK(f.driver.check_access(1, f.allocate(40 * MiB, f.a), MiB, true));
  const AccessGrant away{{LocationKind::device, 0}, Access::none};
  CHECK_EQ(f.driver.pool_set_access(0, pool, &away, 1), Status::invalid_value);
}

namespace {

void send_fd(int socket, int fd) {
  char byte = 'x', control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  CHECK_EQ(sendmsg(socket, &message, 0), 1);
}

int receive_fd(int socket) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  int fd = -1;
  if (recvmsg(socket, &message, 0) == 1)
    std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
  return fd;
}

// The importing process: a driver of its own, made after the fork.
int importer(int socket) {
  HostDriver driver(small());
  PoolPointerExport exported;
  const int fd = receive_fd(socket);
  if (read(socket, &exported, sizeof exported) != sizeof exported) return 1;
  PoolHandle pool = 0;
  DevicePtr ptr = 0, none = 0;
  if (!ok(driver.pool_import(0, fd, &pool))) return 2;
  if (driver.pool_alloc_async(0, pool, 10, default_stream, &none) != Status::invalid_value)
    return 3;
  if (!ok(driver.pool_import_pointer(0, pool, exported, &ptr))) return 4;
  if (bytes(ptr)[100] != 42) return 5;
  if (!ok(driver.fill_async(0, ptr, 43, 1, 1000, default_stream))) return 6;
  if (!ok(driver.mem_free_async(0, ptr, default_stream))) return 7;
  if (!ok(driver.synchronize(0))) return 8;
  if (ok(driver.check_access(0, ptr, 1, false))) return 9;
  if (!ok(driver.pool_destroy(0, pool))) return 10;
  return 0;
}

}  // namespace

TEST(a_pool_is_shared_between_processes) {
  int sockets[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  const pid_t child = fork();
  if (child == 0) _exit(importer(sockets[1]));
  Fixture f;
  PoolProps props;
  props.shareable = true;
  PoolHandle pool = 0, standard = 0;
  int fd = -1;
  CHECK_OK(f.driver.pool_default(0, &standard));
  CHECK_EQ(f.driver.pool_export(0, standard, &fd), Status::invalid_value);
  CHECK_OK(f.driver.pool_create(0, props, &pool));
  DevicePtr ptr = 0;
  CHECK_OK(f.driver.pool_alloc_async(0, pool, 1000, f.a, &ptr));
  bytes(ptr)[100] = 42;
  CHECK_OK(f.driver.pool_export(0, pool, &fd));
  PoolPointerExport exported;
  CHECK_OK(f.driver.pool_export_pointer(0, ptr, &exported));
  CHECK_EQ(f.driver.pool_export_pointer(0, f.allocate(10, f.a), &exported), Status::invalid_value);
  send_fd(sockets[0], fd);
  CHECK_EQ(write(sockets[0], &exported, sizeof exported), ssize_t{sizeof exported});
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_EQ(int{bytes(ptr)[999]}, 43);
  CHECK_OK(f.driver.mem_free_async(0, ptr, f.a));
  CHECK_OK(f.driver.pool_destroy(0, pool));
  for (const int one : {fd, sockets[0], sockets[1]}) close(one);
}

TEST(random_work_keeps_the_books) {
  Fixture f;
  std::mt19937 random(7);
  struct Live {
    DevicePtr ptr;
    std::size_t nbytes;
    unsigned char mark;
  };
  std::vector<Live> live;
  std::uint64_t used = 0;
  const auto release = [&](std::size_t i, StreamHandle stream) {
    const Live gone = live[i];
    CHECK(bytes(gone.ptr)[0] == gone.mark && bytes(gone.ptr)[gone.nbytes - 1] == gone.mark);
    CHECK_OK(f.driver.mem_free_async(0, gone.ptr, stream));
    used -= (gone.nbytes + 511) / 512 * 512;
    live[i] = live.back();
    live.pop_back();
  };
  for (int step = 0; step < 4000; ++step) {
    const StreamHandle stream = random() % 2 ? f.a : f.b;
    if (random() % 16 == 0) CHECK_OK(f.driver.stream_write_value(0, stream, f.word + 64, 1));
    if (random() % 200 == 0) CHECK_OK(f.driver.stream_synchronize(0, stream));
    if (!live.empty() && random() % 2) {
      release(random() % live.size(), stream);
      continue;
    }
    const std::size_t nbytes = 1 + random() % (random() % 4 ? 5000 : 5 * MiB);
    DevicePtr ptr = 0;
    const Status status = f.driver.mem_alloc_async(0, nbytes, stream, &ptr);
    if (status == Status::out_of_memory) {
      CHECK(used + nbytes > 20 * MiB);
      continue;
    }
    CHECK_OK(status);
    const auto mark = static_cast<unsigned char>(random());
    CHECK_OK(f.driver.stream_synchronize(0, stream));
    bytes(ptr)[0] = bytes(ptr)[nbytes - 1] = mark;
    live.push_back({ptr, nbytes, mark});
    used += (nbytes + 511) / 512 * 512;
    CHECK_EQ(f.get(PoolAttribute::used_current), used);
  }
  while (!live.empty()) release(0, f.a);
  CHECK_OK(f.driver.synchronize(0));
  CHECK_EQ(f.get(PoolAttribute::reserved_current), 0U);
  CHECK_EQ(f.free_bytes(), 64 * MiB);
}

TEST_MAIN()
