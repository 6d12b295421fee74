// The device as torch sees it: guard, streams and events, generators, hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace emu {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = EMU;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return EMU; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto from = current_device;
    setDevice(to);
    return c10::Device(EMU, from);
  }
  c10::Device getDevice() const override { return c10::Device(EMU, current_device); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < NUM_DEVICES, "emu: there is no ", to);
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current_device = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> last = 0;
    return make_stream(index_of(device), 1 + last++ % NUM_POOL_STREAMS);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto& now = current_streams[to.device_index()];
    return make_stream(to.device_index(), std::exchange(now, to.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream)->is_done(queue_of(stream)->last());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(queue_of(stream), queue_of(stream)->last(), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    log_wait("device.synchronize");
    for (auto queue : queues_of(device < 0 ? current_device : device)) queue->wait(queue->last());
    check_device();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    DeviceMemory::instance().recordStream(pointer, stream);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = {queue_of(stream), queue_of(stream)->last()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto moment = static_cast<Moment*>(event)) wait_on_stream(queue_of(stream), *moment);
  }
  bool queryEvent(void* event) const override {
    auto moment = static_cast<Moment*>(event);
    return !moment || !moment->queue || moment->queue->is_done(moment->number);
  }
  void synchronizeEvent(void* event) const override {
    auto moment = static_cast<Moment*>(event);
    if (moment && moment->queue) wait_on_host(moment->queue, moment->number, "event.synchronize");
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// As philox on CUDA: the host counts what is drawn, so the state is right before any kernel ran.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl({EMU, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return EMU; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte, "emu: a state is 16 bytes");
    auto words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto other = new GeneratorImpl(device().index());
    other->seed_ = seed_, other->offset_ = offset_;
    return other;
  }
  // A generator for one kernel, which runs later.
  at::Generator draw() { return at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15ull + 4 * offset_++ + 1); }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto& all = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int i = 0; i < NUM_DEVICES; ++i) made.push_back(at::make_generator<GeneratorImpl>(i));
    return made;
  }());
  return all.at(device < 0 ? current_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(c10::DeviceIndex to) const override { Guard().setDevice({EMU, to}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return Guard().exchangeDevice({EMU, to}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::instance().owns(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::instance(); }
  at::Device getDeviceFromPtr(void*) const override { return {EMU, static_cast<c10::DeviceIndex>(current_device)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto old = storage.data_ptr().get();
    auto kept = std::min(size, storage.nbytes());
    auto data = DeviceMemory::instance().allocate(size);
    if (kept) DeviceMemory::instance().copy_data(data.get(), old, kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};
}  // namespace emu
