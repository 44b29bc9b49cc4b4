// The native side of a buffer, and what other rooms need to make one: shapes, dtypes, and
// `make_buffer`, which wraps a block of memory in a Python buffer object.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/objects.hpp"

namespace ringmem::bind {

// --- shapes and dtypes -------------------------------------------------------------------------

// The extents of an array. Up to four live inside the object: most buffers need no more.
class Shape {
 public:
  static constexpr int max_ndim = 64;  // NumPy's

  Shape() = default;
  explicit Shape(std::int64_t extent) : ndim_(1) { inline_[0] = extent; }
  Shape(const Shape& other) { *this = other; }
  Shape& operator=(const Shape& other);
  Shape(Shape&&) noexcept = default;
  Shape& operator=(Shape&&) noexcept = default;

  void resize(int ndim);
  int ndim() const noexcept { return ndim_; }
  std::int64_t& operator[](int i) noexcept { return data()[i]; }
  std::int64_t operator[](int i) const noexcept { return data()[i]; }
  const std::int64_t* data() const noexcept { return more_ ? more_.get() : inline_.data(); }
  std::int64_t* data() noexcept { return more_ ? more_.get() : inline_.data(); }

  std::string text() const;  // "(2, 3)"
  nb::tuple tuple() const;
  friend bool operator==(const Shape& a, const Shape& b) noexcept;

 private:
  int ndim_ = 0;
  std::array<std::int64_t, 4> inline_{};
  std::unique_ptr<std::int64_t[]> more_;
};

// A NumPy dtype that memory can hold: no objects, an itemsize of at least one byte.
struct Dtype {
  nb::object object;
  std::size_t itemsize = 1;
};

// From an integer or a sequence of them. InvalidValue for negative or too many extents.
Shape shape_of(nb::handle argument);
// From anything that np.dtype takes, and the names of ml_dtypes. Fast for dtype objects, strings
// and classes that were seen before. InvalidValue for dtypes that memory cannot hold.
Dtype dtype_of(nb::handle argument);

// What an array takes. InvalidValue when it overflows.
struct Spec {
  Shape shape;
  Dtype dtype;
  std::size_t size = 0;    // elements
  std::size_t nbytes = 0;  // bytes
};
Spec spec_of(Shape shape, Dtype dtype);
// `dtype` null or None means raw bytes, of which there must be one at least.
Spec spec_of(nb::handle shape, nb::handle dtype);

// --- buffers -----------------------------------------------------------------------------------

// Where a buffer's memory lives; `host` is pageable memory of somebody else.
enum class MemoryKind : std::uint8_t { device, pinned, managed, host };

// A stream and the object that keeps its handle valid; `owner` is null for a default stream, which
// every device has under the same handle.
struct StreamRef {
  StreamHandle handle = default_stream;
  nb::object owner;                // a NativeStream
  NativeDevice* device = nullptr;  // kept by the owner, or by the buffer that holds this

  // The driver may give the handle of a closed stream to another.
  bool same_as(const StreamRef& other) const noexcept {
    return handle == other.handle && device == other.device &&
           (owner.is(other.owner) || (!closed() && !other.closed()));
  }

  NativeStream* object() const;  // null for a default stream
  bool closed() const;  // its owner was closed: the handle must not be used any more
};

// Ownership. A buffer either owns memory (block and allocator), or borrows somebody's (`owner`),
// or is a view of another buffer (`root`), or is empty. `uses` counts what stands on it: views,
// exports, calls under way. Closing swaps 0 for `closed_mark`, so it wins or loses against a new
// use, never half of each, with or without a GIL.
class Buffer {
 public:
  static constexpr std::int64_t closed_mark = -1;

  DevicePtr ptr = 0;
  std::size_t nbytes = 0;
  std::size_t itemsize = 1;
  std::size_t size = 0;
  Shape shape;
  nb::object dtype;
  nb::object device_object;  // keeps `device`
  NativeDevice* device = nullptr;
  MemoryKind kind = MemoryKind::device;
  bool read_only = false;
  StreamRef stream;  // allocations and frees are in its order

  Block block;
  // Null: borrowed, view or empty. The device's own is referred to and not counted, since
  // `device_object` keeps it (two locked instructions less).
  std::shared_ptr<Allocator> allocator;
  nb::object owner;                      // of borrowed memory
  nb::object root_object;                // of a view: keeps `root`
  Buffer* root = nullptr;                // of a view
  nb::object place;                      // where it was allocated, when tracking is on

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  bool closed() const noexcept { return uses_.load(std::memory_order_acquire) == closed_mark; }
  std::int64_t uses() const noexcept { return uses_.load(std::memory_order_acquire); }
  // Throws Closed, also when the buffer it views is closed.
  void check_open() const;
  void add_use();  // throws Closed
  void drop_use() noexcept { uses_.fetch_sub(1, std::memory_order_acq_rel); }

