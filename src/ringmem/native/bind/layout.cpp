// Tells Python what the layout header says, field by field, and gives it single loads and stores
// of fields that another thread, process or device may be writing.
#include "layout/kernel.hpp"
#include "layout/layout.hpp"

#include <nanobind/stl/string.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>

#include "bind/buffer.hpp"

namespace ringmem::bind {
namespace {

// NumPy's letter for a field: signed, unsigned, or bytes without a type.
template <class Field>
constexpr const char* kind() {
  if constexpr (std::is_array_v<Field>) return "V";
  else return std::is_signed_v<Field> ? "i" : "u";
}

template <class Structure>
nb::dict table(nb::dict fields) {
  nb::dict out;
  out["nbytes"] = sizeof(Structure);
  out["alignment"] = alignof(Structure);
  out["fields"] = fields;
  return out;
}

#define RINGMEM_LAYOUT_ENTRY(structure, field, offset)                                  \
  fields[#field] = nb::make_tuple(__builtin_offsetof(layout::structure, field),         \
                                  sizeof(layout::structure::field),                     \
                                  kind<decltype(layout::structure::field)>());
#define RINGMEM_LAYOUT_TABLE(structure, list)        \
  {                                                  \
    nb::dict fields;                                 \
    list(RINGMEM_LAYOUT_ENTRY);                      \
    out[#structure] = table<layout::structure>(fields); \
  }

nb::typed<nb::dict, std::string, nb::object> layout_tables() {
  nb::typed<nb::dict, std::string, nb::object> out;
  RINGMEM_LAYOUT_TABLE(ControlBlock, RINGMEM_CONTROL_BLOCK_FIELDS)
  RINGMEM_LAYOUT_TABLE(TelemetryBuffer, RINGMEM_TELEMETRY_BUFFER_FIELDS)
  RINGMEM_LAYOUT_TABLE(RingDescriptor, RINGMEM_RING_DESCRIPTOR_FIELDS)
  RINGMEM_LAYOUT_TABLE(ProducerIndex, RINGMEM_PRODUCER_INDEX_FIELDS)
  RINGMEM_LAYOUT_TABLE(ConsumerIndex, RINGMEM_CONSUMER_INDEX_FIELDS)
  RINGMEM_LAYOUT_TABLE(Line, RINGMEM_LINE_FIELDS)
  RINGMEM_LAYOUT_TABLE(KernelRing, RINGMEM_KERNEL_RING_FIELDS)
  RINGMEM_LAYOUT_TABLE(BlockScratch, RINGMEM_BLOCK_SCRATCH_FIELDS)
  return out;
}

nb::tuple array_spec(nb::handle shape, nb::handle dtype) {
  const Spec spec = spec_of(shape_of(shape), dtype_of(dtype));
  return nb::make_tuple(spec.shape.tuple(), spec.dtype.object, spec.nbytes);
}

template <class Value>
Value load(std::uint64_t ptr) {
  return std::atomic_ref<Value>(*reinterpret_cast<Value*>(ptr)).load(std::memory_order_acquire);
}

template <class Value>
void store(std::uint64_t ptr, Value value) {
  std::atomic_ref<Value>(*reinterpret_cast<Value*>(ptr)).store(value, std::memory_order_release);
}

}  // namespace

void bind_layout(nb::module_& m) {
  m.def("layout_tables", &layout_tables,
        "Structures of the layout header: name -> nbytes, alignment, fields "
        "(name -> offset, nbytes, kind).");
  m.def("array_spec", &array_spec, nb::arg("shape").none(), nb::arg("dtype").none(),
        nb::sig("def array_spec(shape: typing.Any, dtype: typing.Any) -> "
                "tuple[tuple[int, ...], typing.Any, int]"),
        "Checked shape, dtype and bytes of an array without objects.");
  m.attr("cache_line_aligned_nbytes") = layout::cache_line_aligned_nbytes;
  m.attr("line_nbytes") = layout::line_nbytes;
  m.attr("line_payload_nbytes") = layout::line_payload_nbytes;
  m.attr("ring_header_nbytes") = sizeof(layout::RingHeader);

  // Unchecked: `ptr` must be an aligned address that the host can access.
  m.def("load_u32", &load<std::uint32_t>, nb::arg("ptr"));
  m.def("load_i32", &load<std::int32_t>, nb::arg("ptr"));
  m.def("load_u64", &load<std::uint64_t>, nb::arg("ptr"));
  m.def("store_u32", &store<std::uint32_t>, nb::arg("ptr"), nb::arg("value"));
  m.def("store_i32", &store<std::int32_t>, nb::arg("ptr"), nb::arg("value"));
  m.def("store_u64", &store<std::uint64_t>, nb::arg("ptr"), nb::arg("value"));
}

}  // namespace ringmem::bind
