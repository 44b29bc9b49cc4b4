// The structures of DLPack 1.x and the legacy tensor, as the protocol lays them out
// (dmlc.github.io/dlpack, C API). Only what ringmem gives and takes.
#pragma once

#include <cstdint>

namespace ringmem::bind::dlpack {

enum DeviceType : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3, cuda_managed = 13 };

enum TypeCode : std::uint8_t {
  type_int = 0,
  type_uint = 1,
  type_float = 2,
  type_bfloat = 4,
  type_complex = 5,
  type_bool = 6,
  float8_e3m4 = 7,
  float8_e4m3 = 8,
  float8_e4m3b11fnuz = 9,
  float8_e4m3fn = 10,
  float8_e4m3fnuz = 11,
  float8_e5m2 = 12,
  float8_e5m2fnuz = 13,
  float8_e8m0fnu = 14,
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;
};

struct LegacyTensor {  // capsule "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(LegacyTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint64_t flag_read_only = 1;
inline constexpr std::uint64_t flag_copied = 2;

struct VersionedTensor {  // capsule "dltensor_versioned"
  Version version;
  void* context;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

}  // namespace ringmem::bind::dlpack
