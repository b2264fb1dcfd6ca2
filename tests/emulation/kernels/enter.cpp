// The kernel that enters a launch; a unit of its own, since it shares names with the schedule's.

#include "device.hpp"

#include "moe/enter.cu"
