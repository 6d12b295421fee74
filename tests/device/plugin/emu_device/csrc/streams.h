// Streams: a queue of tasks and a thread each. A task starts late, unless somebody waits for it.
#pragma once
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace emu {
constexpr auto EMU = c10::DeviceType::PrivateUse1;
constexpr int NUM_POOL_STREAMS = 32;

inline long read_env(const char* name, long otherwise) {
  auto text = std::getenv(name);
  return text ? std::atol(text) : otherwise;
}

// How late kernels start, in milliseconds: those of default streams, and those of all others.
inline std::atomic<long> default_lag = read_env("EMU_LAG_MS", 20), side_lag = read_env("EMU_SIDE_LAG_MS", default_lag);
inline std::atomic<long> random_sums = read_env("EMU_RANDOM_SUMS", 0);
inline const long ONE_ACCUMULATOR = read_env("EMU_ONE_ACCUMULATOR", 0);
inline const long NUM_DEVICES = read_env("EMU_DEVICES", 2);

// What the host did: every wait for the device with its thread, and, if wanted, every kernel with its stream.
struct Log {
  std::mutex mutex;
  std::vector<std::tuple<long, std::string>> waits;
  std::vector<std::tuple<int, int64_t, std::string>> kernels;
  std::map<std::string, int64_t> kernels_without_shape;
  bool logs_kernels = false;
};
inline Log& log() {
  static auto& one = *new Log;
  return one;
}
inline void log_wait(const std::string& what) {
  auto& to = log();
  std::lock_guard lock(to.mutex);
  to.waits.emplace_back(syscall(SYS_gettid), what);
}

// A kernel that failed ends the device, as on CUDA: every later call raises the same error.
struct Failure {
  std::mutex mutex;
  std::atomic<bool> happened = false;
  std::string message;
};
inline Failure& failure() {
  static auto& one = *new Failure;
  return one;
}
inline void check_device() {
  if (!failure().happened) return;
  std::lock_guard lock(failure().mutex);
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "emu: a kernel failed: " + failure().message);
}

// A thread that waits must not keep Python's lock from those it waits for.
template <class F>
void without_gil(F&& run) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release released;
    run();
  } else {
    run();
  }
}

class Queue {
 public:
  explicit Queue(std::atomic<long>& lag) : lag_(lag) {
    std::thread([this] { work(); }).detach();
  }
  uint64_t push(std::function<void()> run) {
    uint64_t number;
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back({std::move(run), Clock::now() + std::chrono::milliseconds(lag_)});
      number = ++issued_;
    }
    changed_.notify_all();
    return number;
  }
  bool is_done(uint64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }
  // Until task `number` is done. Whoever is `urgent` makes the queue run without delay.
  void wait(uint64_t number, bool urgent = true) {
    without_gil([&] {
      std::unique_lock lock(mutex_);
      if (urgent) urgent_ = std::max(urgent_, number);
      changed_.notify_all();
      changed_.wait(lock, [&] { return done_ >= number; });
    });
  }
  uint64_t last() {
    std::lock_guard lock(mutex_);
    return issued_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Task {
    std::function<void()> run;
    Clock::time_point due;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t issued_ = 0, done_ = 0, urgent_ = 0;
  std::atomic<long>& lag_;

  void work() {
    at::AutoDispatchBelowADInplaceOrView below;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      while (done_ + 1 > urgent_ && Clock::now() < tasks_.front().due) changed_.wait_until(lock, tasks_.front().due);
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        if (!failure().happened) task.run();
      } catch (const std::exception& error) {
        std::lock_guard failed(failure().mutex);
        if (!failure().happened) failure().message = error.what();
        failure().happened = true;
      }
      task.run = nullptr;
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }
};

struct Moment {  // in the life of a queue: what an event holds
  Queue* queue = nullptr;
  uint64_t number = 0;
};

struct Queues {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, Queue*> all;
};
inline Queues& queues() {
  static auto& one = *new Queues;
  return one;
}
inline Queue* queue_of(int device, int64_t stream) {
  std::lock_guard lock(queues().mutex);
  auto& found = queues().all[{device, stream}];
  if (!found) found = new Queue(stream == 0 ? default_lag : side_lag);
  return found;
}
inline Queue* queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
inline std::vector<Queue*> queues_of(int device) {
  std::lock_guard lock(queues().mutex);
  std::vector<Queue*> found;
  for (auto& [key, queue] : queues().all)
    if (key.first == device) found.push_back(queue);
  return found;
}

inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_streams;

inline c10::Stream make_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(EMU, device), id);
}
inline int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
inline c10::Stream current_stream(int device) { return make_stream(device, current_streams[device]); }
inline Queue* current_queue(int device) { return queue_of(current_stream(device)); }

// The host waits: counted, and an error of the device is raised here at the latest.
inline void wait_on_host(Queue* queue, uint64_t number, const std::string& what) {
  log_wait(what);
  queue->wait(number);
  check_device();
}
// One stream waits for another.
inline void wait_on_stream(Queue* waiting, Moment moment) {
  if (moment.queue && moment.queue != waiting)
    waiting->push([moment] { moment.queue->wait(moment.number); });
}
}  // namespace emu
