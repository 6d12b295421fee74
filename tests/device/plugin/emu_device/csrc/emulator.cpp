// The device "emu": an accelerator made of host memory and threads, as PrivateUse1.
#include "collectives.h"

namespace {
const bool is_registered = [] {
  c10::SetAllocator(emu::EMU, &emu::DeviceMemory::instance(), 1);
  at::RegisterPrivateUse1HooksInterface(new emu::Hooks);
  return true;
}();
}  // namespace
at::HostAllocator* pinned_memory = &emu::PinnedMemory::instance();
REGISTER_HOST_ALLOCATOR(at::DeviceType::PrivateUse1, pinned_memory)

namespace py = pybind11;
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", [] { return emu::NUM_DEVICES; });
  m.def("default_generator", [](int device) { return emu::default_generator(device); });
  m.def("set_lag", [](long lag, long side) { emu::default_lag = lag, emu::side_lag = side; });
  m.def("set_random_sums", [](bool wanted) { emu::random_sums = wanted; });
  m.def("waits", [] {
    std::lock_guard lock(emu::log().mutex);
    return emu::log().waits;
  });
  m.def("kernels", [] {
    std::lock_guard lock(emu::log().mutex);
    return emu::log().kernels;
  });
  m.def("kernels_without_shape", [] {
    std::lock_guard lock(emu::log().mutex);
    return emu::log().kernels_without_shape;
  });
  m.def("clear_logs", [](bool logs_kernels) {
    std::lock_guard lock(emu::log().mutex);
    emu::log().waits.clear();
    emu::log().kernels.clear();
    emu::log().logs_kernels = logs_kernels;
  });
  m.def("peak_pinned_bytes", [] { return emu::PinnedMemory::instance().peak(); });
  m.def("reset_peak_pinned_bytes", [] { emu::PinnedMemory::instance().reset_peak_stats(); });
  py::class_<emu::Comm, c10d::Backend, c10::intrusive_ptr<emu::Comm>>(m, "Comm").def(
      py::init([](c10::intrusive_ptr<c10d::Backend> gloo) { return c10::make_intrusive<emu::Comm>(std::move(gloo)); }));
}
