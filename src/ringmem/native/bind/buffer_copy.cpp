// Copies and fills where both sides are ringmem's: one check of everything, one driver call.
// Whatever needs more (host arrays, two devices) goes to the Python half, ringmem.buffers.
#include "bind/buffer.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace ringmem::bind {
namespace {

PyObject* general_copy = nullptr;  // (dst, src, stream) for any other pair; set once, never freed

void copy_in_general(nb::handle target, nb::handle source, nb::handle stream) {
  const nb::handle hook(general_copy);
  hook(target, source, stream);
}

bool same_dtype(const Buffer& a, const Buffer& b) {
  if (a.dtype.is(b.dtype)) [[likely]] return true;
  if (a.itemsize != b.itemsize) return false;
  const int equal = PyObject_RichCompareBool(a.dtype.ptr(), b.dtype.ptr(), Py_EQ);
  if (equal < 0) throw nb::python_error();
  return equal == 1;
}

void check_match(const Buffer& dst, const Buffer& src) {
  if (!(dst.shape == src.shape)) [[unlikely]] {
    throw InvalidValue("shapes differ: the source is " + describe(src) + ", the target " +
                       describe(dst) + "; slice or reshape one of them");
  }
  if (!same_dtype(dst, src)) [[unlikely]] {
    throw InvalidValue("dtypes differ: the source is " + describe(src) + ", the target " +
                       describe(dst) + "; view(dtype) reads the same bytes as another type");
  }
}

void check_writable(const Buffer& dst) {
  if (dst.read_only) [[unlikely]] {
    throw InvalidValue("the target, " + describe(dst) + ", is read-only: give another");
  }
}

void check_no_overlap(const Buffer& dst, const Buffer& src) {
  if (dst.ptr + dst.nbytes <= src.ptr || src.ptr + src.nbytes <= dst.ptr) [[likely]] return;
  throw InvalidValue("source and target overlap: " + describe(src) + " and " + describe(dst) +
                     " share bytes; copy through another buffer");
}

// Device memory decides on whose stream a copy runs.
Buffer& leading(Buffer& self, Buffer& other) {
  return self.kind != MemoryKind::device && other.kind == MemoryKind::device ? other : self;
}

// One driver call does it: one driver, and not the memory of two devices.
bool is_direct(const Buffer& a, const Buffer& b) {
  if (a.device == b.device) [[likely]] return true;
  if (a.device->driver != b.device->driver) return false;
  return a.kind != MemoryKind::device || b.kind != MemoryKind::device;
}

void copy_direct(Buffer& dst, Buffer& src, Buffer& lead, nb::handle stream) {
  const StreamRef order = order_of(stream, lead);
  dst.check_device_may_use();
  src.check_device_may_use();
  dst.follow_closed(order);
  src.follow_closed(order);
  NativeDevice& device = *lead.device;
  Status status;
  if (dst.kind == MemoryKind::host || src.kind == MemoryKind::host) {
    ReleaseGil release;  // pageable memory: the call may block
    status = device.driver->copy_async(device.ordinal, dst.ptr, src.ptr, dst.nbytes, order.handle);
  } else {
    status = device.driver->copy_async(device.ordinal, dst.ptr, src.ptr, dst.nbytes, order.handle);
  }
  check(status, "cuMemcpyAsync");
  dst.note_use(order);
  src.note_use(order);
}

// `self` is the side whose method was called.
void copy_between(Buffer& dst, Buffer& src, Buffer& self, nb::handle stream) {
  Use writing(dst);
  Use reading(src);
  check_match(dst, src);
  check_writable(dst);
  if (dst.nbytes == 0) return;
  check_no_overlap(dst, src);
  if (is_direct(dst, src)) [[likely]] {
    return copy_direct(dst, src, leading(self, &self == &dst ? src : dst), stream);
  }
  copy_in_general(nb::find(dst), nb::find(src), stream);
}

void copy_from(nb::handle_t<Buffer> self, nb::handle source, nb::handle stream) {
  Buffer& dst = *nb::inst_ptr<Buffer>(self);
  if (is<Buffer>(source)) [[likely]] {
    return copy_between(dst, *nb::inst_ptr<Buffer>(source), dst, stream);
  }
  copy_in_general(self, source, stream);
}

void copy_to(nb::handle_t<Buffer> self, nb::handle target, nb::handle stream) {
  Buffer& src = *nb::inst_ptr<Buffer>(self);
  if (is<Buffer>(target)) [[likely]] {
    return copy_between(*nb::inst_ptr<Buffer>(target), src, src, stream);
  }
  copy_in_general(target, self, stream);
}

// --- fill --------------------------------------------------------------------------------------

// The shortest power of two of bytes that `pattern` repeats, at most `pattern` itself.
std::size_t period_of(const unsigned char* pattern, std::size_t nbytes) {
  for (std::size_t period = 1; period < nbytes; period *= 2) {
    if (nbytes % period == 0 && std::memcmp(pattern, pattern + period, nbytes - period) == 0) {
      return period;
    }
  }
  return nbytes;
}

std::uint32_t word_at(const unsigned char* bytes, std::size_t width) {
  std::uint32_t word = 0;
  std::memcpy(&word, bytes, width);  // little-endian, as every machine with CUDA is
  return word;
}

// The driver fills words of up to 4 bytes. A longer element is written once, word by word, and
// then doubled on the device: log2(size) copies.
class Filler {
 public:
  Filler(Buffer& buffer, const StreamRef& order) : buffer_(buffer), order_(order) {}

