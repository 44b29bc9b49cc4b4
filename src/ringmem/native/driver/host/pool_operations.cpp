// HostDriver: the stream-ordered pools. Pool itself is in pool.hpp; here are handles, defaults,
// order and sharing.
#include <algorithm>
#include <cstring>

#include "driver/host/machine.hpp"

namespace ringmem {

using host::Device;
using host::Extent;
using host::Machine;
using host::on_device;
using host::on_stream;
using host::Point;
using host::Pool;
using host::RegionKind;
using host::RegionRef;
using host::Stream;

namespace {

// What a PoolPointerExport holds: a block as a place in its pool's file.
struct SharedBlock {
  char magic[16];
  std::uint64_t file_device, file_number;
  std::uint64_t offset, nbytes;
};
static_assert(sizeof(SharedBlock) <= sizeof(PoolPointerExport));
constexpr char block_magic[16] = "ringmem-block-1";

std::uint64_t number(auto value) { return static_cast<std::uint64_t>(value); }

// A pool operation: pools are there, and the handle is one.
template <class Operation>
Status on_pool(Machine& machine, int device, PoolHandle handle, Operation&& operation) noexcept {
  return on_device(machine, device, [&](Device& d) -> Status {
    if (!machine.config.pools) return Status::not_supported;
    const std::shared_ptr<Pool> pool = machine.pools.find(handle);
    return pool ? operation(d, pool) : Status::invalid_value;
  });
}

Status allocate_block(Machine& machine, const std::shared_ptr<Pool>& pool, std::size_t nbytes,
                      const std::shared_ptr<Stream>& stream, DevicePtr* ptr) {
  Point wait;
  std::uint64_t block = 0;
  Status status = pool->allocate(nbytes, stream, &block, &wait);
  if (status == Status::out_of_memory) {
    // What other pools hold beyond their thresholds is on its way back anyway.
    machine.settle_pools(*machine.device(pool->device()));
    status = pool->allocate(nbytes, stream, &block, &wait);
  }
  if (!ok(status)) return status;
  if (wait.stream) {
    status = machine.submit(*stream, {}, {wait}, false);
    if (!ok(status)) {
      (void)pool->free(block, wait);
      return status;
    }
  }
  *ptr = block;
  return Status::success;
}

Status setup_location(Machine& machine, int device, const PoolProps& props, Pool::Setup* setup) {
  setup->props = props;
  setup->device = device;
  setup->table = &machine.table;
  if (props.location.kind == LocationKind::device) {
    Device* owner = machine.device(props.location.id);
    if (!owner) return Status::invalid_device;
    setup->device = props.location.id;
    setup->budget = &owner->memory;
    return machine.device_heap(*owner, &setup->heap);
  }
  if (!machine.config.host_numa) return Status::not_supported;
  if (props.location.kind == LocationKind::host_numa && props.location.id < 0)
    return Status::invalid_value;
  setup->budget = &machine.host_memory;
  return machine.host_heap(&setup->heap);
}

PoolHandle enter(Machine& machine, std::shared_ptr<Pool> pool) {
  Device& device = *machine.device(pool->device());
  const std::lock_guard lock(device.mutex);
  device.pools.push_back(pool);
  return machine.pools.insert(std::move(pool));
}

}  // namespace

Status host::free_pool_block(Machine& machine, const std::shared_ptr<Pool>& pool,
                             std::uint64_t ptr, Point point) {
  if (pool->imported()) return pool->forget(ptr) ? Status::success : Status::invalid_value;
  const Status status = pool->free(ptr, std::move(point));
  if (ok(status) && pool->destroyed()) machine.settle_pools(*machine.device(pool->device()));
  return status;
}

Status HostDriver::mem_alloc_async(int device, std::size_t nbytes, StreamHandle stream,
                                   DevicePtr* ptr) noexcept {
  return on_stream(*machine_, device, stream, [&](Device& d, const auto& queue) -> Status {
    if (!machine_->config.pools) return Status::not_supported;
    std::shared_ptr<Pool> pool;
    {
      const std::lock_guard lock(d.mutex);
      pool = d.current_pool;
    }
    PoolHandle handle = 0;
    if (!pool) {
      const Status status = machine_->default_pool(d, &pool, &handle);
      if (!ok(status)) return status;
    }
    return allocate_block(*machine_, pool, nbytes, queue, ptr);
  });
}

Status HostDriver::pool_alloc_async(int device, PoolHandle pool, std::size_t nbytes,
                                    StreamHandle stream, DevicePtr* ptr) noexcept {
  return on_pool(*machine_, device, pool, [&](Device& d, const auto& found) -> Status {
    std::shared_ptr<Stream> queue;
    if (const Status status = machine_->stream(d, stream, &queue); !ok(status)) return status;
    return allocate_block(*machine_, found, nbytes, queue, ptr);
  });
}

Status HostDriver::mem_free_async(int device, DevicePtr ptr, StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto& queue) -> Status {
    if (!machine_->config.pools) return Status::not_supported;
    const RegionRef region = machine_->table.find(ptr);
    if (!region) return Status::invalid_value;
    if (region->kind == RegionKind::plain && region->base == ptr)
      return host::free_plain_async(*machine_, region, *queue);
    if (region->kind != RegionKind::pool) return Status::invalid_value;
    const std::shared_ptr<Pool>& pool = region->pool;
    if (pool->imported()) {
      Extent block;
      if (!pool->find(ptr, &block) || block.begin != ptr) return Status::invalid_value;
      return machine_->submit(*queue, [pool, ptr] {
        pool->forget(ptr);
        return Status::success;
      });
    }
    Point point;
    if (const Status status = machine_->mark(queue, &point); !ok(status)) return status;
    return host::free_pool_block(*machine_, pool, ptr, std::move(point));
  });
}