  // Idempotent. Raises when views or exports are alive and when freeing fails; the buffer is then
  // as before. `free_on`: free in that stream's order; null: in the buffer's own.
  void close(const StreamRef* free_on);

  // Needs a use of this buffer: closing a view lets go of its root.
  Buffer& memory() noexcept { return root ? *root : *this; }
  const Buffer& memory() const noexcept { return root ? *root : *this; }
  // Without one, for a look at what never changes; the object keeps the root of a view. A view that
  // was closed is its own.
  std::pair<const Buffer*, nb::object> look() const;
  nb::object owner_or_none() const;  // of a view its root, of borrowed memory whoever has it
  // Work on `stream` uses the memory: freeing and host views wait for it.
  void note_use(const StreamRef& stream);
  // Work that `order` is given from here on comes after what closed streams left: nobody can name
  // them any more. Throws DriverError where a capture is between them.
  void follow_closed(const StreamRef& order);
  // The streams whose work may touch the memory now.
  std::vector<StreamRef> streams_in_use() const;
  // Inside UnifiedBuffer.host() on a device that cannot share: device work would fault. Includes
  // check_usable().
  void check_device_may_use() const;
  // Device and host would fault in memory that sleeps. Throws InvalidValue.
  void check_usable() const;
  mutable std::atomic<bool> host_only{false};
  mutable std::atomic<ManagedAttach> attached{ManagedAttach::global};  // of managed memory

 private:
  Status release(const StreamRef* free_on, bool finalizing) noexcept;
  Status give_back(const StreamRef& last, bool finalizing);
  bool give_back_behind_closed(const StreamRef& last, Status* status);
  Status tell_allocator(const StreamRef& used, const StreamRef& last);
  void warn_lost(Status status) noexcept;

  std::atomic<std::int64_t> uses_{0};
  bool touched_ = false;           // work was submitted to `stream`
  std::vector<StreamRef> others_;  // other streams that used the memory
  // Guards the two above, and root, root_object and owner against those that look without a use.
  // Nothing with a GIL.
  mutable nb::ft_mutex mutex_;
};

// One use of a buffer for as long as it lives.
class Use {
 public:
  explicit Use(Buffer& buffer) : buffer_(buffer) { buffer_.add_use(); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() { buffer_.drop_use(); }

 private:
  Buffer& buffer_;
};

// Takes over `block` and returns a DeviceBuffer, PinnedBuffer or UnifiedBuffer, after `kind`. When
// it throws, the block has been given back. `device` is the Python object.
nb::object make_buffer(MemoryKind kind, const Block& block, std::shared_ptr<Allocator> allocator,
                       Spec spec, nb::handle device, StreamRef stream);
// The same for device memory, with the C++ device.
nb::object make_device_buffer(const Block& block, std::shared_ptr<Allocator> allocator, Spec spec,
                              NativeDevice& device, StreamRef stream);

// --- between the files of this room ------------------------------------------------------------

// The arguments of every constructor; null where not given.
struct Request {
  nb::handle shape, dtype, device, stream, allocator;
};

// A new object of `type` with a fresh Buffer in it.
nb::object new_buffer_object(nb::handle type);
// From now on dead objects of this class, a Python subclass of BufferBase without slots, are used
// again; until the others are dropped, at the end of Python.
void recycle_objects(nb::handle type);
void drop_spare_objects();

// The Python class for memory of a kind, registered by ringmem.buffers.
nb::handle buffer_type(MemoryKind kind);
// A Python device object for None, a Device or a name. With None: the stream's, else the default.
nb::object device_of(nb::handle argument, nb::handle stream);
StreamRef stream_ref(nb::handle argument, NativeDevice& device);
// The stream for work on `lead`: without an argument, the buffer's own.
StreamRef order_of(nb::handle stream, Buffer& lead);
// Fills `buffer`, which is fresh, from a request.
void allocate_into(Buffer& buffer, MemoryKind kind, const Request& request);
// "DeviceBuffer (2, 3) float32 on cuda:0", for messages.
std::string describe(const Buffer& buffer);
// `later` waits, on the device, for the work that `earlier` has now.
Status wait_on_device(const StreamRef& later, const StreamRef& earlier);
// A Python exception that user code raised inside a noexcept call, kept for whoever reports it.
void keep_python_error() noexcept;
bool restore_python_error() noexcept;
// When tracking is on: (file, line) of the Python code that runs; else null.
nb::object place_of_call();

void bind_buffer_class(nb::module_& m, nb::class_<Buffer>& cls);
void bind_buffer_factory(nb::module_& m, nb::class_<Buffer>& cls);
void bind_buffer_copy(nb::module_& m, nb::class_<Buffer>& cls);
void bind_buffer_view(nb::class_<Buffer>& cls);
void bind_buffer_export(nb::module_& m);
void bind_buffer_dlpack(nb::module_& m);
void bind_buffer_allocators(nb::module_& m);

}  // namespace ringmem::bind