  void run(const unsigned char* pattern, std::size_t nbytes) {
    const std::size_t period = period_of(pattern, nbytes);
    const std::size_t width = widest(period);
    if (width == period) {
      words(buffer_.ptr, pattern, width, buffer_.nbytes / width);
    } else {
      seed(pattern, period, width);
      double_up(period);
    }
  }

 private:
  // Word by word nothing can block; a long element costs less as one copy of pageable memory.
  void seed(const unsigned char* pattern, std::size_t period, std::size_t width) {
    constexpr std::size_t many_words = 16;
    if (period / width <= many_words) {
      for (std::size_t at = 0; at < period; at += width) {
        words(buffer_.ptr + at, pattern + at, width, 1);
      }
      return;
    }
    NativeDevice& device = *buffer_.device;
    Status status;
    {
      ReleaseGil release;
      status = device.driver->copy_async(device.ordinal, buffer_.ptr,
                                         reinterpret_cast<DevicePtr>(pattern), period,
                                         order_.handle);
    }
    check(status, "cuMemcpyAsync");
  }

  // Words of this many bytes fit the period and the address.
  std::size_t widest(std::size_t period) const {
    for (std::size_t width = 4; width > 1; width /= 2) {
      if (period % width == 0 && buffer_.ptr % width == 0) return width;
    }
    return 1;
  }

  void words(DevicePtr ptr, const unsigned char* value, std::size_t width, std::size_t count) {
    static constexpr const char* names[] = {"", "cuMemsetD8Async", "cuMemsetD16Async", "",
                                            "cuMemsetD32Async"};
    NativeDevice& device = *buffer_.device;
    check(device.driver->fill_async(device.ordinal, ptr, word_at(value, width),
                                    static_cast<int>(width), count, order_.handle),
          names[width]);
  }

  void double_up(std::size_t done) {
    NativeDevice& device = *buffer_.device;
    while (done < buffer_.nbytes) {
      const std::size_t step = std::min(done, buffer_.nbytes - done);
      check(device.driver->copy_async(device.ordinal, buffer_.ptr + done, buffer_.ptr, step,
                                      order_.handle),
            "cuMemcpyAsync");
      done += step;
    }
  }

  Buffer& buffer_;
  const StreamRef& order_;
};

void fill_bytes(Buffer& self, nb::bytes pattern, nb::handle stream) {
  Use writing(self);
  check_writable(self);
  if (pattern.size() == 0 || pattern.size() != self.itemsize) {
    throw InvalidValue("pattern has " + std::to_string(pattern.size()) + " bytes: give the " +
                       std::to_string(self.itemsize) + " of one element");
  }
  const StreamRef order = order_of(stream, self);
  if (self.nbytes == 0) return;
  self.check_device_may_use();
  self.follow_closed(order);
  self.note_use(order);  // before the calls: a fill that fails half way has used the memory too
  Filler(self, order).run(static_cast<const unsigned char*>(pattern.data()), pattern.size());
}

}  // namespace

void bind_buffer_copy(nb::module_& m, nb::class_<Buffer>& cls) {
  cls.def("copy_from", &copy_from, nb::arg("source").none(), nb::arg("stream").none() = nb::none())
      .def("copy_to", &copy_to, nb::arg("target").none(), nb::arg("stream").none() = nb::none());
  m.def("buffer_fill", &fill_bytes, nb::arg("buffer"), nb::arg("pattern"),
        nb::arg("stream").none() = nb::none(), "Every element becomes these bytes.");
  m.def("set_copy_hook", [](nb::callable hook) {
    Py_XDECREF(std::exchange(general_copy, hook.inc_ref().ptr()));
  }, nb::arg("hook"), "`hook(target, source, stream)` copies what the native path does not.");
}

}  // namespace ringmem::bind
