// Memory: of the device, which the host cannot read, and pinned memory of the host.
//
// A device pointer lies in a span without access rights, so that a host that dereferences it gets SIGSEGV. Kernels work
// at the same offset one span further up. What is allocated is poisoned in stream order (0xFF: NaN, or -1): what was there
// before, and somebody may still read, is lost then.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <cstring>

#include "streams.h"

namespace emu {
constexpr size_t SPAN = 1ull << 35;
constexpr int POISON = 0xFF;

struct DeviceMemory final : c10::DeviceAllocator {
  static DeviceMemory& instance() {
    static auto& one = *new DeviceMemory;
    return one;
  }
  static void* kernel_address(const void* pointer) {
    return const_cast<char*>(static_cast<const char*>(pointer)) + SPAN;
  }
  static void poison(void* pointer, size_t size) { std::memset(kernel_address(pointer), POISON, size); }

  c10::DataPtr allocate(size_t num_bytes) override {
    auto stream = current_stream(current_device);
    auto device = stream.device();
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    auto size = (num_bytes + 511) / 512 * 512;
    void* pointer = nullptr;
    {
      std::lock_guard lock(mutex_);
      reclaim();
      auto& free = freed_[{device.index(), stream.id(), size}];
      if (!free.empty()) {
        pointer = free.back();
        free.pop_back();
      } else {
        TORCH_CHECK(end_ + size <= SPAN, "emu: out of memory");
        pointer = base_ + end_;
        end_ += size;
      }
      blocks_.insert_or_assign(pointer, Block{size, stream, {}});
      peak_ = std::max(peak_, live_ += size);
    }
    // In stream order, so that it does not overtake a kernel that still reads what was here.
    queue_of(stream)->push([pointer, size] { poison(pointer, size); });
    return {pointer, pointer, &release, device};
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(pointer.get_context());
    if (found != blocks_.end() && found->second.stream != stream) found->second.others.push_back(stream);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    current_queue(current_device)->push([=] { std::memcpy(kernel_address(to), kernel_address(from), count); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = live_;
    stats.allocated_bytes[0].peak = peak_;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak_ = live_; }

 private:
  struct Block {
    size_t size;
    c10::Stream stream;
    std::vector<c10::Stream> others;
  };
  std::mutex mutex_;
  char* base_ = nullptr;
  size_t end_ = 0, live_ = 0, peak_ = 0;
  struct Used {  // by other streams, when it was freed
    void* pointer;
    Block block;
    std::vector<Moment> until;
  };
  std::map<void*, Block> blocks_;
  std::vector<Used> used_;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<void*>> freed_;

  DeviceMemory() {
    auto got = mmap(nullptr, 2 * SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(got != MAP_FAILED, "emu: no address space");
    base_ = static_cast<char*>(got);
    TORCH_CHECK(mprotect(base_ + SPAN, SPAN, PROT_READ | PROT_WRITE) == 0, "emu: no memory");
  }
  static void release(void* pointer) {
    if (pointer) instance().free(pointer);
  }
  void free(void* pointer) {
    std::lock_guard lock(mutex_);
    auto node = blocks_.extract(pointer);
    auto& block = node.mapped();
    live_ -= block.size;
    Used used{pointer, block, {}};
    for (auto& other : block.others) used.until.push_back({queue_of(other), queue_of(other)->last()});
    used_.push_back(std::move(used));
    reclaim();
  }
  // Reuses what no other stream reads any more. As with CUDA's allocator, no stream waits for that.
  void reclaim() {
    auto is_done = [](const Moment& moment) { return moment.queue->is_done(moment.number); };
    for (auto used = used_.begin(); used != used_.end();) {
      if (!std::all_of(used->until.begin(), used->until.end(), is_done)) {
        ++used;
        continue;
      }
      auto& stream = used->block.stream;
      freed_[{stream.device_index(), stream.id(), used->block.size}].push_back(used->pointer);
      used = used_.erase(used);
    }
  }
};

// Pinned memory is freed only when no copy uses it any more, as CUDA's host allocator does.
struct PinnedMemory final : at::HostAllocator {
  static PinnedMemory& instance() {
    static auto& one = *new PinnedMemory;
    return one;
  }
  at::DataPtr allocate(size_t num_bytes) override {
    auto pointer = static_cast<char*>(std::aligned_alloc(4096, (num_bytes + 4096) / 4096 * 4096));
    std::lock_guard lock(mutex_);
    blocks_[pointer] = {num_bytes, {}};
    peak_ = std::max(peak_, live_ += num_bytes);
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  bool owns(const void* address) {
    std::lock_guard lock(mutex_);
    return find(address) != nullptr;
  }
  void note_use(const void* address, Moment moment) {
    std::lock_guard lock(mutex_);
    if (auto block = find(address)) block->uses.push_back(moment);
  }
  int64_t peak() {
    std::lock_guard lock(mutex_);
    return peak_;
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    note_use(pointer, {queue_of(stream), queue_of(stream)->last()});
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    std::lock_guard lock(mutex_);
    peak_ = live_;
  }

 private:
  struct Block {
    size_t size = 0;
    std::vector<Moment> uses;
  };
  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  int64_t live_ = 0, peak_ = 0;

  Block* find(const void* address) {
    auto next = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == blocks_.begin()) return nullptr;
    auto found = std::prev(next);
    return address < found->first + std::max<size_t>(1, found->second.size) ? &found->second : nullptr;
  }
  static void release(void* pointer) {
    auto& self = instance();
    std::unique_lock lock(self.mutex_);
    auto node = self.blocks_.extract(static_cast<char*>(pointer));
    self.live_ -= node.mapped().size;
    lock.unlock();
    std::thread([pointer, uses = std::move(node.mapped().uses)] {
      for (auto& moment : uses) moment.queue->wait(moment.number, /*urgent=*/false);
      std::free(pointer);
    }).detach();
  }
};
}  // namespace emu
