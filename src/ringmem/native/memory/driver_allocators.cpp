#include "memory/driver_allocators.hpp"