Status HostDriver::pool_create(int device, const PoolProps& props, PoolHandle* pool) noexcept {
  return on_device(*machine_, device, [&](Device&) -> Status {
    if (!machine_->config.pools) return Status::not_supported;
    if (props.shareable && !machine_->config.export_fd) return Status::not_supported;
    Pool::Setup setup;
    const Status status = setup_location(*machine_, device, props, &setup);
    if (!ok(status)) return status;
    if (props.shareable) {
      // A file of its own, laid out like the heap: four times what can be live in it.
      const std::uint64_t live = props.max_size ? std::min<std::uint64_t>(
                                                      props.max_size, setup.budget->limit())
                                                : setup.budget->limit();
      const std::uint64_t span = host::round_up(4 * live, Pool::chunk);
      host::Memfd file;
      const Status made =
          host::Memfd::create_shared(host::SharedKind::pool, props.location, span, &file);
      if (!ok(made)) return made;
      const Status mapped = host::Heap::create_over(std::move(file), span, &setup.own_heap);
      if (!ok(mapped)) return mapped;
    }
    auto made = std::make_shared<Pool>(std::move(setup));
    if (made->shareable()) made->claim_territory();
    *pool = enter(*machine_, std::move(made));
    return Status::success;
  });
}

Status HostDriver::pool_destroy(int device, PoolHandle pool) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) -> Status {
    Device& owner = *machine_->device(found->device());
    {
      const std::lock_guard lock(owner.mutex);
      if (owner.default_pool == found) return Status::invalid_value;
      if (owner.current_pool == found) {
        owner.current_pool = owner.default_pool;  // null when not made yet: made when needed
        owner.current_handle = owner.default_handle;
      }
    }
    if (!machine_->pools.erase(pool)) return Status::invalid_value;
    found->destroy();
    machine_->settle_pools(owner);
    return Status::success;
  });
}

Status HostDriver::pool_default(int device, PoolHandle* pool) noexcept {
  return on_device(*machine_, device, [&](Device& d) -> Status {
    if (!machine_->config.pools) return Status::not_supported;
    std::shared_ptr<Pool> found;
    return machine_->default_pool(d, &found, pool);
  });
}

Status HostDriver::pool_current(int device, PoolHandle* pool) noexcept {
  return on_device(*machine_, device, [&](Device& d) -> Status {
    if (!machine_->config.pools) return Status::not_supported;
    std::shared_ptr<Pool> found;
    PoolHandle handle = 0;
    if (const Status status = machine_->default_pool(d, &found, &handle); !ok(status))
      return status;
    const std::lock_guard lock(d.mutex);
    *pool = d.current_handle;
    return Status::success;
  });
}

Status HostDriver::pool_set_current(int device, PoolHandle pool) noexcept {
  return on_pool(*machine_, device, pool, [&](Device& d, const auto& found) -> Status {
    // A device allocates from its own memory.
    const bool own = found->props().location.kind != LocationKind::device ||
                     found->props().location.id == device;
    if (!own || found->imported()) return Status::invalid_value;
    const std::lock_guard lock(d.mutex);
    d.current_pool = found;
    d.current_handle = pool;
    return Status::success;
  });
}

Status HostDriver::pool_trim(int device, PoolHandle pool, std::size_t keep_bytes) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) -> Status {
    found->trim(keep_bytes);
    return Status::success;
  });
}

Status HostDriver::pool_get(int device, PoolHandle pool, PoolAttribute attribute,
                            std::uint64_t* value) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) {
    return found->get(attribute, value);
  });
}

Status HostDriver::pool_set(int device, PoolHandle pool, PoolAttribute attribute,
                            std::uint64_t value) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) {
    return found->set(attribute, value);
  });
}

