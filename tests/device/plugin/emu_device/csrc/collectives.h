// Collectives "eccl": gloo on streams of their own. As with NCCL, `wait` makes the current stream wait, not the host.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "operators.h"

namespace emu {
using Tensors = std::vector<at::Tensor>;
using Nested = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Work final : c10d::Work {
  Moment end;
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool isCompleted() override { return end.queue->is_done(end.number); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override { wait_on_stream(current_queue(current_device), end); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

inline Tensors view_all(const Tensors& tensors) {
  Tensors views;
  for (auto& one : tensors) views.push_back(view_for_kernel(one));
  return views;
}
inline Nested view_all(const Nested& nested) {
  Nested views;
  for (auto& one : nested) views.push_back(view_all(one));
  return views;
}
inline Tensors flatten(const Nested& nested) {
  Tensors flat;
  for (auto& one : nested) flat.insert(flat.end(), one.begin(), one.end());
  return flat;
}
inline Tensors join(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}
// gloo knows no average: sums and says that they are to be divided.
template <class Options>
bool replace_average(Options& options) {
  if (options.reduceOp.op_ != c10d::ReduceOp::AVG) return false;
  options.reduceOp = c10d::ReduceOp::SUM;
  return true;
}

class Comm final : public c10d::Backend {
 public:
  explicit Comm(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), first_stream_(next_stream()) {}
  const std::string getBackendName() const override { return "eccl"; }
  bool supportsCoalescing() const override { return false; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("eccl"); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue(tensors, tensors, [g = gloo_, t = view_all(tensors), options]() mutable {
      g->broadcast(t, options)->wait();
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto options = given;
    bool averages = replace_average(options);
    return issue(tensors, tensors, [g = gloo_, t = view_all(tensors), options, averages, n = getSize()]() mutable {
      g->allreduce(t, options)->wait();
      if (averages) for (auto& one : t) one.div_(n);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    c10d::AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    WorkPtr last;
    for (auto& one : tensors) {
      Tensors single{one};
      last = allreduce(single, options);
    }
    return last;
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    auto options = given;
    bool averages = replace_average(options);
    return issue(tensors, tensors, [g = gloo_, t = view_all(tensors), options, averages, n = getSize()]() mutable {
      g->reduce(t, options)->wait();
      if (averages) for (auto& one : t) one.div_(n);
    });
  }
  WorkPtr allgather(Nested& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return issue(join(flatten(out), in), flatten(out), [g = gloo_, o = view_all(out), i = view_all(in), options]() mutable {
      g->allgather(o, i, options)->wait();
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return issue({out, in}, {out}, [g = gloo_, o = view_for_kernel(out), i = view_for_kernel(in), options]() mutable {
      g->_allgather_base(o, i, options)->wait();
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < out.size(); ++i) last = _allgather_base(out[i], in[i], options);
    return last;
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& given) override {
    c10d::AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    bool averages = replace_average(options);
    return issue({out, in}, {out}, [g = gloo_, o = view_for_kernel(out), i = view_for_kernel(in), options, averages,
                                    n = getSize(), r = getRank()]() mutable {
      Tensors whole{i.clone()};
      g->allreduce(whole, options)->wait();
      o.view(-1).copy_(whole[0].view(-1).chunk(n)[r]);
      if (averages) o.div_(n);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < out.size(); ++i) last = _reduce_scatter_base(out[i], in[i], options);
    return last;
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    return issue({out, in}, {out}, [g = gloo_, o = view_for_kernel(out), i = view_for_kernel(in), out_sizes, in_sizes,
                                    options]() mutable { g->alltoall_base(o, i, out_sizes, in_sizes, options)->wait(); });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return issue(join(out, in), out, [g = gloo_, o = view_all(out), i = view_all(in), options]() mutable {
      auto flatten_all = [](const Tensors& tensors, std::vector<int64_t>& sizes) {
        Tensors flat;
        for (auto& one : tensors) {
          flat.push_back(one.reshape(-1));
          sizes.push_back(one.numel());
        }
        return at::cat(flat);
      };
      std::vector<int64_t> out_sizes, in_sizes;
      auto received = flatten_all(o, out_sizes), sent = flatten_all(i, in_sizes);
      g->alltoall_base(received, sent, out_sizes, in_sizes, options)->wait();
      int64_t begin = 0;
      for (auto& one : o) {
        one.copy_(received.narrow(0, begin, one.numel()).view(one.sizes()));
        begin += one.numel();
      }
    });
  }
  WorkPtr scatter(Tensors& out, Nested& in, const c10d::ScatterOptions& options) override {
    return issue(join(out, flatten(in)), out, [g = gloo_, o = view_all(out), i = view_all(in), options]() mutable {
      g->scatter(o, i, options)->wait();
    });
  }
  WorkPtr gather(Nested& out, Tensors& in, const c10d::GatherOptions& options) override {
    return issue(join(in, flatten(out)), flatten(out), [g = gloo_, o = view_all(out), i = view_all(in), options]() mutable {
      g->gather(o, i, options)->wait();
    });
  }
  // Each direction to each rank has a stream, so that two ranks may both send first, as in a group of NCCL's.
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return issue(tensors, {}, [g = gloo_, t = view_all(tensors), to, tag]() mutable { g->send(t, to, tag)->wait(); },
                 1 + 2 * to);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return issue(tensors, tensors,
                 [g = gloo_, t = view_all(tensors), from, tag]() mutable { g->recv(t, from, tag)->wait(); },
                 2 + 2 * from);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = issue({}, {}, [g = gloo_, options] { g->barrier(options)->wait(); });
    auto& end = static_cast<Work*>(work.get())->end;
    wait_on_host(end.queue, end.number, "barrier");
    return work;
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t first_stream_;

  static int64_t next_stream() {
    static std::atomic<int64_t> last = 0;
    return NUM_POOL_STREAMS + 1 + 256 * last++;
  }
  // A collective waits for what the current stream was given so far, and runs on a stream of this group.
  template <class F>
  WorkPtr issue(const Tensors& touched, const Tensors& outputs, F run, int number_of_stream = 0) {
    check_device();
    auto device = touched.empty() ? current_device : touched[0].device().index();
    for (auto& one : touched) TORCH_CHECK(is_emu(one), "eccl: a tensor is on ", one.device());
    c10::DeviceGuard guard(c10::Device(EMU, device));
    auto before = current_queue(device);
    auto stream = make_stream(device, first_stream_ + number_of_stream);
    auto queue = queue_of(stream);
    for (auto& one : touched)
      if (one.numel()) DeviceMemory::instance().recordStream(one.storage().data_ptr(), stream);
    log_kernel("collective");
    wait_on_stream(queue, {before, before->last()});
    auto work = c10::make_intrusive<Work>();
    work->end = {queue, queue->push(std::move(run))};
    work->outputs = outputs;
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{c10::Device(EMU, device)});
    auto old = Guard().exchangeStream(stream);
    work->future->markCompleted(c10::IValue(outputs));
    Guard().exchangeStream(old);
    return work;
  }
};
}  // namespace emu