Status HostDriver::pool_set_access(int device, PoolHandle pool, const AccessGrant* grants,
                                   std::size_t count) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) -> Status {
    if (!grants || count == 0) return Status::invalid_value;
    host::AccessSet readers = 0, writers = 0;
    found->get_access(&readers, &writers);
    const bool on_device = found->props().location.kind == LocationKind::device;
    for (std::size_t i = 0; i < count; ++i) {
      const auto& [location, access] = grants[i];
      if (location.kind != LocationKind::device) {
        if (on_device && machine_->config.strict) return Status::not_supported;
        continue;  // the host always reaches it
      }
      if (!machine_->device(location.id)) return Status::invalid_device;
      const bool own = on_device && location.id == found->device();
      if (own && access != Access::readwrite) return Status::invalid_value;
      if (on_device && !own && !machine_->connected(location.id, found->device()))
        return Status::invalid_device;
      const host::AccessSet who = host::bit_of(location.id);
      readers = access != Access::none ? readers | who : readers & ~who;
      writers = access == Access::readwrite ? writers | who : writers & ~who;
    }
    found->set_access(readers, writers);
    return Status::success;
  });
}

Status HostDriver::pool_get_access(int device, PoolHandle pool, Location location,
                                   Access* access) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) -> Status {
    const bool is_device = location.kind == LocationKind::device;
    if (is_device && !machine_->device(location.id)) return Status::invalid_device;
    host::AccessSet readers = 0, writers = 0;
    found->get_access(&readers, &writers);
    const host::AccessSet who = is_device ? host::bit_of(location.id) : host::host_access;
    *access = writers & who ? Access::readwrite : readers & who ? Access::read : Access::none;
    return Status::success;
  });
}

Status HostDriver::pool_export(int device, PoolHandle pool, int* fd) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) -> Status {
    if (!machine_->config.export_fd) return Status::not_supported;
    if (!found->shareable() || found->imported()) return Status::invalid_value;
    const int duplicate = found->heap().file().duplicate();
    if (duplicate < 0) return Status::operating_system;
    *fd = duplicate;
    return Status::success;
  });
}

Status HostDriver::pool_import(int device, int fd, PoolHandle* pool) noexcept {
  return on_device(*machine_, device, [&](Device&) -> Status {
    if (!machine_->config.pools || !machine_->config.export_fd) return Status::not_supported;
    host::Trailer trailer{};
    host::Memfd file;
    const Status status = host::Memfd::open_shared(host::SharedKind::pool, fd, &trailer, &file);
    if (!ok(status)) return status;
    PoolProps props;
    props.location = {static_cast<LocationKind>(trailer.location_kind), trailer.location_id};
    props.shareable = true;
    Pool::Setup setup;
    if (const Status found = setup_location(*machine_, device, props, &setup); !ok(found))
      return found;
    const Status mapped =
        host::Heap::create_over(std::move(file), trailer.nbytes, &setup.own_heap);
    if (!ok(mapped)) return mapped;
    setup.imported = true;
    auto made = std::make_shared<Pool>(std::move(setup));
    made->claim_territory();
    *pool = enter(*machine_, std::move(made));
    return Status::success;
  });
}

Status HostDriver::pool_export_pointer(int device, DevicePtr ptr,
                                       PoolPointerExport* exported) noexcept {
  return on_device(*machine_, device, [&](Device&) -> Status {
    if (!machine_->config.pools || !machine_->config.export_fd) return Status::not_supported;
    const RegionRef region = machine_->table.find(ptr);
    Extent block;
    if (!region || !region->pool || !region->pool->shareable() || region->pool->imported() ||
        !region->pool->find(ptr, &block) || block.begin != ptr)
      return Status::invalid_value;
    const host::Heap& heap = region->pool->heap();
    const auto [file_device, file_number] = heap.file().identity();
    SharedBlock shared{{}, number(file_device), number(file_number), ptr - heap.base(),
                       block.end - block.begin};
    std::memcpy(shared.magic, block_magic, sizeof block_magic);
    *exported = {};
    std::memcpy(exported->data, &shared, sizeof shared);
    return Status::success;
  });
}

Status HostDriver::pool_import_pointer(int device, PoolHandle pool,
                                       const PoolPointerExport& exported,
                                       DevicePtr* ptr) noexcept {
  return on_pool(*machine_, device, pool, [&](Device&, const auto& found) -> Status {
    SharedBlock shared{};
    std::memcpy(&shared, exported.data, sizeof shared);
    if (!found->imported() || std::memcmp(shared.magic, block_magic, sizeof block_magic) != 0)
      return Status::invalid_value;
    const auto [file_device, file_number] = found->heap().file().identity();
    if (shared.file_device != number(file_device) || shared.file_number != number(file_number))
      return Status::invalid_value;
    return found->adopt(shared.offset, shared.nbytes, ptr);
  });
}

}  // namespace ringmem
